"""The report of serve-test and its gates, over answers written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle3.acceptance import Acceptance, acceptance_of_counts
from eagle3.manifests import Manifest
from eagle3.params import ServeTestParams
from eagle3.problems import InvalidInput
from eagle3.serve.greedy_ties import Judgement
from eagle3.serve.measuring import Judged, Measured
from eagle3.serve.serve_report import (
    acceptance_csv,
    build_report,
    gates,
    report_lines,
    require_gates,
    walked,
)
from eagle3.serve.serving import Answer, Prompt

# Two prompts; k = 2. The second answer repeats itself, and the server counted two drafts past its end.
ONE = Answer("a", [5, 6, 7, 8], [1, 0], "length", 2.0, 0.5)
TWO = Answer("b", [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5], [0, 2, 2, 2, 2], "length", 2.0, 0.5)
WALK = Acceptance(7, (5, 4))
# What training found right at each place of the sampled answers (the same as the served ones): two rounds of four
# tokens and five of twelve, where the server and the walk agree.
RIGHT = {"a": [1, 0, 0], "b": [0, 2, 0, 0, 2, 0, 0, 2, 0, 0, 1]}
BOUNDS = ServeTestParams("greedy", 2, [], 2, [], 7, 1.5, 0.5, 0.1, 0.5)


def measured(sampled: list[list[int]] | None = None, judgements: tuple[Judgement, ...] = (), right=RIGHT) -> Measured:
    answers = [ONE, TWO]
    slower = [Answer(one.sample_id, one.token_ids, [], "length", 4.0, 0.5) for one in answers]
    sampled = [one.token_ids for one in answers] if sampled is None else sampled
    counted = acceptance_of_counts(ONE.accepted + TWO.accepted, 2)
    prompts = [Prompt("a", [1, 2], 12), Prompt("b", [1, 2], 12)]
    judged = Judged(list(judgements), "transformers, float32")
    return Measured(prompts, answers, slower, sampled, judged, counted, right, 2, [], [], {}, None, {}, "in turns")


def report_of(*arguments, walk: Acceptance = WALK):
    return build_report(measured(*arguments), walk.as_dict(), walk.as_dict())


def test_acceptance_is_what_the_server_counted_and_the_gap_what_the_walk_counts():
    report = report_of()
    assert report["served"]["rounds"] == 7
    assert report["served"]["acceptance_length"] == round(1 + 9 / 7, 6)
    # the last round of the second answer began at its token 10 of 11: one draft is inside the answer
    assert report["against_walk"] == {
        "prompts": 2,
        "rounds": 7,
        "acceptance_length": round(1 + 8 / 7, 6),
        "walk_acceptance_length": round(1 + 8 / 7, 6),
        "gap": 0.0,
    }


def test_a_draft_that_the_server_computes_otherwise_shows_as_a_gap():
    against = report_of(None, (), {**RIGHT, "a": [2, 0, 0]})["against_walk"]
    assert (against["rounds"], against["walk_acceptance_length"]) == (7, round(1 + 9 / 6, 6))
    assert against["gap"] == round(abs(1 + 8 / 7 - (1 + 9 / 6)), 6)


def test_rounds_inside_a_repetition_are_reported_apart():
    free = report_of()["served_without_loops"]
    assert free["rounds"] < 7
    assert free["acceptance_length"] < report_of()["served"]["acceptance_length"]


def test_an_answer_is_compared_up_to_where_it_parts_from_the_sampled_one():
    report = report_of([ONE.token_ids, [*TWO.token_ids[:7], 9, 9]])
    assert report["samples_reproduced"] == {"prompts": 1, "share": 0.5}
    # rounds at the tokens 0, 1 and 4 of the second answer; the last has its second draft at the last common token
    assert report["against_walk"]["prompts"] == 2
    assert report["against_walk"]["rounds"] == 2 + 3
    assert report["against_walk"]["acceptance_length"] == 1 + (1 + 4) / 5


def test_without_a_common_token_the_gap_is_unknown_and_its_gate_missed():
    report = report_of([[9], [9]])
    assert report["against_walk"]["gap"] is None
    assert [gate.name for gate in gates(report, BOUNDS) if not gate.passed] == ["gap_to_walk", "samples_reproduced"]


def test_speed_is_new_tokens_over_the_time_of_a_waiting_client():
    assert report_of()["speed"]["tokens_per_second_with_draft"] == 16 / 4
    assert report_of()["speed"]["speed_up"] == 2.0


def test_speed_ups_without_an_interval_are_printed_without_one():
    report = report_of()
    assert "without: 2.0 times (95%: 2.00 to 2.00)\n" in report_lines(report)
    for name in ("speed_up", "speed_up_per_prompt"):
        report["speed"][f"{name}_interval_95"] = None
    lines = report_lines(report).splitlines()
    assert "tokens/s              4.0 with the draft, 2.0 without: 2.0 times" in lines
    assert "  per prompt          2.0 times, the median" in lines


def test_ties_are_counted_and_faults_fail():
    tie, fault = Judgement("a", 1, (6, 7), 20.0, (0.0, 1.0)), Judgement("b", 3, (5, 9), 20.0, (0.0, 40.0))
    greedy = report_of(None, (tie, fault))["greedy"]
    assert {key: greedy[key] for key in ("equal", "ties", "faults", "tie_fraction")} == {
        "equal": 0,
        "ties": 1,
        "faults": 1,
        "tie_fraction": 0.5,
    }
    missed = [gate.name for gate in gates(report_of(None, (tie, fault)), BOUNDS) if not gate.passed]
    assert "greedy_faults" in missed
    assert "tie_fraction" not in missed


def test_a_missed_gate_names_its_parameter_its_value_and_a_remedy(tmp_path, capsys):
    harder = ServeTestParams("greedy", 2, [], 2, [], 750, 2.5, 0.9, 0.2, 0.0)
    with pytest.raises(InvalidInput) as caught:
        require_gates(report_of(), harder, tmp_path / "kept.json")
    found = {problem.where: problem for problem in caught.value.problems}
    names = ("min_rounds", "min_acceptance_length", "min_position_0_rate")
    assert set(found) == {f"serve_test.{name}" for name in names}
    assert found["serve_test.min_rounds"].found == "rounds = 7"
    assert "sample.max_eval" in found["serve_test.min_rounds"].fix
    assert len(caught.value.problems) == 4  # the length twice: with loops and without
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["gates"]["rounds"] == {"value": 7, "at_least": 750, "passed": False}
    printed = capsys.readouterr().out
    assert "acceptance length     2.286" in printed
    assert str(tmp_path / "kept.json") in printed


def test_with_all_gates_passed_the_report_carries_them(tmp_path):
    passing = ServeTestParams("greedy", 2, [], 2, [], 7, 1.0, 0.0, 0.2, 0.0)
    complete = require_gates(report_of(), passing, tmp_path / "kept.json")
    assert all(gate["passed"] for gate in complete["gates"].values())
    assert json.loads((tmp_path / "kept.json").read_text()) == complete


def test_the_walk_is_that_of_the_served_epoch():
    tables = [{"epoch": epoch, "walk": {"eval": {"2": Acceptance(epoch, (0, 0)).as_dict()}}} for epoch in (1, 2, 3)]
    checkpoints = Manifest("train", decisions={"epochs": tables}).as_dict()
    draft = Manifest("flatten", inputs={"checkpoints": checkpoints}, decisions={"epoch": 2})
    assert walked(draft, 2)["rounds"] == 2


def test_the_plot_has_a_row_for_each_position():
    lines = acceptance_csv(report_of()).splitlines()
    assert lines[0] == "position,served,served_low,served_high,walk"
    # two prompts: 1 of 2 rounds and 4 of 5 had their first draft right
    assert lines[1] == "0,0.714286,0.5,0.8,0.714286"
    assert len(lines) == 1 + 2


def test_a_single_prompt_has_no_spread():
    one = replace(measured(), prompts=measured().prompts[:1], with_draft=[ONE], without_draft=[ONE], sampled=[[]])
    report = build_report(one, WALK.as_dict(), WALK.as_dict())
    assert report["served"]["interval_95"] is None
    assert acceptance_csv(report).splitlines()[1] == "0,0.714286,,,0.714286"
    assert "acceptance length     2.286, 7 rounds" in report_lines({**report, "gates": {}})


def test_the_lines_fit_a_terminal():
    assert max(map(len, report_lines(report_of()).splitlines())) <= 110
