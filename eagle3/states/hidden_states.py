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

The key is the sha256 of everything that the content depends on, and boundaries between shards are a function of the
sample ids alone: adding samples changes only the shards they fall in, and no shard can stand for other inputs.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from eagle3.formats.safetensors_headers import num_bytes, read_header, write_header
from eagle3.manifests import read_manifest
from eagle3.problems import InvalidInput, Problem
from eagle3.states.fp8 import dequantise, relative_errors
from eagle3.states.store_dtypes import BFLOAT16, FP8, STORE_DTYPES, bytes_per_token

FORMAT = 1


class StoredSample(Protocol):
    """What a shard keeps of a sample (`eagle3.sampling.samples.Sample` has it)."""

    @property
    def sample_id(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def input_ids(self) -> Sequence[int]: ...
    @property
    def loss_mask(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Shard:
    """One shard to be: its samples in order, and the sizes that fix its layout. num_states = A + 1."""

    key: str
    samples: tuple[StoredSample, ...]
    num_states: int
    hidden_size: int
    store_dtype: str = BFLOAT16

    @property
    def name(self) -> str:
        return f"shard-{self.key[:16]}.safetensors"

    @cached_property
    def offsets(self) -> list[int]:
        return [0, *accumulate(len(sample.input_ids) for sample in self.samples)]

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) in file order; the widest types first, so that each tensor is aligned."""
        num_tokens, num_samples, num_states = self.num_tokens, len(self.samples), self.num_states
        scales = {"scales": ("F32", (num_tokens, num_states)), "squares": ("F32", (num_samples, num_states, 2))}
        return {
            "offsets": ("I64", (num_samples + 1,)),
            "input_ids": ("I32", (num_tokens,)),
            **(scales if self.store_dtype == FP8 else {}),
            "hidden_states": (STORE_DTYPES[self.store_dtype], (num_tokens, num_states, self.hidden_size)),
            "loss_mask": ("BOOL", (num_tokens,)),
        }

    @cached_property
    def header(self) -> bytes:
        samples = self.samples
        metadata = {
            "num_prompt": json.dumps([sample.num_prompt for sample in samples]),
            "sample_ids": json.dumps([sample.sample_id for sample in samples]),
            "splits": json.dumps([sample.split for sample in samples]),
        }
        return write_header(self.tensors, metadata)

    @cached_property
    def begins(self) -> dict[str, int]:
        """The byte position of each tensor in the file, and of its end as `""`."""
        ends = accumulate((num_bytes(*tensor) for tensor in self.tensors.values()), initial=len(self.header))
        return dict(zip([*self.tensors, ""], ends, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.begins[""]

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.store_dtype, self.num_states, self.hidden_size)


def plan_shards(
    samples: Sequence[StoredSample],
    origin: dict[str, Any],
    samples_per_shard: int,
    num_states: int,
    hidden_size: int,
    store_dtype: str = BFLOAT16,
) -> list[Shard]:
    """The shards of `samples` (sorted by id), about `samples_per_shard` samples each.

    origin: all else that the states depend on, as JSON: verifier, layer ids, engine version. A shard ends after each
    sample whose hashed id is divisible by `samples_per_shard`.
    """
    assert all(a.sample_id < b.sample_id for a, b in pairwise(samples)), "sorted, distinct ids"
    shards, rows = [], []
    for index, sample in enumerate(samples):
        rows.append(sample)
        if index == len(samples) - 1 or _ends_shard(sample.sample_id, samples_per_shard):
            key = shard_key(rows, origin, store_dtype)
            shards.append(Shard(key, tuple(rows), num_states, hidden_size, store_dtype))
            rows = []
    return shards


def _ends_shard(sample_id: str, samples_per_shard: int) -> bool:
    return int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8]) % samples_per_shard == 0


def shard_key(samples: Sequence[StoredSample], origin: dict[str, Any], store_dtype: str) -> str:
    """sha256 over format, dtype, origin and every stored field of every sample."""
    head = {"format": FORMAT, "dtype": store_dtype, "origin": origin, "num_samples": len(samples)}
    digest = hashlib.sha256(_line(head))
    for sample in samples:
        digest.update(_line([sample.sample_id, sample.split, sample.num_prompt, len(sample.input_ids)]))
        digest.update(ids_as_bytes(sample.input_ids))
        digest.update(bytes(sample.loss_mask))
    return digest.hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def ids_as_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as they lie in a shard: int32, little-endian like the x86-64 machines that extract."""
    return array("i", ids).tobytes()


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
