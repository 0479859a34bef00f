"""Which shards there will be for samples, before any is made: boundaries, keys, layouts, sizes in bytes.

The key is the sha256 of everything that the content depends on, and boundaries between shards are a function of the
sample ids alone: adding samples changes only the shards they fall in, and no shard can stand for other inputs.
`eagle3.states.hidden_states` says what a shard holds.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

from eagle3.formats.safetensors_headers import num_bytes, write_header
from eagle3.layer_ids import stored_layer_ids
from eagle3.manifests import Manifest
from eagle3.params import ExtractParams
from eagle3.states.store_dtypes import BFLOAT16, FP8, STORE_DTYPES, bytes_per_token

FORMAT = 1
# `su` is its old name.
LONGROPE = ("longrope", "su")


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
    def loss_mask(self) -> Sequence[int]: ...


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


def planned_extraction(
    samples: Sequence[StoredSample], made: Manifest, config: dict[str, Any], extract: ExtractParams, vllm: str
) -> list[Shard]:
    """The shards of one run of extract; what is named here makes up their keys.

    made: the manifest of the samples, which names the verifier's sha256; config: its text config; vllm: the version.
    """
    layer_ids = stored_layer_ids(extract.aux_layer_ids, config["num_hidden_layers"])
    origin = {"verifier": made.verifier.get("sha256"), "layer_ids": layer_ids, "vllm": vllm}
    if _window_chooses_rope(config):
        origin["window"] = engine_window(samples, made)
    sizes = len(layer_ids), config["hidden_size"]
    return plan_shards(samples, origin, extract.samples_per_shard, *sizes, extract.store_dtype)


def engine_window(samples: Sequence[StoredSample], made: Manifest) -> int:
    """Tokens: the sample stage's, so that rope scaling that looks at it is the same; one token more must fit."""
    return max(made.used_size("sample", "max_model_len"), 1 + max(len(sample.input_ids) for sample in samples))


def _window_chooses_rope(config: dict[str, Any]) -> bool:
    """Whether the states hang on the window of the engine.

    vLLM 0.32.0, rotary_embedding/phi3_long_rope_scaled_rope.py: long factors for every position where it is longer than
    the original one (Phi-3, Phi-4-mini). `rope_parameters` can hold one mapping for each type of layer.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    parts = [rope, *rope.values()] if isinstance(rope, dict) else []
    return any(part.get("rope_type", part.get("type")) in LONGROPE for part in parts if isinstance(part, dict))


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
