"""Acceptance of drafted tokens, predicted by a walk over a known answer and counted from a server.

Acceptance length = tokens emitted per verifier step, bonus token included = 1 + accepted / rounds; it lies in
[1, k + 1] for k drafted tokens. The acceptance rate at position s is the share of rounds that accepted more than s.

The walk, for a sequence X = prompt + greedy answer whose first answer token has index n0 = len(prompt):

    hidden state i and token X[i+1]  ->  draft step 0 predicts X[i+2]        = predictions[0][i]
    ... and token X[i+2]             ->  draft step 1 predicts X[i+3]        = predictions[1][i]

    a round at n looks at predictions[s][n-1] for s = 0..k-1, which propose X[n+1], X[n+2], ...
    it accepts the leading a that are right, the verifier adds one token, and the next round starts at n + a + 1.

Teacher forcing in the predictions is harmless: step s counts only if all earlier steps were right. A walk differs from
1 + the sum of accuracies, which weighs every position alike although rounds start more often at hard places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

LOOP_NGRAM = 8
DRAWS = 2000
Part = TypeVar("Part")


@dataclass(frozen=True)
class Round:
    """One drafting round. position: index n of the newest known token; accepted: how many drafts were right."""

    position: int
    accepted: int


@dataclass(frozen=True)
class Acceptance:
    """Counts over rounds. accepted_per_position[s] = rounds that accepted more than s drafts."""

    rounds: int
    accepted_per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        return 1.0 + sum(self.accepted_per_position) / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / self.rounds if self.rounds else 0.0 for count in self.accepted_per_position)

    def __add__(self, other: Acceptance) -> Acceptance:
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return Acceptance(self.rounds + other.rounds, tuple(a + b for a, b in pairs))

    def as_dict(self) -> dict[str, Any]:
        """Numbers rounded to six digits, so that a report is the same bytes on every machine."""
        return {
            "rounds": self.rounds,
            "accepted_per_position": list(self.accepted_per_position),
            "acceptance_length": round(self.length, 6),
            "rate_per_position": [round(rate, 6) for rate in self.rates],
        }


def right_drafts(predictions_sT: Sequence[Sequence[int]], tokens_T: Sequence[int], num_prompt: int) -> list[int]:
    """How many leading drafts a round would have right, for rounds at n = num_prompt, num_prompt + 1, ... last - 1.

    predictions_sT: rows of verifier ids; row s, index i predicts tokens_T[i + 2 + s]. Whichever of these rounds a
    server takes, and however many tokens it drafts, the counts are here.

    >>> right_drafts([[0, 7, 9, 0], [0, 8, 0, 0]], [5, 6, 7, 8, 9], num_prompt=2)
    [0, 1]
    """
    counts = []
    for n in range(num_prompt, len(tokens_T) - 1):
        proposed = (row[n - 1] for row in predictions_sT)
        agreed = (draft == token for draft, token in zip(proposed, tokens_T[n + 1 :], strict=False))
        counts.append(sum(takewhile(bool, agreed)))
    return counts


def walk(right_n: Sequence[int], num_prompt: int, k: int) -> list[Round]:
    """The rounds of a server that drafts k tokens at batch 1 and greedily emits exactly the walked answer.

    right_n: see `right_drafts`; a leading part of it walks a leading part of the answer.

    >>> walk([2, 0, 0, 1], num_prompt=3, k=2)
    [Round(position=3, accepted=2), Round(position=6, accepted=1)]
    """
    rounds, i = [], 0
    while i < len(right_n):
        accepted = min(k, right_n[i], len(right_n) - i)
        rounds.append(Round(num_prompt + i, accepted))
        i += accepted + 1
    return rounds


def acceptance_of(rounds: Iterable[Round], k: int) -> Acceptance:
    return acceptance_of_counts([round_.accepted for round_ in rounds], k)


def acceptance_of_counts(accepted: Sequence[int], k: int) -> Acceptance:
    """accepted: for each round, how many of its k drafts were right."""
    return Acceptance(len(accepted), tuple(sum(count > s for count in accepted) for s in range(k)))


def without_loops(rounds: Iterable[Round], tokens_T: Sequence[int], ngram: int = LOOP_NGRAM) -> list[Round]:
    """Rounds whose newest `ngram` tokens did not occur before in the sequence.

    A small model that repeats itself makes drafting easy; a figure without these rounds shows what is left.
    """
    first_end: dict[tuple[int, ...], int] = {}
    for end in range(ngram - 1, len(tokens_T)):
        first_end.setdefault(tuple(tokens_T[end - ngram + 1 : end + 1]), end)
    kept = []
    for round_ in rounds:
        newest = tuple(tokens_T[max(0, round_.position - ngram + 1) : round_.position + 1])
        if first_end.get(newest, round_.position) >= round_.position:
            kept.append(round_)
    return kept


def length_interval(prompts: Sequence[Acceptance]) -> tuple[float, float]:
    """95% interval of the acceptance length, resampling whole prompts (rounds of one answer are not independent)."""
    low, high = bootstrap([(one.rounds, sum(one.accepted_per_position)) for one in prompts], _per_round)
    return 1.0 + low, 1.0 + high


def rate_intervals(prompts: Sequence[Acceptance]) -> list[tuple[float, float]]:
    """95% interval of the acceptance rate at each position, as `length_interval`."""
    positions = zip(*(one.accepted_per_position for one in prompts), strict=True)
    rounds = [one.rounds for one in prompts]
    return [bootstrap([*zip(rounds, accepted, strict=True)], _per_round) for accepted in positions]


def spread(interval: Sequence[float] | None, digits: int = 3) -> str:
    """` (95%: 1.762 to 1.901)`; nothing where there is no interval."""
    if interval is None:
        return ""
    low, high = interval
    return f" (95%: {low:.{digits}f} to {high:.{digits}f})"


def _per_round(pairs: Sequence[tuple[int, int]]) -> float:
    """pairs: (rounds, accepted drafts) of each prompt."""
    rounds = sum(pair[0] for pair in pairs)
    return sum(pair[1] for pair in pairs) / rounds if rounds else 0.0


def bootstrap(parts: Sequence[Part], figure: Callable[[Sequence[Part]], float], seed: int = 0) -> tuple[float, float]:
    """95% interval of `figure` over `DRAWS` resamplings of `parts`, of which there is at least one."""
    assert parts, "nothing to resample"
    generator = random.Random(seed)
    figures = sorted(figure(generator.choices(parts, k=len(parts))) for _ in range(DRAWS))
    return figures[int(0.025 * DRAWS)], figures[int(0.975 * DRAWS) - 1]
