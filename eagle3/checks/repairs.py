"""`check --fix`: a repaired copy of a checkpoint, made of the certain changes that its problems carry and of no others.

Light: the standard library. The words of a problem's `fix` and what is done here are one `Change`
(eagle3/problems.py). Changes of the config come first and the copy is judged again, since a wrong size makes right
tensors look wrong; a change that its own condition forbids (a map that would have to be all zero) is left and said.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from eagle3.atomic_files import link_or_copy
from eagle3.checks.config_check import Verdict
from eagle3.formats.checkpoint_copies import NewTensor, rewrite, write_index
from eagle3.formats.checkpoint_files import INDEX, CheckpointTensors, read_checkpoint_tensors
from eagle3.formats.json_files import printable, read_json_object
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import Change, InvalidInput, Problem, invalid

CONFIG_KINDS = ("write", "remove", "keep")
ROUNDS = 8
# What the files are is not known, so no field of them is.
FOREIGN = ("other-drafter", "not-eagle3")
MAX_IDS = 1 << 22
CODES = {
    "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U64": "Q", "U32": "I", "U16": "H", "U8": "B", "BOOL": "B",
    "F32": "f", "F64": "d",
}  # fmt: skip


@dataclass
class Repairs:
    """What was done. changed and left are sentences; verdict is that of the copy, or of the original without one."""

    verdict: Verdict
    changed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[str]]:
        """What `--fix` adds to the JSON object of the verdict."""
        return {"changed": self.changed, "left": self.left}

    def told(self) -> str:
        lines = [f"changed: {each}" for each in self.changed] + [f"left:    {each}" for each in self.left]
        of = "the verdict on the copy:" if self.changed else "nothing is certain, no copy was written; the verdict:"
        return "\n".join([*lines, of])


def write_repaired(folder: Path, out: Path, judge: Callable[[Path], Verdict]) -> Repairs:
    """Write a repaired copy of `folder` to `out`, which must not exist, and judge it; nothing certain: no copy.

    `judge` gives the verdict on a folder. Tensor files without a change are hard links where the file system has them.
    """
    if out.exists() or out.is_symlink():
        raise invalid("exists", printable(str(out)), "something is there", "a new folder", "remove it, or name another")
    repairs = Repairs(judge(folder))
    doubtful = [each for each in repairs.verdict.problems if each.code == "repeated-key" and not each.changes]
    if doubtful:  # a copy would hold one of the values, and the doubt would be gone unsaid
        raise InvalidInput(*doubtful)
    staging = out.with_name(f".{out.name}.partial-{os.getpid()}")
    made: set[str] = set()
    here = folder
    try:
        for number in range(ROUNDS):
            changes = [each for each in _certain(repairs.verdict.problems) if repr(each) not in made]
            if not changes:
                break
            made |= {repr(each) for each in changes}
            there = staging / str(number)
            there.mkdir(parents=True)
            _copy(here, there, changes, repairs)
            if here != folder:
                shutil.rmtree(here)
            here, repairs.verdict = there, judge(there)
        if repairs.changed:
            os.replace(here, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    repairs.left += [f"{each.code}: {each.where} ({each.fix})" for each in repairs.verdict.problems]
    return repairs


def _certain(problems: Iterable[Problem]) -> list[Change]:
    """The changes of one round: those of the config, and those of the tensors only when the config needs none."""
    every = list(problems)
    if any(problem.code in FOREIGN for problem in every):
        return []
    changes = list({repr(change): change for problem in every for change in problem.changes}.values())
    config = [change for change in changes if change.kind in CONFIG_KINDS]
    maps = [change for change in changes if change.where == "d2t"]
    return config or [change for change in changes if change.where != "d2t"] + maps[:1]


def _copy(here: Path, there: Path, changes: list[Change], repairs: Repairs) -> None:
    """`here` with `changes` as `there`; everything else of the folder that is a plain file comes along."""
    config = read_json_object(here / "config.json").value
    for change in changes:
        if change.kind in CONFIG_KINDS:
            _edit(config, change)
            repairs.changed.append(f"config.json: {change.told()}")
    (there / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    checkpoint = read_checkpoint_tensors(here)
    plan = _Plan(checkpoint, repairs)
    for change in changes:
        if change.kind not in CONFIG_KINDS:
            plan.add(change)
    plan.write(there)
    tensor_files = {file.path.name for file in checkpoint.files}
    for path in sorted(here.iterdir()):
        if path.name in tensor_files or path.name in ("config.json", INDEX):
            continue
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, there / path.name)
        else:
            repairs.left.append(f"{printable(path.name)}: not copied")


def _edit(config: dict[str, Any], change: Change) -> None:
    """One key of config.json at a dotted path; the names on it are ours, none has a dot of its own."""
    if change.kind == "keep":
        return  # what was read holds the last of the values already
    *path, key = change.where.split(".")
    for name in path:
        if not isinstance(config.get(name), dict):
            config[name] = {}
        config = config[name]
    if change.kind == "write":
        config[key] = change.value
    else:
        config.pop(key, None)


class _Plan:
    """What becomes of each tensor; a change that its condition forbids goes to `repairs.left`."""

    def __init__(self, checkpoint: CheckpointTensors, repairs: Repairs) -> None:
        self.checkpoint = checkpoint
        self.repairs = repairs
        self.new: dict[str, NewTensor | None] = {}
        self.added: list[NewTensor] = []

    def add(self, change: Change) -> None:
        tensors = self.checkpoint.tensors
        why = ""
        if change.kind in ("strip", "rename", "rename one"):
            to = change.value or ""
            old = [name for name in tensors if name.startswith(change.where)]
            old = [change.where] if change.kind == "rename one" else old
            names = {name: to + name.removeprefix(change.where) for name in old}
            taken = {*names.values()} & (set(tensors) - set(names))
            why = f"{printable(min(taken))} is there already" if taken else ""
            self.new |= {} if why else {name: _as_it_is(tensors[name], new) for name, new in names.items()}
        elif change.kind == "drop" and change.where != "d2t":
            gone = [name for name in tensors if name == change.where or name.startswith(change.where.removesuffix("*"))]
            self.new |= dict.fromkeys(gone if change.where.endswith("*") else [change.where])
        elif change.kind != "index":
            why = self._map(change)
        if why:
            self.repairs.left.append(f"{change.told()}: not done, {why}")
        else:
            self.repairs.changed.append(f"tensors: {change.told()}")

    def _map(self, change: Change) -> str:
        """Changes of d2t; why not, or ''."""
        source = self.checkpoint.tensors.get("t2d" if change.kind == "from mask" else "d2t")
        ids = read_ids(source) if source else None
        if source is None or ids is None:
            return "its numbers are not whole or not readable"
        if change.kind == "drop":
            if any(ids):
                return "it is not all zero"
            self.new["d2t"] = None
            return ""
        if change.kind == "offsets":
            ids = [value - index for index, value in enumerate(ids)]
        elif change.kind == "from mask":
            ids = [value - index for index, value in enumerate(index for index, mark in enumerate(ids) if mark)]
            rows = next((each.shape[0] for each in self._heads()), len(ids))
            if len(ids) != rows:
                return f"t2d marks {len(ids)} tokens, lm_head has {rows} rows"
        shape = source.shape if change.kind in ("integers", "offsets") else (len(ids),)
        tensor = NewTensor("d2t", "I64", shape, array("q", ids).tobytes())
        if change.kind == "from mask":
            self.added.append(tensor)
        else:
            self.new["d2t"] = tensor
        return ""

    def _heads(self) -> list[TensorHeader]:
        return [each for name, each in self.checkpoint.tensors.items() if name == "lm_head.weight" and each.shape]

    def write(self, there: Path) -> None:
        """The tensor files: linked where nothing in them changes, the index made anew where there was one."""
        files = self.checkpoint.files
        for number, file in enumerate(files):
            mine = {tensor.name: self.new[tensor.name] for tensor in file.tensors if tensor.name in self.new}
            added = self.added if number == 0 else []
            if mine or added:
                rewrite(file, there / file.path.name, mine, added)
            else:
                link_or_copy(file.path, there / file.path.name)
        if files and (files[0].path.parent / INDEX).is_file():
            write_index(there, read_without_index(there))


def read_without_index(folder: Path) -> Iterable[TensorHeader]:
    return read_checkpoint_tensors(folder).tensors.values()


def _as_it_is(tensor: TensorHeader, name: str) -> NewTensor:
    return NewTensor(name, tensor.dtype, tensor.shape)


def read_ids(tensor: TensorHeader) -> list[int] | None:
    """The numbers of a map or mask as integers; None where they are not whole, too many, or packed."""
    if tensor.dtype not in CODES or prod(tensor.shape) > MAX_IDS:
        return None
    with open(tensor.file, "rb") as file:
        file.seek(tensor.begin)
        numbers = array(CODES[tensor.dtype], file.read(tensor.end - tensor.begin))
    try:
        ids = [int(number) for number in numbers]
    except (ValueError, OverflowError):  # NaN, infinity
        return None
    whole = all(a == b for a, b in zip(ids, numbers, strict=True))
    return ids if whole and all(-(2**63) <= each < 2**63 for each in ids) else None
