"""The values of a draft's tensors: finite, not constant, and a vocabulary map that maps (numpy, bounded memory).

Files are read through windows of a memory map, a tensor in blocks that fit a core's cache. vLLM 0.32.0 looks at no
value: everything here loads without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from eagle3.checks.servers import SERVERS, Server
from eagle3.formats.json_files import printable
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import Change, Problem, repairable

WINDOW = 16 << 20
BLOCK = 1 << 18
# Ten times the largest vocabulary; a map of more ids is not read into memory.
MAX_IDS = 1 << 22
VLLM = SERVERS["vllm"]


@dataclass(frozen=True)
class Bits:
    """A float dtype as integers: everything but the sign, and the least such number that is infinite or NaN."""

    dtype: type[np.unsignedinteger]
    magnitude: int
    infinite: int
    one: int


FLOATS = {
    "BF16": Bits(np.uint16, 0x7FFF, 0x7F80, 0x3F80),
    "F16": Bits(np.uint16, 0x7FFF, 0x7C00, 0x3C00),
    "F32": Bits(np.uint32, 0x7FFFFFFF, 0x7F800000, 0x3F800000),
    "F64": Bits(np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, 0x3FF0000000000000),
    "F8_E4M3": Bits(np.uint8, 0x7F, 0x7F, 0x38),  # no infinity; one code of each sign is NaN
    "F8_E5M2": Bits(np.uint8, 0x7F, 0x7C, 0x3C),
}
# The first magnitude that float16 rounds to infinity (65520): vLLM casts a draft to its verifier's dtype.
OVERFLOWS = {"BF16": 0x4780, "F32": 0x477FF000, "F64": 0x40EFFE0000000000}
INTEGERS = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "BOOL": np.uint8, "U8": np.uint8}


def value_problems(
    tensors: Mapping[str, TensorHeader], vocab_size: int, dtype: str | None = None, server: Server = VLLM
) -> Iterator[Problem]:
    """Problems of all tensors (canonical names); `vocab_size` is the verifier's, `dtype` the draft's in the server."""
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and tensor.end > tensor.begin:
            yield from _float_problems(name, tensor, dtype == "float16", server.name)
    if is_map(d2t := tensors.get("d2t")):
        yield from map_problems(read_integers(d2t), _mask(tensors), vocab_size, server)


def is_map(tensor: TensorHeader | None) -> TypeGuard[TensorHeader]:
    """A list of integers that may be read whole; one of another form or size was reported by the simulated load."""
    return tensor is not None and tensor.dtype in INTEGERS and len(tensor.shape) == 1 and tensor.shape[0] <= MAX_IDS


def windows(tensor: TensorHeader, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The tensor's data as flat arrays of at most WINDOW bytes, each unmapped when the next is asked for."""
    for begin in range(tensor.begin, tensor.end, WINDOW):
        size = min(WINDOW, tensor.end - begin)
        data = np.memmap(tensor.file, np.uint8, "r", begin, (size,))
        yield data.view(dtype) if begin % dtype.itemsize == 0 else np.frombuffer(data.tobytes(), dtype)


def read_integers(tensor: TensorHeader) -> np.ndarray:
    with open(tensor.file, "rb") as file:
        file.seek(tensor.begin)
        data = file.read(tensor.end - tensor.begin)
    return np.frombuffer(data, INTEGERS[tensor.dtype]).astype(np.int64)


def _float_problems(name: str, tensor: TensorHeader, cast_to_float16: bool, server: str) -> Iterator[Problem]:
    bits = FLOATS[tensor.dtype]
    bad, large, first, constant = 0, 0, None, True
    limit = OVERFLOWS.get(tensor.dtype, bits.infinite) if cast_to_float16 else bits.infinite
    buffer = np.empty(BLOCK // np.dtype(bits.dtype).itemsize, bits.dtype)
    for window in windows(tensor, np.dtype(bits.dtype)):
        for start in range(0, len(window), len(buffer)):
            block = window[start : start + len(buffer)]
            magnitude = np.bitwise_and(block, bits.dtype(bits.magnitude), out=buffer[: len(block)])
            if magnitude.max() >= limit:
                bad += int((magnitude >= bits.infinite).sum())
                large += int((magnitude >= limit).sum())
            if constant:
                first = block[0] if first is None else first
                constant = bool((block == first).all()) or (not magnitude.any() and not int(first) & bits.magnitude)
    shape = str(list(tensor.shape))
    if bad:
        consequence = f"{server} loads them; one NaN spreads to every logit"
        yield _problem("not-finite", name, f"{bad} values that are NaN or infinite", "finite values", consequence)
    if large > bad:
        consequence = f"{server} casts the draft to float16: they become infinite"
        found = f"{large - bad} values of 65520 and more"
        yield _problem("not-finite", name, found, "values that float16 holds", consequence, "serve in bfloat16")
    if constant and first is not None and not name.endswith(".bias"):
        value = int(first) & bits.magnitude
        if len(tensor.shape) >= 2 or value == 0:
            found = "all zero" if value == 0 else "one value everywhere"
            consequence = f"{server} computes with it: nothing was trained here, or the export lost it"
            yield _problem("constant", name, f"{shape}, {found}", "trained values", consequence)
        elif value == bits.one and len(tensor.shape) == 1 and tensor.shape[0] > 1:
            consequence = "the norm is as it was initialised: trained without it, or lost in export"
            found = f"{shape}, 1.0 everywhere"
            problem = _problem("untrained-norm", name, found, "trained values", consequence)
            yield replace(problem, severity="warning")


def map_problems(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int, server: Server = VLLM) -> Iterator[Problem]:
    """d2t [K] holds offsets: draft id i is verifier id i + d2t[i]; these ascend, and t2d [V] is true exactly there.

    Source: llama_eagle3.py, compute_logits (targets = arange + draft_id_to_target_id).
    """
    ids = np.arange(len(d2t))
    # Where the sum leaves 64 bits it wraps, and what comes out is out of range or no longer ascending.
    targets = ids + d2t
    marked = None if t2d is None else np.flatnonzero(t2d)
    if len(d2t) == 0:
        return
    outside = int(((targets < 0) | (targets >= vocab_size)).sum())
    if not np.array_equal(targets, d2t) and _are_ids(d2t, marked, vocab_size, outside):
        consequence = f"{server.name} adds the draft id once more: every token but the first is another one"
        problem = _problem(
            "map-absolute", "d2t", "verifier ids", "offsets from draft id to verifier id", consequence, ""
        )
        yield repairable(problem, Change("offsets", "d2t"))
        return
    if outside:
        consequence = f"{server.name} {server.bad_id}"
        yield _problem(
            "map-range", "d2t", f"{outside} ids outside 0 to {vocab_size - 1}", "ids of the verifier", consequence
        )
        return
    repeated = len(targets) - len(np.unique(targets))
    if repeated:
        consequence = f"{server.name} {server.same_id}"
        yield _problem("map-repeated", "d2t", f"{repeated} repeated ids", "distinct ids", consequence)
    elif not (np.diff(targets) > 0).all():
        consequence = "trainers build the head from t2d, in ascending order: its rows belong to other tokens"
        yield _problem("map-order", "d2t", "ids that do not ascend", "ascending ids", consequence)
    elif len(d2t) < vocab_size and not d2t.any():
        consequence = f"the draft can propose tokens 0 to {len(d2t) - 1} alone: a default map, not a chosen vocabulary"
        yield _problem(
            "map-default", "d2t", f"zero for all {len(d2t)} ids", "a map made from token counts", consequence
        )
    elif marked is not None and not np.array_equal(marked, targets):
        found = (
            f"{len(np.setdiff1d(marked, targets))} ids in t2d alone, {len(np.setdiff1d(targets, marked))} in d2t alone"
        )
        consequence = f"{server.name} uses d2t; the two come from different vocabularies, and one of them is the head's"
        yield _problem("map-mismatch", "t2d", found, "true exactly at the ids of d2t", consequence)


def _are_ids(d2t: np.ndarray, marked: np.ndarray | None, vocab_size: int, outside: int) -> bool:
    """Whether d2t holds ids instead of offsets: t2d says so, or as offsets they leave the vocabulary, as ids not."""
    if marked is not None:
        return np.array_equal(d2t, marked)
    return outside > 0 and bool((np.diff(d2t) > 0).all()) and d2t[0] >= 0 and d2t[-1] < vocab_size


def _mask(tensors: Mapping[str, TensorHeader]) -> np.ndarray | None:
    t2d = tensors.get("t2d")
    return read_integers(t2d) if is_map(t2d) else None


def _problem(
    code: str, name: str, found: str, expected: str, consequence: str, fix: str = "export it again"
) -> Problem:
    return Problem(code, printable(name), found, expected, fix, consequence)
