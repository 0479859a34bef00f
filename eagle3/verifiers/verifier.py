"""The verifier: where its files are, what is wrong with them, and the digest by which every manifest names it."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.atomic_files import sha256_of_json
from eagle3.formats.json_files import read_json_object
from eagle3.formats.safetensors_headers import read_header
from eagle3.params import VerifierParams
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.verifiers.dequantise import dequantised_verifier
from eagle3.verifiers.user_cache import cached_sha256

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tiktoken.model")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# The files that decide what the verifier says: all of them, and no other, are its identity.
IDENTITY_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *(*TOKENIZER_FILES, *TEMPLATE_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "*.py"),
)
# Names of the context window; the smallest holds (vLLM 0.32.0, vllm/transformers_utils/model_arch_config_convertor.py).
WINDOW_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Verifier:
    """A verifier on this machine.

    source and revision are the parameters' words; path is a local folder and belongs into no manifest. sha256 is over
    config, tokenizer, chat template and every weight file. config is the raw config.json.
    """

    source: str
    revision: str | None
    path: Path
    sha256: str
    config: dict[str, Any]

    def identity(self) -> dict[str, str | None]:
        return {"source": self.source, "revision": self.revision, "sha256": self.sha256}

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the language model, which multimodal models nest."""
        return text_config(self.config)

    @property
    def window(self) -> int:
        """Tokens of the context window, as config.json says."""
        return min(self.text_config[key] for key in WINDOW_KEYS if _positive(self.text_config.get(key)))


def resolve_verifier(params: VerifierParams) -> Verifier:
    """The verifier's folder, checked and digested.

    `InvalidInput` for: a source that is neither a folder, a hub id with its commit nor a file in a package; a hub
    model that can be had neither from the cache nor from the hub; every file that is missing in the folder; and
    another content than `verifier.sha256` pins. The code of a model is never run here.
    """
    path = _local_folder(params)
    if problems := list(folder_problems(path)):
        raise InvalidInput(*problems)
    sha256 = identity_sha256(path)
    if params.sha256 not in (None, sha256):
        raise invalid(
            "verifier-changed",
            "verifier.sha256",
            f"{sha256}, the content of {params.source}",
            f"{params.sha256}, as params.yaml pins",
            f"bring the pinned files back, or accept the new ones: dvc exp run -S verifier.sha256={sha256}",
            "a draft trained on one verifier and served with another loses its acceptance without an error",
        )
    config = read_json_object(path / "config.json").value
    return Verifier(params.source, params.revision, path, sha256, config)


def require_window(verifier: Verifier, max_model_len: int) -> None:
    """`InvalidInput` when the engine is to have a longer window than the verifier."""
    if max_model_len > verifier.window:
        raise invalid(
            "window",
            "sample.max_model_len",
            str(max_model_len),
            f"at most {verifier.window}, the window of {verifier.source}",
            f"dvc exp run -S sample.max_model_len={verifier.window}",
            "vLLM 0.32.0 refuses to start",
        )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def identity_sha256(path: Path) -> str:
    """sha256 over the digests of every file that decides what the verifier says, by relative name."""
    return sha256_of_json({file.name: cached_sha256(file) for file in _identity_files(path)})


def _identity_files(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in IDENTITY_FILES)
    )


def _local_folder(params: VerifierParams) -> Path:
    source = params.source
    if source.startswith("package:"):
        _refuse_revision(params)
        return dequantised_verifier(source)
    # a temporary experiment runs in a folder of its own, where a relative path would lead nowhere
    for root in (Path(), Path(os.environ.get("DVC_ROOT", "."))):
        folder = root / Path(source).expanduser()
        if folder.is_dir():
            _refuse_revision(params)
            return folder.absolute()
    if HUB_ID.fullmatch(source) and params.revision:
        return _hub_snapshot(source, params.revision, params.trust_remote_code)
    raise invalid(
        "verifier-missing",
        "verifier.source",
        f"{source}: no such folder" + ("" if params.revision else ", and verifier.revision is null"),
        "a folder, a hub id with the 40-hex commit in verifier.revision, or package:MODULE/FILE.gguf",
        "correct verifier.source, or set verifier.revision if it is a hub id",
    )


def _refuse_revision(params: VerifierParams) -> None:
    if params.revision:
        raise invalid(
            "verifier-revision",
            "verifier.revision",
            f"{params.revision} beside {params.source}",
            "null: only a model on the hub has a revision",
            "set verifier.revision to null (a folder's content is pinned by verifier.sha256)",
        )


def _hub_snapshot(source: str, revision: str, with_code: bool) -> Path:
    """The snapshot of one commit: from the hub's cache when whole, else downloaded. Pickles are never fetched."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "*.txt", *(["*.py"] if with_code else [])]
    fetch = {"revision": revision, "allow_patterns": wanted, "ignore_patterns": ["*/*"]}
    try:
        cached = Path(snapshot_download(source, local_files_only=True, **fetch))
        if not list(folder_problems(cached)):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not in the cache: the hub is asked
    try:
        return Path(snapshot_download(source, **fetch))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError) as error:
        raise invalid(
            "verifier-missing",
            "verifier.source",
            f"{source} at {revision[:12]} is neither in the hub's cache nor to be had: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            "a model on the hub, or a local copy",
            "where the hub can be reached (and with `hf auth login` for a gated model) run: hf download "
            f"{source} --revision {revision}; or copy the model here and give its folder as verifier.source, with "
            "verifier.revision null",
        ) from None


def folder_problems(path: Path) -> Iterator[Problem]:
    """Everything that keeps a folder from being a verifier, each with its remedy."""
    yield from _config_problems(path)
    yield from _weight_problems(path)
    if not _any_of(path, TOKENIZER_FILES):
        yield Problem(
            "no-tokenizer",
            str(path),
            "no tokenizer file",
            "one of " + ", ".join(TOKENIZER_FILES),
            "copy the tokenizer's files of the model into the folder",
        )
    if not _has_chat_template(path):
        yield Problem(
            "no-chat-template",
            str(path),
            "no chat_template.jinja, and no chat_template in tokenizer_config.json",
            "a chat template: the draft is trained on the prompts that the server will render",
            "use the instruction-tuned model, or save the template that you will serve with as chat_template.jinja in "
            "a local copy of the model",
        )


def _config_problems(path: Path) -> Iterator[Problem]:
    try:
        config = text_config(read_json_object(path / "config.json").value)
    except InvalidInput as error:
        yield from _located(path, error)
        return
    where = str(path / "config.json")
    if not any(_positive(config.get(key)) for key in WINDOW_KEYS):
        yield Problem(
            "no-window",
            f"{where}: max_position_embeddings",
            repr(config.get("max_position_embeddings", "absent")),
            "the tokens of the context window",
            "write the model's max_position_embeddings into config.json",
            "vLLM 0.32.0 takes a default of the model class or 2048 where no key gives the window",
        )
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not _positive(config.get(key)):
            found = repr(config.get(key, "absent"))
            fix = f"mend {key} in config.json"
            yield Problem("verifier-config", f"{where}: {key}", found, "a positive integer", fix)


def _weight_problems(path: Path) -> Iterator[Problem]:
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in path.glob(pattern))
        yield Problem(
            "no-weights",
            str(path),
            f"no *.safetensors file ({', '.join(others[:5]) or 'nor any other weights'})",
            "the verifier's weights as safetensors",
            "download the model again, or convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)",
        )
    for file in weights:
        try:
            read_header(file)
        except InvalidInput as error:
            if _is_lfs_pointer(file):
                found = "a Git LFS pointer, not the weights"
                yield Problem("no-weights", str(file), found, "a safetensors file", f"git lfs pull (in {path})")
            else:
                yield from _located(path, error)
    if missing := sorted(_indexed_files(path) - {file.name for file in weights}):
        yield Problem(
            "no-weights",
            str(path / INDEX),
            f"{len(missing)} file(s) of the index are not there: {', '.join(missing[:5])}",
            "every file that the index names",
            "download the model again",
        )


def _located(path: Path, error: InvalidInput) -> Iterator[Problem]:
    """Its problems, which name a file of the folder `path` alone."""
    yield from (replace(problem, where=str(path / problem.where)) for problem in error.problems)


def _is_lfs_pointer(file: Path) -> bool:
    if not file.is_file():
        return False
    with open(file, "rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def _indexed_files(path: Path) -> set[str]:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return {str(name) for name in index["weight_map"].values()}
    except FileNotFoundError:
        return set()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise invalid(
            "no-weights", str(path / INDEX), "no weight_map", "an index of safetensors files", "download it again"
        ) from None


def _has_chat_template(path: Path) -> bool:
    if _any_of(path, TEMPLATE_FILES):
        return True
    try:
        return bool(read_json_object(path / "tokenizer_config.json").value.get("chat_template"))
    except InvalidInput:
        return False


def _any_of(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(path.glob(pattern), None) for pattern in patterns)


def _positive(value: object) -> bool:
    return type(value) is int and value > 0
