"""A checkpoint in the form of another reader: config and tensor names turned, then judged for that reader.

What `check` calls an error of the result is refused, and nothing is written: a folder that is there is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.atomic_files import write_json
from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.config_check import Verdict
from eagle3.checks.draft_config import type_problems
from eagle3.formats.checkpoint_copies import link_checkpoint
from eagle3.formats.checkpoint_files import read_checkpoint_tensors
from eagle3.formats.config_formats import recognise
from eagle3.formats.config_forms import FORMS, Verifier, from_flat, tensor_name, to_flat
from eagle3.formats.flat_config import flatten, verifier_architectures
from eagle3.formats.flattening import ORIGINAL, read_config
from eagle3.formats.json_files import printable, read_json_object
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.verifiers.verifier_config import VerifierConfig


def export_folder(
    source: Path, target: Path, engine: str, verifier: VerifierConfig | None, options: Verifier
) -> Verdict:
    """Write `source` to `target`, which must not exist, in the form of `engine`; the verdict on the result.

    `options` has the name and number of tokens that speculators' format holds; its architectures are set here.
    """
    if target.exists() or target.is_symlink():
        raise invalid(
            "exists", printable(str(target)), "something is there", "a new folder", "remove it, or name another"
        )
    config, names = read_config(source), read_checkpoint_tensors(source).tensors
    _refuse_what_is_no_draft(config, names)
    original = _original(source, config)
    known = _verifier(original, verifier, options)
    flat, form = to_flat(config, known), FORMS[engine]
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        link_checkpoint(source, partial, rename=lambda name: tensor_name(name, form))
        same = original is not None and flatten(original) == flat
        if form.nested and same:
            shutil.copyfile(_original_path(source, config), partial / "config.json")
        else:
            write_json(partial / "config.json", from_flat(flat, engine, known, "lm_head.weight" in names))
            if same:
                shutil.copyfile(_original_path(source, config), partial / ORIGINAL)
        verdict, _ = check_checkpoint(partial, verifier, engine="sglang" if engine == "sglang" else "vllm")
        errors = [problem for problem in verdict.problems if problem.severity == "error"]
        if errors:
            raise InvalidInput(*errors)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return verdict


def _original_path(source: Path, config: dict[str, Any]) -> Path:
    """The nested config that a checkpoint comes from: its own, or the one that flatten put beside."""
    return source / ("config.json" if "transformer_layer_config" in config else ORIGINAL)


def _original(source: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    path = _original_path(source, config)
    return read_json_object(path).value if path.is_file() else None


def _refuse_what_is_no_draft(config: dict[str, Any], names: Mapping[str, TensorHeader]) -> None:
    """Another drafter, a value of the wrong type, packed tensors: nothing is turned that is not understood."""
    recognised, problems = recognise(config, names)
    if recognised is None:
        raise InvalidInput(*problems)
    problems, _ = type_problems(recognised.raw, recognised.nested)
    if config.get("quantization_config"):
        found, expected = "present", "absent: it names layers as they are called now"
        problems.append(Problem("no-such-form", "quantization_config", found, expected, "export it before quantising"))
    if problems:
        raise InvalidInput(*problems)


def _verifier(original: dict[str, Any] | None, verifier: VerifierConfig | None, options: Verifier) -> Verifier:
    """What is known of the verifier: from its config, else from the names that speculators noted."""
    names: tuple[str, ...] | None = verifier.architectures if verifier else None
    if not names and original is not None:
        names = tuple(verifier_architectures(original)) or None
    layers = verifier.num_hidden_layers if verifier else None
    return Verifier(names or None, layers, options.name, options.num_speculative_tokens)
