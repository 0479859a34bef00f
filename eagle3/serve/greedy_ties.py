"""Two greedy answers to one prompt: where they part, and whether bf16 rounding can have parted them.

A server with a draft verifies several positions in one matrix product, which rounds otherwise than one position at a
time. Where the verifier's two best logits nearly tie, that can turn the choice, and nothing else may: at the first
difference both tokens must lie within `TIE_STEPS` bf16 steps of the top logit in a forward over the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Of 49 differences on a CPU whose products round one row and four rows differently, the farthest token lay 2.23 steps
# below the top (47 within 2); a fault lies tens of steps below.
TIE_STEPS = 3
BF16_FRACTION_BITS = 7
# The top logit after the context of a difference, and those of the tokens that were said there.
Logits = tuple[float, list[float]]


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to one prompt part.

    context: the token ids before it, prompt included. index: its place in the answer. tokens: what was said there
    without and with the draft; None where that answer had ended. constrained: a grammar chose among some tokens only.
    """

    sample_id: str
    context: list[int]
    index: int
    tokens: tuple[int | None, int | None]
    constrained: bool = False

    @property
    def said(self) -> list[int]:
        return [token for token in self.tokens if token is not None]


@dataclass(frozen=True)
class Judgement:
    """A difference in numbers: how far below the top logit both tokens lie, in bf16 steps at the top logit.

    The top is that of all tokens or, where a grammar constrained the choice, the higher of the two.
    """

    sample_id: str
    index: int
    tokens: tuple[int | None, int | None]
    top_logit: float
    steps_below_top: tuple[float | None, float | None]

    @property
    def is_tie(self) -> bool:
        return all(steps is not None and steps <= TIE_STEPS for steps in self.steps_below_top)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_tie": self.is_tie}


def first_difference(sample_id: str, prompt: Sequence[int], answers: tuple[list[int], list[int]]) -> Difference | None:
    """None where both answers are equal.

    >>> first_difference("a", [1, 2], ([5, 6, 7], [5, 8, 7]))
    Difference(sample_id='a', context=[1, 2, 5], index=1, tokens=(6, 8))
    """
    one, other = answers
    if one == other:
        return None
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    tokens = tuple(answer[shared] if shared < len(answer) else None for answer in (one, other))
    return Difference(sample_id, [*prompt, *one[:shared]], shared, (tokens[0], tokens[1]))


def bf16_step(value: float) -> float:
    """The distance from a bf16 number to the next larger one in size: 2^(floor(log2|x|) - 7).

    >>> bf16_step(20.0), bf16_step(-1.0)
    (0.125, 0.0078125)
    """
    return 2.0 ** (math.frexp(value)[1] - 1 - BF16_FRACTION_BITS)


def judge(differences: Sequence[Difference], logits: Iterable[Logits]) -> list[Judgement]:
    """Each difference against a teacher-forced forward over the tokens before it."""
    return [_judgement(one, *found) for one, found in zip(differences, logits, strict=True)]


def reference_logits(verifier: Path, trust_remote_code: bool, differences: Sequence[Difference]) -> list[Logits]:
    """By a forward of transformers over the bf16 weights, computed in float32; `NoReference` where there is none.

    One in bf16 would add a rounding of its own: of 50 differences on a CPU whose products of one row and of four rows
    round differently, one lay 3 steps apart in it.
    """
    import torch

    from eagle3.verifiers.reference_model import load_reference

    model = load_reference(verifier, trust_remote_code)
    found = []
    for one in differences:
        with torch.inference_mode():
            logits_V = model(torch.tensor([one.context]), use_cache=False, logits_to_keep=1).logits[0, -1].float()
        found.append((float(logits_V.max()), logits_V[one.said].tolist()))
    return found


def _judgement(difference: Difference, top: float, said: Sequence[float]) -> Judgement:
    if difference.constrained and said:
        top = max(said)
    logits = iter(said)
    steps = [None if token is None else (top - next(logits)) / bf16_step(top) for token in difference.tokens]
    return Judgement(difference.sample_id, difference.index, difference.tokens, top, (steps[0], steps[1]))
