"""Openings that are nearly those of eval: the share of common 5-character shingles, exact, by an inverted index.

An eval prompt that training has seen with one word changed measures memory, not the draft.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from eagle3.sampling.conversations import Conversation, normalised

SHINGLE = 5


class NearDuplicates:
    """Finds, for an opening, the most similar one of `held_out`; memory grows with these alone."""

    def __init__(self, held_out: Iterable[Conversation]) -> None:
        self._rows = list(held_out)
        self._sizes: list[int] = []
        self._index: dict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(self._rows):
            found = shingles(row.opening)
            self._sizes.append(len(found))
            for shingle in found:
                self._index[shingle].append(number)

    def nearest(self, opening: str) -> tuple[float, Conversation | None]:
        """(similarity in [0, 1], the held-out row), 0 and None where no shingle is common.

        Similarity is Jaccard's: common shingles over those of either.
        """
        found = shingles(opening)
        common = Counter(number for shingle in found for number in self._index.get(shingle, ()))
        best = max(
            ((count / (len(found) + self._sizes[number] - count), -number) for number, count in common.items()),
            default=None,
        )
        return (best[0], self._rows[-best[1]]) if best else (0.0, None)


def shingles(text: str) -> set[str]:
    """The 5-character windows of the normalised text, bordered by spaces so that a short text has some.

    >>> sorted(shingles("Hi you"))
    [' hi y', 'hi yo', 'i you', ' you ']
    """
    plain = f" {normalised(text)} "
    return {plain[begin : begin + SHINGLE] for begin in range(max(1, len(plain) - SHINGLE + 1))}
