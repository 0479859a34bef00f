"""What the suite calls a fault, over replies written by hand; tests/test_serve_test_stage.py asks real servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3.serve.serving import Answer
from eagle3.serve.suite import Load, Reply, Suite, differences, faults, suite_lines, suite_report, temperature_warnings

CHAT = Reply([1, 2], [5, 6, 7], "one two three", "stop", ())
CALL = Reply([1, 3], [8, 9], "", "tool_calls", (("weather", '{"city": "Rome"}'),))
STOPPED = Reply([1, 2], [5, 6], "one ", "stop", ())
LOADS = [
    Load(1, 0.0, [Answer("a", [5, 6, 7], [1], "length", 1.0, 0.5)], 1.0),
    Load(8, 0.0, [Answer("a", [5, 6, 8], [1], "length", 1.0, 0.5)], 0.5),
]
PROBES = {"chat": CHAT, "several_turns": CHAT, "tool_call": CALL, "stop_string": STOPPED}
GOOD = Suite({name: (reply, reply) for name, reply in PROBES.items()}, LOADS, "two")


def suite(**changed: tuple[Reply, Reply]) -> Suite:
    return replace(GOOD, probes={**GOOD.probes, **changed})


def test_a_good_server_has_no_faults_and_no_differences():
    assert faults(GOOD, "with the draft") == []
    assert differences(GOOD, GOOD) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"chat": (CHAT, replace(CHAT, text="one two"))}, "chat: the streamed answer is not the whole one"),
        ({"tool_call": (CALL, replace(CALL, tool_calls=()))}, "tool_call: the streamed answer is not the whole one"),
        ({"tool_call": (CHAT, CHAT)}, "tool_call: no call, though one is required"),
        ({"stop_string": (CHAT, CHAT)}, "stop_string: 'two' did not cut the answer where it first stands"),
        ({"stop_string": (replace(STOPPED, text="o"),) * 2}, "'two' did not cut the answer where it first stands"),
        ({"stop_string": (replace(STOPPED, finish_reason="length"),) * 2}, "did not end the answer (length)"),
    ],
)
def test_each_fault_is_named_with_its_server_and_probe(changed, fault):
    [found] = faults(suite(**changed), "with the draft")
    assert found.startswith("with the draft, ")
    assert found.endswith(fault)


def test_a_server_that_never_says_the_stop_string_answers_as_without_it():
    other = replace(CHAT, token_ids=[5, 9, 7], text="one 2 three")
    assert faults(suite(chat=(other, other), stop_string=(other, other)), "without the draft") == []
    cut = replace(other, text="one ")
    assert len(faults(suite(chat=(other, other), stop_string=(cut, cut)), "without the draft")) == 1


def test_answers_that_part_are_judged_and_a_call_as_one_that_a_grammar_constrained():
    other = suite(chat=(replace(CHAT, token_ids=[5, 9]),) * 2, tool_call=(replace(CALL, token_ids=[8, 4]),) * 2)
    chat, call = differences(GOOD, other)
    assert (chat.sample_id, chat.context, chat.tokens, chat.constrained) == ("suite:chat", [1, 2, 5], (9, 6), False)
    assert (call.sample_id, call.context, call.tokens, call.constrained) == ("suite:tool_call", [1, 3, 8], (4, 9), True)


def test_a_server_that_accepts_hardly_anything_at_a_temperature_is_called_out():
    greedy, sampled = ({"concurrency": 1, "temperature": float(t), "acceptance_length": 1.8} for t in (0, 1))
    assert temperature_warnings([greedy, sampled]) == []
    [warning] = temperature_warnings([greedy, {**sampled, "acceptance_length": 1.01}])
    assert warning.startswith("at temperature 1, 1 at once, the acceptance length is 1.010 against 1.800 greedily")


def test_loads_are_measured_and_compared_with_one_at_a_time():
    report = suite_report(GOOD, GOOD, 2)
    assert report["faults"] == []
    assert [row["tokens_per_second"] for row in report["with_draft"]] == [3.0, 6.0]
    assert [row["equal_to_one_at_a_time"] for row in report["with_draft"]] == [1, 0]
    assert report["with_draft"][0]["acceptance_length"] == 2.0
    assert report["without_draft"][0]["acceptance_length"] is None
    assert suite_lines(report)[1].endswith("6.0 against 6.0 tokens/s, 0 of 1 as alone")
