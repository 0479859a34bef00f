"""The tensor files of a checkpoint in another folder: linked byte for byte, or copied with some tensors changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.atomic_files import BLOCK, link_or_copy, write_json
from eagle3.file_faults import naming
from eagle3.formats.checkpoint_files import INDEX, read_checkpoint_tensors
from eagle3.formats.json_files import printable
from eagle3.formats.safetensors_headers import FileHeader, TensorHeader, write_header
from eagle3.problems import InvalidInput, Problem


@dataclass(frozen=True)
class NewTensor:
    """What a tensor of a rewritten file becomes; `data` None: the bytes that it has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None


def rewrite(source: FileHeader, target: Path, plan: Mapping[str, NewTensor | None], added: list[NewTensor]) -> None:
    """Copy a safetensors file with some tensors changed: `plan` has them by their old name, None drops one.

    `added` are put behind the others. Every tensor that is not in `plan` keeps its name and its bytes.
    """
    kept = [(old, plan.get(old.name, NewTensor(old.name, old.dtype, old.shape))) for old in source.tensors]
    rows = [(old, new) for old, new in kept if new is not None] + [(None, new) for new in added]
    header = write_header({new.name: (new.dtype, new.shape) for _, new in rows}, source.metadata)
    with naming(target), open(source.path, "rb") as reader, open(target, "xb") as writer:
        writer.write(header)
        for old, new in rows:
            if old is None or new.data is not None:
                assert new.data is not None
                writer.write(new.data)
                continue
            reader.seek(old.begin)
            left = old.end - old.begin
            while left:
                block = reader.read(min(left, BLOCK))
                assert block, "the header was checked against the size of the file"
                writer.write(block)
                left -= len(block)


def link_checkpoint(
    source: Path, target: Path, dropped: frozenset[str] = frozenset(), rename: Callable[[str], str] = str
) -> list[str]:
    """Put the tensor files and the index of `source` into `target`; the names of the files that are unchanged.

    A file is hard-linked, byte for byte, unless it holds a tensor in `dropped` or one that `rename` gives another name:
    then it is written again, every tensor that is left with its bytes.
    """
    checkpoint = read_checkpoint_tensors(source)
    if checkpoint.problems or not checkpoint.files:
        raise InvalidInput(*(checkpoint.problems or [_no_weights(source)]))
    unchanged = []
    for file in checkpoint.files:
        plan: dict[str, NewTensor | None] = {
            each.name: None if each.name in dropped else NewTensor(rename(each.name), each.dtype, each.shape)
            for each in file.tensors
            if each.name in dropped or rename(each.name) != each.name
        }
        if plan:
            rewrite(file, target / file.path.name, plan, [])
        else:
            link_or_copy(file.path, target / file.path.name)
            unchanged.append(file.path.name)
    if (source / INDEX).is_file() and len(unchanged) == len(checkpoint.files):
        shutil.copyfile(source / INDEX, target / INDEX)
    elif (source / INDEX).is_file():
        kept = [tensor for name, tensor in sorted(checkpoint.tensors.items()) if name not in dropped]
        write_index(target, [replace(tensor, name=rename(tensor.name)) for tensor in kept])
    return unchanged


def write_index(folder: Path, tensors: Iterable[TensorHeader]) -> None:
    """The index of shards, made of the tensors that the files hold."""
    every = list(tensors)
    total = sum(tensor.end - tensor.begin for tensor in every)
    weight_map = {tensor.name: tensor.file.name for tensor in every}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _no_weights(folder: Path) -> Problem:
    return Problem(
        "no-weights", printable(folder.name), "no *.safetensors", "the tensors of a draft", "export it again"
    )
