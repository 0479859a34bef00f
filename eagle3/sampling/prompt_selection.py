"""Which conversations are asked: a stream of rows -> prompts by split, within length and budget, all others counted.

Memory is bounded by the budgets: of each split only the conversations that are first in line so far are held.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle3.params import SampleParams
from eagle3.problems import InvalidInput, Problem
from eagle3.sampling.conversations import (
    SPLITS,
    Conversation,
    Row,
    Skipped,
    SkippedFile,
    split_bounds,
    split_of,
    turn_in_line,
)
from eagle3.sampling.near_duplicates import NearDuplicates

# Why a conversation of that split cannot be used, or nothing.
Unusable = Callable[[Conversation, str], Skipped | None]


@dataclass(frozen=True)
class Selection:
    """read = rows in prompts + rows skipped. prompts: split -> conversations, first in line first."""

    read: int
    prompts: dict[str, list[Conversation]]


class Budget:
    """The first `maximum` conversations of a split in `turn_in_line`, whatever order they come in."""

    def __init__(self, split: str, maximum: int, bounds: tuple[int, int]) -> None:
        self._split, self._maximum, self._bounds = split, maximum, bounds
        self._kept: dict[str, Conversation] = {}
        # the last in line on top: heapq pops the least, so places and digests are negated
        self._last: list[tuple[float, int, str]] = []
        self._surplus: Counter[str] = Counter()

    def offer(self, row: Conversation, unusable: Unusable) -> Skipped | None:
        """Take the row, or say why not; a row without a place is counted as surplus, and not looked at further."""
        if first := self._kept.get(row.opening_sha256):
            return Skipped(row.source, row.key, "duplicate", f"of {first.source}, {first.key}")
        place, digest = turn_in_line(row.opening_sha256, row.weight, self._bounds)
        entry = (-place, -int(digest, 16), digest)
        if len(self._kept) == self._maximum and entry < self._last[0]:
            self._surplus[row.source] += 1
            return None
        if skipped := unusable(row, self._split):
            return skipped
        self._kept[digest] = row
        heapq.heappush(self._last, entry)
        if len(self._kept) > self._maximum:
            self._surplus[self._kept.pop(heapq.heappop(self._last)[2]).source] += 1
        return None

    def in_line(self) -> list[Conversation]:
        return [self._kept[digest] for *_, digest in sorted(self._last, reverse=True)]

    def surplus(self) -> list[Skipped]:
        """One entry a source."""
        return [
            Skipped(source, f"split {self._split}", "over_budget", f"sample.max_{self._split}: {self._maximum}", count)
            for source, count in sorted(self._surplus.items())
        ]


def select(rows: Iterable[Row], sample: SampleParams, unusable: Unusable, skipped: SkippedFile) -> Selection:
    """Of equal openings the first is taken; what is unusable or over the budget of its split goes into `skipped`.

    `InvalidInput` when a split is left with too few prompts.
    """
    maxima = {"train": sample.max_train, "val": sample.max_val, "eval": sample.max_eval}
    bounds = split_bounds(sample.val_percent, sample.eval_percent)
    budgets = {split: Budget(split, maxima[split], bounds[split]) for split in SPLITS}
    read = 0
    for row in rows:
        read += 1
        if isinstance(row, Skipped):
            skipped.add(row)
            continue
        split = split_of(row.opening_sha256, sample.val_percent, sample.eval_percent)
        if entry := budgets[split].offer(row, unusable):
            skipped.add(entry)
    prompts = {split: budgets[split].in_line() for split in SPLITS}
    for split in SPLITS:
        for entry in budgets[split].surplus():
            skipped.add(entry)
    prompts["train"] = _apart(prompts["train"], prompts["eval"], sample.max_eval_similarity, skipped)
    if problems := _shortages(read, prompts, {"train": 1, "val": 1, "eval": sample.min_eval}, skipped.by_reason):
        raise InvalidInput(*problems)
    return Selection(read, prompts)


def _apart(
    train: list[Conversation], held_out: list[Conversation], similarity: float, skipped: SkippedFile
) -> list[Conversation]:
    """`train` without those that are more similar to one of `held_out` than the bound; 1 lets all pass."""
    if similarity >= 1:
        return train
    index, kept = NearDuplicates(held_out), []
    for row in train:
        found, twin = index.nearest(row.opening)
        if twin is not None and found > similarity:
            detail = f"{found:.2f} of {twin.source}, {twin.key}, in eval"
            skipped.add(Skipped(row.source, row.key, "near_duplicate", detail))
        else:
            kept.append(row)
    return kept


def _shortages(
    read: int, prompts: dict[str, list[Conversation]], minima: dict[str, int], by_reason: Counter[str]
) -> list[Problem]:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(by_reason.items()))
    return [
        Problem(
            "too-few-prompts",
            f"sample: the {split} split",
            f"{len(prompts[split])} prompts of {read} rows (skipped: {reasons or 'none'})",
            f"at least {minimum}",
            "add conversations (sample.sources)"
            + (", raise sample.eval_percent, or lower sample.min_eval" if split == "eval" else ""),
        )
        for split, minimum in minima.items()
        if len(prompts[split]) < minimum
    ]
