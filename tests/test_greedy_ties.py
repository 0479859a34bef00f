"""Where two greedy answers part, and whether bf16 rounding can have parted them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.serve.greedy_ties import (
    TIE_STEPS,
    Difference,
    Judgement,
    bf16_step,
    first_difference,
    judge,
    reference_logits,
)
from tests.counting import successor, tied_verifier

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(TOKENS, TOKENS, TOKENS)
def test_answers_agree_up_to_the_difference_and_not_at_it(prompt, one, other):
    found = first_difference("a", prompt, (one, other))
    if one == other:
        assert found is None
        return
    assert found.context == [*prompt, *one[: found.index]] == [*prompt, *other[: found.index]]
    assert found.tokens[0] != found.tokens[1]


def test_an_answer_that_ended_early_has_no_token_there():
    assert first_difference("a", [1], ([5, 6], [5])) == Difference("a", [1, 5], 1, (6, None))


@settings(deadline=None)  # the first case imports torch
@given(st.floats(2.0**-100, 2.0**100) | st.floats(-(2.0**100), -(2.0**-100)))
def test_the_step_is_the_distance_to_the_next_bf16_number(value):
    import torch

    number = torch.tensor(value, dtype=torch.bfloat16)
    away = torch.nextafter(number, number * 4)
    assert bf16_step(float(number)) == abs(float(away) - float(number))


@pytest.mark.parametrize(
    ("steps", "is_tie"),
    [((0.0, 0.0), True), ((0.0, 2.0), True), ((3.0, 1.0), True), ((0.0, 3.5), False), ((4.0, 0.0), False)],
)
def test_both_tokens_must_lie_within_three_steps(steps, is_tie):
    assert TIE_STEPS == 3
    assert Judgement("a", 0, (5, 6), 20.0, steps).is_tie is is_tie


def test_an_answer_that_only_one_side_ended_is_no_tie():
    assert not Judgement("a", 0, (5, None), 20.0, (0.0, None)).is_tie


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return tied_verifier(tmp_path_factory.mktemp("verifier"))


def test_a_forward_tells_a_tie_from_a_fault(verifier):
    assert successor(100) == 101
    differences = [Difference("a", [60, 100], 1, (101, 102)), Difference("b", [60, 100], 1, (101, 5))]
    tie, fault = judge(differences, reference_logits(verifier, False, differences))
    assert tie.is_tie
    assert tie.steps_below_top == (0.0, 0.0)
    assert not fault.is_tie
    assert fault.steps_below_top[0] == 0.0
    assert fault.steps_below_top[1] > 50
    assert fault.as_dict()["top_logit"] == tie.top_logit > 5


def test_where_a_grammar_chose_the_top_is_that_of_the_two_tokens():
    [fault] = judge([Difference("a", [1], 0, (5, 6), constrained=True)], [(20.0, [8.0, 7.0])])
    assert (fault.top_logit, fault.steps_below_top) == (8.0, (0.0, 16.0))


def test_an_answer_that_had_ended_said_nothing():
    ended = judge([Difference("a", [1], 0, (None, 6))], [(8.0, [7.875])])
    assert ended[0].steps_below_top == (None, 2.0)
