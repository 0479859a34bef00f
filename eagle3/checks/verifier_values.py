"""A draft's head and embedding against the verifier's own, row by row (numpy, bounded memory).

    draft row i of lm_head  <->  verifier row i + d2t[i]     equal everywhere: frozen, as speculators leaves the head
    draft row v of embed    <->  verifier row v              SafeAILab and SpecForge train the head: rows may differ

A trained row still resembles the row of its own token, or no row at all where training began from random numbers. Rows
that resemble the rows of *other* tokens mean a wrong map. No server compares them: only acceptance falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3.checks.config_check import Verdict
from eagle3.checks.servers import SERVERS
from eagle3.checks.weight_values import BLOCK, MAX_IDS, is_map, read_integers, windows
from eagle3.formats.safetensors_headers import TensorHeader, num_bytes
from eagle3.problems import Problem
from eagle3.verifiers.verifier_config import VerifierConfig
from eagle3.verifiers.verifier_tensors import find_verifier_tensors

VLLM = SERVERS["vllm"].name
SAMPLE = 48
MAX_WIDTH = 1 << 20
# Of two directions drawn at random the cosine stays below sqrt(2 ln V / H) among V others; half as much again is safe.
NOISE, LEAST, MARGIN, UNRELATED = 1.5, 0.5, 0.1, 0.3
# Half of the distance between neighbouring values, relative: what casting the verifier's row may have changed.
STEPS = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24, "F64": 2.0**-53, "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}
RAW: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {"BF16": "u2", "F16": "f2", "F32": "f4", "F64": "f8", "F8_E4M3": "u1", "F8_E5M2": "u1"}.items()
}


@dataclass(frozen=True)
class Resemblance:
    """How the rows of a draft's matrix and the verifier's compare.

    equal of rows are the same; sample [S] are draft rows that are not; own [S] is their cosine with the verifier's row
    of the same token, nearest [S] the other row that they resemble most and best [S] its cosine.
    """

    rows: int
    equal: int
    sample: np.ndarray
    own: np.ndarray
    nearest: np.ndarray
    best: np.ndarray
    noise: float

    def elsewhere(self) -> np.ndarray:
        """[S]: the rows that clearly belong to another token."""
        return (self.best > self.own + MARGIN) & (self.best > max(LEAST, self.noise))

    def spelled(self) -> str:
        return f"{self.equal} of {self.rows} rows equal"


def compare_with_verifier(
    tensors: Mapping[str, TensorHeader], folder: Path, verifier: VerifierConfig, verdict: Verdict, server: str = VLLM
) -> None:
    """The draft's head and embedding (canonical names) against the verifier's in `folder`, into `verdict`.

    `server`: the name of the one that it is judged for.
    """
    found = find_verifier_tensors(folder, verifier)
    for name, theirs in (("lm_head.weight", found.head), ("embed_tokens.weight", found.embedding)):
        what, ours = f"{name} against the verifier's", tensors.get(name)
        if ours is None:
            verdict.skip(what, "the draft has none")
            continue
        if theirs is None:
            verdict.skip(what, found.why)
            continue
        why = _not_comparable(ours, theirs)
        targets = np.arange(ours.shape[0]) if why or name != "lm_head.weight" else _targets(tensors, ours, theirs)
        if why or targets is None:
            verdict.skip(what, why or "d2t names no row of the verifier for each row of the head")
            continue
        rows = resemblance(ours, theirs, targets)
        head = name == "lm_head.weight"
        if head:
            verdict.problems += head_problems(rows, targets - np.arange(len(targets)), server)
        else:
            verdict.problems += embedding_problems(rows, server)
        state = ("frozen" if head else "the same") if rows.equal == rows.rows else "not the same"
        verdict.checked.append(f"{what}: {state}, {rows.spelled()}" + (" (tied)" if head and found.tied else ""))


def _not_comparable(ours: TensorHeader, theirs: TensorHeader) -> str:
    """Why two matrices cannot be compared, or ''."""
    if len(ours.shape) != 2 or ours.shape[1:] != theirs.shape[1:]:
        return f"{list(ours.shape)} in the draft, {list(theirs.shape)} in the verifier: another width"
    if ours.dtype not in RAW or theirs.dtype not in RAW:
        return f"{ours.dtype} in the draft, {theirs.dtype} in the verifier: packed numbers are not compared"
    if not ours.shape[0] or not ours.shape[1]:
        return "it is empty"
    if max(ours.shape[0], theirs.shape[0]) > MAX_IDS or ours.shape[1] > MAX_WIDTH:
        return f"{list(ours.shape)} is larger than any model's"
    return "" if ours.shape[0] <= theirs.shape[0] else f"more rows than the verifier's {theirs.shape[0]}"


def _targets(tensors: Mapping[str, TensorHeader], head: TensorHeader, theirs: TensorHeader) -> np.ndarray | None:
    """[K]: the verifier's row of each row of the head, as vLLM maps them; None where d2t does not name one for each."""
    d2t, rows = tensors.get("d2t"), np.arange(head.shape[0])
    if d2t is None:
        return rows
    if not is_map(d2t) or d2t.shape != (len(rows),):
        return None
    targets: np.ndarray = rows + read_integers(d2t)
    return targets if ((targets >= 0) & (targets < theirs.shape[0])).all() else None


def resemblance(draft: TensorHeader, verifier: TensorHeader, targets_K: np.ndarray) -> Resemblance:
    """Compare row i of `draft` [K, H] with row `targets_K[i]` of `verifier` [V, H]; all targets lie in the matrix."""
    equal_K = np.concatenate(list(_equal_blocks(draft, verifier, targets_K)))
    others = np.flatnonzero(~equal_K)
    sample = others[np.linspace(0, len(others) - 1, min(SAMPLE, len(others))).astype(int)]
    own, nearest, best = _nearest(read_rows(draft, sample), verifier, targets_K[sample])
    num_rows, width = verifier.shape
    noise = NOISE * float(np.sqrt(2 * np.log(max(num_rows, 2)) / width))
    return Resemblance(len(equal_K), int(equal_K.sum()), sample, own, nearest, best, noise)


def head_problems(found: Resemblance, d2t_K: np.ndarray, server: str = VLLM) -> Iterator[Problem]:
    """An error where most of the rows that differ belong to other tokens than the map says."""
    elsewhere = found.elsewhere()
    if not len(elsewhere) or elsewhere.mean() <= 0.5:
        return
    rows, seen = found.sample[elsewhere], found.nearest[elsewhere]
    shift = seen - rows - d2t_K[rows]
    fix = "rebuild d2t and t2d from the vocabulary that the head was cut with, or cut the head again"
    if _mostly(seen == d2t_K[rows]):
        how, fix = "they belong to the tokens that d2t names if it holds ids", "write d2t - arange(len(d2t))"
    elif _mostly(seen == rows):
        how = "row i belongs to token i: the head was cut before the map was made"
    elif _mostly(shift == shift[0]):
        how = f"they belong to the tokens {abs(int(shift[0]))} {'higher' if shift[0] > 0 else 'lower'}: a shifted map"
    elif _mostly(np.isin(seen, np.arange(len(d2t_K)) + d2t_K)):
        how = "they belong to other tokens of the map: its order is not the head's"
    else:
        how = "they belong to tokens that the map does not have: it is another head's"
    told = f"{found.spelled()}; {int(elsewhere.sum())} of {len(elsewhere)} others resemble another token's row more"
    yield Problem(
        "head-map",
        "d2t",
        f"{told}, e.g. row {rows[0]} that of token {seen[0]}, not {rows[0] + d2t_K[rows[0]]}",
        f"the verifier's rows at i + d2t[i], or rows trained from them; {how}",
        fix,
        f"{server} loads without a word: the logit of each token lands on another one",
    )


def embedding_problems(found: Resemblance, server: str = VLLM) -> Iterator[Problem]:
    """An error where the rows stand in another order, a warning where they have nothing to do with the verifier's.

    For SGLang, which puts the verifier's in its place, an error wherever they differ.
    """
    if server != VLLM and found.equal < found.rows:
        yield Problem(
            "embedding-replaced",
            "embed_tokens.weight",
            found.spelled(),
            "the verifier's embedding",
            "serve it with vLLM, or train with the embedding frozen",
            f"{server} puts the verifier's in its place: the draft is fed other states than it was trained on",
        )
        return
    elsewhere = found.elsewhere()
    if not len(elsewhere):
        return
    if elsewhere.mean() > 0.5:
        rows, seen = found.sample[elsewhere], found.nearest[elsewhere]
        told = f"{found.spelled()}; {int(elsewhere.sum())} of {len(elsewhere)} others resemble another token's row more"
        yield Problem(
            "embedding-order",
            "embed_tokens.weight",
            f"{told}, e.g. row {rows[0]} that of token {seen[0]}",
            "one row a token, in the verifier's order",
            "export it again, or leave it out: the server shares the verifier's",
            f"{server} loads without a word and looks up other tokens than it was given",
        )
    elif np.median(found.own) < UNRELATED and found.equal < found.rows / 2:
        yield Problem(
            "embedding-other",
            "embed_tokens.weight",
            f"{found.spelled()}, median cosine {np.median(found.own):.2f} of the others",
            "the verifier's embedding, or one trained from it",
            "make sure that the draft was trained with this embedding, for this verifier",
            "right for a rotated verifier (QuaRot) or an embedding of the draft's own; else it is another model's",
            "warning",
        )


def read_rows(tensor: TensorHeader, ids: np.ndarray) -> np.ndarray:
    """Rows `ids` of a matrix as float32 [len(ids), H], read one by one: memory holds no more than these."""
    size = num_bytes(tensor.dtype, tensor.shape[1:])
    data = bytearray(size * len(ids))
    with open(tensor.file, "rb", buffering=0) as file:
        for place, row in enumerate(ids.tolist()):
            file.seek(tensor.begin + row * size)
            file.readinto(memoryview(data)[place * size : (place + 1) * size])
    return floats(np.frombuffer(data, RAW[tensor.dtype]), tensor.dtype).reshape(len(ids), tensor.shape[1])


def floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values of raw numbers of a safetensors dtype, float32."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the upper byte of a float16
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        code = np.arange(256)
        exponent, fraction = code >> 3 & 15, (code & 7) / 8
        size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
        return np.where(code & 127 == 127, np.nan, np.where(code < 128, size, -size)).astype(np.float32)[raw]
    return raw.astype(np.float32)


def _equal_blocks(draft: TensorHeader, verifier: TensorHeader, targets_K: np.ndarray) -> Iterator[np.ndarray]:
    """Which rows are equal, a few at a time; in another dtype equal means: one rounding apart."""
    step = 0.0 if draft.dtype == verifier.dtype else max(STEPS[draft.dtype], STEPS[verifier.dtype])
    count = max(1, 4 * BLOCK // max(draft.shape[1], 1))
    for start in range(0, draft.shape[0], count):
        ids = np.arange(start, min(start + count, draft.shape[0]))
        ours, theirs = read_rows(draft, ids), read_rows(verifier, targets_K[ids])
        with np.errstate(invalid="ignore"):
            yield (np.abs(ours - theirs) <= step * np.abs(theirs)).all(axis=1)


def _nearest(rows_SH: np.ndarray, verifier: TensorHeader, targets_S: np.ndarray) -> tuple[np.ndarray, ...]:
    """(cosine with the target's row, nearest other row, its cosine), each [S], in one pass over the verifier."""
    unit_SH = _unit(rows_SH)
    own, best = np.full(len(unit_SH), -1.0), np.full(len(unit_SH), -1.0)
    nearest: np.ndarray = np.zeros(len(unit_SH), int)
    start = 0
    if not len(unit_SH):
        return own, nearest, best
    for block in _row_blocks(verifier):
        cosine_SN = unit_SH @ _unit(block).T
        here = np.flatnonzero((targets_S >= start) & (targets_S < start + len(block)))
        own[here] = cosine_SN[here, targets_S[here] - start]
        cosine_SN[here, targets_S[here] - start] = -1
        place = cosine_SN.argmax(axis=1)
        value = cosine_SN[np.arange(len(place)), place]
        nearest, best = np.where(value > best, place + start, nearest), np.maximum(value, best)
        start += len(block)
    return own, nearest, best


def _row_blocks(tensor: TensorHeader) -> Iterator[np.ndarray]:
    """The whole matrix as float32 blocks of whole rows."""
    width = tensor.shape[1]
    rest: np.ndarray = np.empty(0, RAW[tensor.dtype])
    for window in windows(tensor, RAW[tensor.dtype]):
        data = np.concatenate([rest, window])
        whole = len(data) // width * width
        rest = data[whole:]
        yield floats(data[:whole], tensor.dtype).reshape(-1, width)


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length one; a row of zeros, NaN or infinity becomes zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        unit = np.where(np.isfinite(norms) & (norms > 0), rows / np.where(norms > 0, norms, 1), 0)
    return unit.astype(np.float32)


def _mostly(each: np.ndarray) -> bool:
    return bool(each.mean() > 0.5)
