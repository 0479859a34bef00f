"""A whole checkpoint from speculators' format to the flat one: config rewritten, tensors byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from eagle3.atomic_files import link_or_copy, write_json
from eagle3.formats.checkpoint_copies import link_checkpoint
from eagle3.formats.checkpoint_files import PROBE
from eagle3.formats.flat_config import flatten
from eagle3.formats.json_files import printable, read_json_object, spelled
from eagle3.problems import InvalidInput, Problem, invalid

ORIGINAL = "config_speculators.json"
EMBEDDING = "embed_tokens.weight"


def read_config(folder: Path) -> dict[str, Any]:
    """A config that is to be rewritten: a key that stands twice is refused, since the copy would hide the doubt."""
    config = read_json_object(folder / "config.json")
    if config.repeated:
        raise InvalidInput(
            *(
                Problem("repeated-key", printable(key.where), spelled(key.values), "the key once", "keep one of them")
                for key in config.repeated
            )
        )
    return config.value


def flatten_checkpoint(source: Path, target: Path, dropped: frozenset[str] = frozenset()) -> list[str]:
    """One checkpoint in the flat form; the names of the files that are the source's, byte for byte.

    `target` must not exist. A tensor in `dropped` is left out; the embedding only where training kept it frozen, since
    the server puts the verifier's in its place.
    """
    config = read_config(source)
    flat = flatten(config)
    if EMBEDDING in dropped and config.get("embed_requires_grad") is not False:
        raise invalid(
            "trained-embedding",
            "embed_requires_grad",
            spelled(config.get("embed_requires_grad")),
            "false: only a frozen embedding equals the verifier's",
            "keep it: flatten.drop_embed_tokens: false",
            "the server would share the verifier's embedding with a draft that was trained on another",
        )
    target.mkdir(parents=True)
    write_json(target / "config.json", flat)
    shutil.copyfile(source / "config.json", target / ORIGINAL)
    linked = link_checkpoint(source, target, dropped)
    if (source / PROBE).is_file():
        link_or_copy(source / PROBE, target / PROBE)
        linked.append(PROBE)
    return linked


def flatten_folder(source: Path, target: Path) -> None:
    """`eagle3 flatten SRC DST`: like `flatten_checkpoint`, and DST is there only when it is complete."""
    if target.exists():
        raise invalid(
            "exists", printable(str(target)), "something is there", "a new folder", "remove it, or name another"
        )
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        flatten_checkpoint(source, partial)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
