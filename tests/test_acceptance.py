"""The walk, drawn for its first rounds, and the algebra of acceptance counts."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from eagle3.acceptance import (
    Acceptance,
    Round,
    acceptance_of,
    acceptance_of_counts,
    length_interval,
    rate_intervals,
    right_drafts,
    spread,
    walk,
    without_loops,
)

TOKENS = st.integers(0, 3)  # few of them, so that many predictions are right


@st.composite
def sequences(draw):
    """A prompt with its answer, predictions for every position, and k."""
    k = draw(st.integers(1, 4))
    tokens = draw(st.lists(TOKENS, min_size=2, max_size=30))
    num_prompt = draw(st.integers(1, len(tokens) - 1))
    rows = [draw(st.lists(TOKENS, min_size=len(tokens), max_size=len(tokens))) for _ in range(k)]
    return rows, tokens, num_prompt, k


def test_the_walk_as_it_is_drawn():
    #  index                  0   1   2   3   4   5   6   7
    tokens = [10, 11, 12, 13, 14, 15, 16, 17]  # prompt 10 11 12, answer 13 14 15 16 17
    step_0 = [0, 0, 0, 0, 0, 0, 0, 0]
    step_1 = [0, 0, 0, 0, 0, 0, 0, 0]
    step_2 = [0, 0, 0, 0, 0, 0, 0, 0]
    # n = 3: token 13 is known; hidden state 2 and token 3 propose tokens 4, 5, 6: two right, one wrong
    step_0[2], step_1[2], step_2[2] = 14, 15, 99
    # n = 3 + 2 + 1 = 6: the verifier gave 16; hidden state 5 proposes token 7 and what would come after the end
    step_0[5], step_1[5] = 17, 18
    rounds = walk(right_drafts([step_0, step_1, step_2], tokens, num_prompt=3), num_prompt=3, k=3)
    assert rounds == [Round(3, 2), Round(6, 1)]
    assert acceptance_of(rounds, 3) == Acceptance(2, (2, 1, 0))
    assert acceptance_of(rounds, 3).length == 1 + 3 / 2
    assert acceptance_of(rounds, 3).rates == (1.0, 0.5, 0.0)


@given(sequences())
def test_rounds_cover_the_answer_without_a_gap(case):
    rows, tokens, num_prompt, k = case
    rounds = walk(right_drafts(rows, tokens, num_prompt), num_prompt, k)
    last = len(tokens) - 1
    position = num_prompt
    for round_ in rounds:
        assert round_.position == position
        position += round_.accepted + 1
    assert position in ((last, last + 1) if rounds else (num_prompt,))


@given(sequences())
def test_acceptance_length_lies_between_1_and_k_plus_1(case):
    rows, tokens, num_prompt, k = case
    acceptance = acceptance_of(walk(right_drafts(rows, tokens, num_prompt), num_prompt, k), k)
    assert 1.0 <= acceptance.length <= k + 1
    assert all(0.0 <= rate <= 1.0 for rate in acceptance.rates)
    assert list(acceptance.rates) == sorted(acceptance.rates, reverse=True)


@given(sequences())
def test_right_predictions_are_all_accepted_and_wrong_ones_none(case):
    _, tokens, num_prompt, k = case
    last = len(tokens) - 1
    right = [[tokens[min(i + 2 + s, last)] for i in range(len(tokens))] for s in range(k)]
    rounds = walk(right_drafts(right, tokens, num_prompt), num_prompt, k)
    assert all(round_.accepted == min(k, last - round_.position) for round_ in rounds)
    wrong = right_drafts([[-1] * len(tokens)] * k, tokens, num_prompt)
    assert walk(wrong, num_prompt, k) == [Round(n, 0) for n in range(num_prompt, last)]


@given(sequences(), st.integers(0, 30))
def test_a_leading_part_of_the_counts_walks_a_leading_part_of_the_answer(case, cut):
    rows, tokens, num_prompt, k = case
    shorter = tokens[: max(num_prompt, len(tokens) - cut)]
    right = right_drafts(rows, tokens, num_prompt)[: max(0, len(shorter) - 1 - num_prompt)]
    assert walk(right, num_prompt, k) == walk(right_drafts(rows, shorter, num_prompt), num_prompt, k)


@given(sequences())
def test_more_drafts_never_need_more_rounds(case):
    rows, tokens, num_prompt, k = case
    assert len(walk(right_drafts(rows, tokens, num_prompt), num_prompt, k)) <= len(
        walk(right_drafts(rows, tokens, num_prompt), num_prompt, k - 1)
    )


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_counts_add_up(one, other):
    assert acceptance_of_counts(one, 3) + acceptance_of_counts(other, 3) == acceptance_of_counts(one + other, 3)


def test_no_rounds_have_length_one():
    assert Acceptance(0, (0, 0)).length == 1.0
    assert Acceptance(0, (0, 0)).as_dict()["rate_per_position"] == [0.0, 0.0]


def test_rounds_inside_a_repetition_are_left_out():
    #          0  1  2  3  4  5  6  7
    tokens = [9, 1, 2, 3, 1, 2, 3, 4]
    rounds = [Round(3, 0), Round(5, 0), Round(6, 0), Round(7, 0)]
    # the newest three tokens at 6 are 1 2 3, seen before at 3; those at 5 (3 1 2) and at 7 (2 3 4) are new
    assert without_loops(rounds, tokens, ngram=3) == [Round(3, 0), Round(5, 0), Round(7, 0)]


@given(sequences())
def test_an_answer_without_repetition_loses_no_round(case):
    rows, tokens, num_prompt, k = case
    rounds = walk(right_drafts(rows, tokens, num_prompt), num_prompt, k)
    assert without_loops(rounds, list(range(len(tokens)))) == rounds
    assert set(without_loops(rounds, tokens)) <= set(rounds)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_interval_is_a_function_of_its_prompts_and_lies_in_their_range(prompts):
    parts = [acceptance_of_counts(prompt, 3) for prompt in prompts]
    low, high = length_interval(parts)
    assert (low, high) == length_interval(parts)
    assert min(part.length for part in parts) <= low <= high <= max(part.length for part in parts)
    for position, (low, high) in enumerate(rate_intervals(parts)):
        rates = [part.rates[position] for part in parts]
        assert min(rates) <= low <= high <= max(rates)


def every_resampling(prompts: list[Acceptance], position: int) -> list[float]:
    """The rate over each resampling that there is, all of them equally likely, ascending."""
    return sorted(
        sum(one.accepted_per_position[position] for one in chosen) / sum(one.rounds for one in chosen)
        for chosen in product(prompts, repeat=len(prompts))
    )


def test_intervals_of_rates_are_those_over_all_resamplings_of_prompts():
    """Of 2,000 draws, the share below their 2.5% quantile lies within 1% of that (three standard deviations)."""
    numbers = (10, 9, 6), (40, 8, 0), (5, 5, 5), (20, 12, 3), (30, 24, 9)
    prompts = [Acceptance(rounds, (first, second)) for rounds, first, second in numbers]
    for position, (low, high) in enumerate(rate_intervals(prompts)):
        every = every_resampling(prompts, position)
        assert every[int(0.015 * len(every))] <= low <= every[int(0.035 * len(every))]
        assert every[int(0.965 * len(every))] <= high <= every[int(0.985 * len(every))]


def test_the_interval_of_independent_rounds_is_the_binomial_one():
    """A prompt of one round each, half of them accepted: 2.5% and 97.5% of Binomial(100, 1/2) are 40 and 60."""
    prompts = [Acceptance(1, (number % 2,)) for number in range(100)]
    [(low, high)] = rate_intervals(prompts)
    assert low in (0.39, 0.4, 0.41)
    assert high in (0.59, 0.6, 0.61)
    assert length_interval(prompts) == (1 + low, 1 + high)


def test_rounds_of_one_prompt_are_not_taken_for_independent():
    """The same rounds in two prompts, one of which accepts everything: nothing is known of a third."""
    assert rate_intervals([Acceptance(50, (50,)), Acceptance(50, (0,))]) == [(0.0, 1.0)]
    assert rate_intervals([Acceptance(50, (25,))] * 2) == [(0.5, 0.5)]


def test_prompts_without_a_round_have_no_rate():
    assert rate_intervals([Acceptance(0, (0, 0))]) == [(0.0, 0.0)] * 2


def test_a_spread_is_said_where_there_is_one():
    assert spread([1.25, 2.5]) == " (95%: 1.250 to 2.500)"
    assert spread(None) == ""
