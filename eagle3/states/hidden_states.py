"""data/hidden_states: shards of the verifier's hidden states, filled in place by the engine, read by memory map.

A aux layers, H hidden size, T tokens of a sample, N tokens of a shard, n samples of a shard. A shard is one safetensors
file, `shard-<first 16 hex digits of its key>.safetensors`:

    offsets        int64  [n + 1]         sample i has the rows offsets[i]..offsets[i + 1]
    input_ids      int32  [N]
    hidden_states  bf16   [N, A + 1, H]   ids of `eagle3.layer_ids`, ascending; the last slice before the final norm
    loss_mask      bool   [N]             the verifier's own answer
    with fp8 (eagle3.states.fp8) in place of bf16:
    scales         f32    [N, A + 1]      what the stored numbers are multiplied with
    squares        f32    [n, A + 1, 2]   of the rounding's error and of the states: the manifest's error
    hidden_states  fp8    [N, A + 1, H]
    __metadata__   sample_ids, splits, num_prompt: JSON lists of length n

`eagle3.states.shard_plan` says where shards end and what their keys are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3.formats.safetensors_headers import read_header
from eagle3.manifests import read_manifest
from eagle3.problems import InvalidInput, Problem
from eagle3.states.fp8 import dequantise, relative_errors
from eagle3.states.shard_plan import Shard


def map_shard(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a shard, mapped: nothing is read before it is used."""
    return load_file(path)


def read_states(tensors: dict[str, torch.Tensor], rows: Any, states: Any = slice(None)) -> torch.Tensor:
    """bf16 states of these rows of a mapped shard, at these of its A + 1 places; a view, or a new tensor of fp8."""
    stored = tensors["hidden_states"][rows, states]
    return dequantise(stored, tensors["scales"][rows, states]) if "scales" in tensors else stored


def store_errors(folder: Path, shards: Sequence[Shard], layer_ids: Sequence[int]) -> dict[str, float]:
    """Layer id -> relative error of storing as fp8, over all tokens but the first of each sample."""
    errors = relative_errors(map_shard(folder / shard.name)["squares"] for shard in shards)
    return dict(zip(map(str, layer_ids), errors, strict=True))


@dataclass(frozen=True)
class SampleStates:
    """One sample of the store: bf16 or fp8 [T, A + 1, H], int32 [T], bool [T], all views of a mapped file.

    scales_TA: float32 [T, A + 1] beside fp8, else None.
    """

    sample_id: str
    split: str
    num_prompt: int
    stored_TAH: torch.Tensor
    input_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    scales_TA: torch.Tensor | None = None

    @cached_property
    def hidden_TAH(self) -> torch.Tensor:
        """bf16: what is stored, or a new tensor of fp8, made when it is first asked for."""
        return self.stored_TAH if self.scales_TA is None else dequantise(self.stored_TAH, self.scales_TA)


def sample_states(
    tensors: dict[str, torch.Tensor], index: int, sample_id: str, split: str, num_prompt: int
) -> SampleStates:
    """The sample at place `index` of a mapped shard."""
    begin, end = tensors["offsets"][index : index + 2].tolist()
    stored, ids, mask = (tensors[name][begin:end] for name in ("hidden_states", "input_ids", "loss_mask"))
    scales_TA = tensors["scales"][begin:end] if "scales" in tensors else None
    return SampleStates(sample_id, split, num_prompt, stored, ids, mask, scales_TA)


@dataclass(frozen=True)
class _Entry:
    path: Path
    index: int
    split: str
    num_prompt: int


class HiddenStates:
    """Random access to the samples of `data/hidden_states`, in any order and from several processes.

    Opening reads the shards' headers alone. `InvalidInput` for a folder whose shards are not those of its manifest.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder, "extract")
        self.manifest = manifest
        self._entries = dict(sorted(_entries(folder, manifest.files)))
        self._maps: dict[Path, dict[str, torch.Tensor]] = {}

    @property
    def sample_ids(self) -> list[str]:
        """In ascending order."""
        return list(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def split_of(self, sample_id: str) -> str:
        return self._entries[sample_id].split

    def get(self, sample_id: str) -> SampleStates:
        entry = self._entries[sample_id]
        if entry.path not in self._maps:
            self._maps[entry.path] = map_shard(entry.path)
        return sample_states(self._maps[entry.path], entry.index, sample_id, entry.split, entry.num_prompt)

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the files itself; sending the maps would copy them."""
        return {**vars(self), "_maps": {}}


def _entries(folder: Path, files: dict[str, Any]) -> Iterator[tuple[str, _Entry]]:
    present = {path.name for path in folder.glob("shard-*.safetensors")}
    if problems := [*_absent(folder, set(files) - present), *_foreign(folder, present - set(files))]:
        raise InvalidInput(*problems)
    for name in sorted(present):
        metadata = read_header(folder / name).metadata
        columns = (json.loads(metadata[key]) for key in ("sample_ids", "splits", "num_prompt"))
        for index, (sample_id, split, num_prompt) in enumerate(zip(*columns, strict=True)):
            yield sample_id, _Entry(folder / name, index, split, num_prompt)


def _absent(folder: Path, names: set[str]) -> Iterator[Problem]:
    for name in sorted(names):
        found, expected = "no such file", "a shard of the manifest"
        yield Problem("missing-shard", str(folder / name), found, expected, "dvc repro extract")


def _foreign(folder: Path, names: set[str]) -> Iterator[Problem]:
    for name in sorted(names):
        fix = f"remove {folder / name}, or: dvc repro extract"
        yield Problem("foreign-shard", str(folder / name), "not in the manifest", "the manifest's shards alone", fix)
