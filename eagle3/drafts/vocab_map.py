"""data/vocab_map: which verifier tokens the draft can propose, chosen by the verifier's own answers.

V verifier vocabulary, K draft vocabulary. `vocab_map.safetensors` holds d2t int64 [K] and t2d bool [V]:

    chosen ids   0  1  2  7  50      ascending; the draft's row i means token i + d2t[i]
    d2t          0  0  0  4  46      offsets, not ids: vLLM and SGLang add them to the row's own number
    t2d          true at 0, 1, 2, 7 and 50, so arange(K) + d2t == nonzero(t2d)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from eagle3.file_faults import naming
from eagle3.problems import InvalidInput, Problem, invalid

FILE = "vocab_map.safetensors"
Supervised = Iterable[tuple[Sequence[int], Sequence[bool]]]


def count_supervised(samples: Supervised, vocab_size: int) -> np.ndarray:
    """How often each token is answered: int64 [V] from pairs of input_ids and loss_mask.

    An id outside the vocabulary is `InvalidInput`: samples and verifier do not belong together.
    """
    counts_V: np.ndarray = np.zeros(vocab_size, np.int64)
    for input_ids, loss_mask in samples:
        answered = np.asarray(input_ids, np.int64)[np.asarray(loss_mask, bool)]
        if answered.size and not 0 <= answered.min() <= answered.max() < vocab_size:
            outside = answered[(answered < 0) | (answered >= vocab_size)][0]
            raise invalid(
                "token-range",
                "data/samples",
                f"the token id {outside}",
                f"ids below {vocab_size}, the verifier's vocab_size",
                "dvc repro --single-item --force sample",
            )
        counts_V += np.bincount(answered, minlength=vocab_size)
    return counts_V


def choose_ids(train_V: np.ndarray, val_V: np.ndarray, forced: Collection[int], draft_vocab_size: int) -> np.ndarray:
    """The K ids of the draft's vocabulary, ascending int64 [K].

    First the `forced` ids (special tokens, which end turns and open tool calls however rare they are), then by count
    in train, ties by id; where train knows fewer than K tokens, by count in val, then by id. Counts come from
    `count_supervised`. K over V, or under the number of forced ids, is `InvalidInput`.
    """
    vocab_size = len(train_V)
    if problems := list(_size_problems(draft_vocab_size, vocab_size, len(forced))):
        raise InvalidInput(*problems)
    ids_V = np.arange(vocab_size)
    unforced_V = ~np.isin(ids_V, list(forced))
    padding_V = np.where(train_V > 0, 0, val_V)
    order = np.lexsort((ids_V, -padding_V, -train_V, unforced_V))
    return np.sort(order[:draft_vocab_size])


def _size_problems(draft_vocab_size: int, vocab_size: int, num_forced: int) -> Iterable[Problem]:
    where = "vocab_map.draft_vocab_size"
    if draft_vocab_size > vocab_size:
        yield Problem(
            "draft-vocabulary",
            where,
            str(draft_vocab_size),
            f"at most {vocab_size}, the verifier's vocabulary",
            f"dvc exp run -S {where}={vocab_size}   (the whole vocabulary, without a map), or less",
            "the draft would have rows that mean no token; vLLM 0.32.0 scatters them out of range",
        )
    if draft_vocab_size < num_forced:
        yield Problem(
            "draft-vocabulary",
            where,
            str(draft_vocab_size),
            f"at least {num_forced}, the special tokens of the verifier",
            f"dvc exp run -S {where}={min(vocab_size, max(1024, 2 * num_forced))}",
            "a draft that cannot propose the end of a turn is wrong at every one",
        )


def map_of(ids_K: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """d2t int64 [K] and t2d bool [V] of ascending ids.

    >>> map_of(np.array([0, 2, 3]), 5)
    (array([0, 1, 1]), array([ True, False,  True,  True, False]))
    """
    t2d_V: np.ndarray = np.zeros(vocab_size, bool)
    t2d_V[ids_K] = True
    return ids_K - np.arange(len(ids_K)), t2d_V


def coverage(counts_V: np.ndarray, ids_K: np.ndarray) -> float:
    """Share of the counted tokens that the draft can propose; 1 where none were counted."""
    total = int(counts_V.sum())
    return int(counts_V[ids_K].sum()) / total if total else 1.0


def write_vocab_map(folder: Path, d2t_K: np.ndarray, t2d_V: np.ndarray) -> None:
    assert not _map_fault(d2t_K, t2d_V), _map_fault(d2t_K, t2d_V)
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder / FILE):
        save_file({"d2t": d2t_K, "t2d": t2d_V}, folder / FILE)


def read_vocab_map(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(d2t int64 [K], t2d bool [V]) of a folder whose manifest says K < V; `InvalidInput` unless they agree."""
    path = folder / FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, f"{type(error).__name__}: {error}") from None
    if set(tensors) != {"d2t", "t2d"}:
        raise _unusable(path, f"the tensors {sorted(tensors)}")
    if fault := _map_fault(tensors["d2t"], tensors["t2d"]):
        raise _unusable(path, fault)
    return tensors["d2t"], tensors["t2d"]


def _map_fault(d2t_K: np.ndarray, t2d_V: np.ndarray) -> str:
    """Why the pair is no map, or nothing: both must name the same ids in the same order."""
    if d2t_K.dtype != np.int64 or t2d_V.dtype != bool or d2t_K.ndim != 1 or t2d_V.ndim != 1:
        return f"d2t {d2t_K.dtype} {d2t_K.shape}, t2d {t2d_V.dtype} {t2d_V.shape}"
    if not np.array_equal(np.arange(len(d2t_K)) + d2t_K, np.flatnonzero(t2d_V)):
        return "d2t and t2d that name different ids"
    return ""


def _unusable(path: Path, found: str) -> InvalidInput:
    expected = "d2t int64 [K] and t2d bool [V] with arange(K) + d2t == nonzero(t2d)"
    return invalid("vocab-map", str(path), found, expected, "dvc repro vocab-map")
