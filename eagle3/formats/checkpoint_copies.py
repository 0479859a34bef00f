"""The tensor files of a checkpoint in another folder: linked byte for byte, or copied without some tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagle3.atomic_files import BLOCK, link_or_copy, write_json
from eagle3.formats.checkpoint_files import INDEX, CheckpointTensors, read_checkpoint_tensors
from eagle3.formats.json_files import printable
from eagle3.formats.safetensors_headers import FileHeader, write_header
from eagle3.problems import InvalidInput, Problem


def copy_without(source: FileHeader, target: Path, dropped: frozenset[str]) -> None:
    """Copy a safetensors file without the tensors in `dropped`; every other tensor keeps its bytes and its order."""
    kept = [tensor for tensor in source.tensors if tensor.name not in dropped]
    header = write_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in kept}, source.metadata)
    with open(source.path, "rb") as reader, open(target, "wb") as writer:
        writer.write(header)
        for tensor in kept:
            reader.seek(tensor.begin)
            left = tensor.end - tensor.begin
            while left:
                block = reader.read(min(left, BLOCK))
                assert block, "the header was checked against the size of the file"
                writer.write(block)
                left -= len(block)


def link_checkpoint(source: Path, target: Path, dropped: frozenset[str] = frozenset()) -> list[str]:
    """Put the tensor files and the index of `source` into `target`; the names of the files that are unchanged.

    A file is hard-linked, byte for byte, unless it holds a tensor in `dropped`: then it is written without it.
    """
    checkpoint = read_checkpoint_tensors(source)
    if checkpoint.problems or not checkpoint.files:
        raise InvalidInput(*(checkpoint.problems or [_no_weights(source)]))
    unchanged = []
    for file in checkpoint.files:
        if any(tensor.name in dropped for tensor in file.tensors):
            copy_without(file, target / file.path.name, dropped)
        else:
            link_or_copy(file.path, target / file.path.name)
            unchanged.append(file.path.name)
    if (source / INDEX).is_file() and len(unchanged) == len(checkpoint.files):
        shutil.copyfile(source / INDEX, target / INDEX)
    elif (source / INDEX).is_file():
        _write_index(checkpoint, target, dropped)
    return unchanged


def _write_index(checkpoint: CheckpointTensors, target: Path, dropped: frozenset[str]) -> None:
    kept = [tensor for name, tensor in sorted(checkpoint.tensors.items()) if name not in dropped]
    total = sum(tensor.end - tensor.begin for tensor in kept)
    weight_map = {tensor.name: tensor.file.name for tensor in kept}
    write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _no_weights(folder: Path) -> Problem:
    return Problem(
        "no-weights", printable(folder.name), "no *.safetensors", "the tensors of a draft", "export it again"
    )
