"""Problems as people read them: all at once, errors first, a few lines each."""

from __future__ import annotations

import pytest

from eagle3.problems import InvalidInput, Problem, at_most, format_problem, has_errors, invalid, sorted_problems

ERROR = Problem("gate", "serve_test.min_rounds", "700", "at least 750", "ask more prompts", "the interval is wide")
WARNING = Problem("absent", "head_dim", "absent", "a number", "write it", severity="warning")


def test_a_problem_reads_from_place_to_remedy():
    assert format_problem(ERROR).splitlines() == [
        "ERROR gate: serve_test.min_rounds",
        "  found:       700",
        "  expected:    at least 750",
        "  consequence: the interval is wide",
        "  fix:         ask more prompts",
    ]


def test_what_is_empty_is_left_out():
    assert "consequence" not in format_problem(WARNING)


def test_long_texts_are_wrapped_under_their_own_column():
    lines = format_problem(Problem("code", "where", "word " * 60, "short", "fix")).splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[2].startswith(" " * 15 + "word")


def test_errors_come_first_and_keep_their_order():
    other = Problem("second", "x", "y", "z", "f")
    assert sorted_problems([WARNING, ERROR, other]) == [ERROR, other, WARNING]


def test_warnings_alone_are_no_errors():
    assert not has_errors([WARNING])
    assert has_errors([WARNING, ERROR])


def test_the_exception_says_every_problem_at_once():
    text = str(InvalidInput(WARNING, ERROR))
    assert text.index("ERROR gate") < text.index("WARNING absent")
    assert invalid("code", "where", "found", "expected", "fix").problems[0].severity == "error"


def test_an_exception_without_a_problem_is_a_fault_of_ours():
    with pytest.raises(AssertionError):
        InvalidInput()
    with pytest.raises(AssertionError):
        Problem("code", "where", "found", "expected", "fix", severity="note")


def test_many_problems_of_one_kind_are_counted():
    several = [Problem("c", f"x{n}", "f", "e", "fix", severity="warning" if n % 2 else "error") for n in range(5)]
    found = at_most(2, [*several, WARNING])
    assert [each.where for each in found] == ["x0", "x1", "head_dim", "3 more"]
    assert (found[-1].severity, found[-1].found) == ("error", "e.g. x2")
