"""data/vocab_map: which verifier tokens the draft can propose, chosen by the verifier's own answers.

V verifier vocabulary, K draft vocabulary. `vocab_map.safetensors` holds d2t int64 [K] and t2d bool [V]:

    chosen ids   0  1  2  7  50      ascending; the draft's row i means token i + d2t[i]
    d2t          0  0  0  4  46      offsets, not ids: vLLM and SGLang add them to the row's own number
    t2d          true at 0, 1, 2, 7 and 50, so arange(K) + d2t == nonzero(t2d)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from eagle3.file_faults import naming
from eagle3.problems import InvalidInput, Problem, invalid

FILE = "vocab_map.safetensors"
# split of each sample int32 [n], its tokens int32 [n], ids of all tokens int32 [N], answered bool [N]
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def count_answered(columns: Iterable[Columns], num_splits: int, vocab_size: int) -> np.ndarray:
    """How often each token is answered in each split: int64 [splits, V].

    columns: those of `eagle3.sampling.samples.token_columns`. An id outside the vocabulary, answered or asked, is
    `InvalidInput`: samples and verifier do not belong together.
    """
    counts_SV: np.ndarray = np.zeros(num_splits * vocab_size, np.int64)
    for split_n, length_n, ids_N, answered_N in columns:
        outside_N = ids_N.view(np.uint32) >= vocab_size  # a negative id is a large one
        if outside_N.any():
            raise invalid(
                "token-range",
                "data/samples",
                f"the token id {ids_N[outside_N][0]}",
                f"ids below {vocab_size}, the verifier's vocab_size",
                "dvc repro --single-item --force sample",
            )
        places_N: np.ndarray = np.repeat(split_n * np.int32(vocab_size), length_n)
        places_N += ids_N
        counts_SV += np.bincount(places_N[answered_N], minlength=num_splits * vocab_size)
    return counts_SV.reshape(num_splits, vocab_size)


def choose_ids(train_V: np.ndarray, val_V: np.ndarray, forced: Collection[int], draft_vocab_size: int) -> np.ndarray:
    """The K ids of the draft's vocabulary, ascending int64 [K].

    First the `forced` ids (special tokens, which end turns and open tool calls however rare they are, and those of the
    chat template), then by count in train, ties by id; where train knows fewer than K tokens, by count in val, then by
    id. Counts come from `count_answered`. K over V, or under the number of forced ids, is `InvalidInput`.
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
            f"at least {num_forced}, the special tokens of the verifier and those of its chat template",
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
