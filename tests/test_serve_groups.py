from __future__ import annotations

from eagle3.acceptance import Acceptance, Round
from eagle3.serve.question_turns import Turn
from eagle3.serve.serve_groups import bucket, by_context_length, questions_report, speed_report, total_of
from eagle3.serve.serving import Answer, Prompt


def answer(name: str, num_tokens: int, seconds: float, accepted: tuple[int, ...] = ()) -> Answer:
    return Answer(name, [5] * num_tokens, list(accepted), "length", seconds, 0.1)


def test_rounds_fall_into_doubling_ranges_of_context():
    assert [bucket(n) for n in (0, 31, 32, 63, 64, 1000)] == ["0-31", "0-31", "32-63", "32-63", "64-127", "512-1023"]
    found = by_context_length([[Round(40, 2), Round(43, 0)], [Round(3, 1)]], 2)
    assert list(found) == ["0-31", "32-63"]
    assert found["32-63"]["acceptance_length"] == 2.0
    assert found["0-31"]["rounds"] == 1


def test_questions_are_reported_by_category():
    def turn(category: str, *accepted: int) -> Turn:
        one = answer("q", 9, 1.0, accepted)
        return Turn(category, Prompt("q", [1], 9), one, one)

    report = questions_report([turn("math", 1, 1), turn("code", 0), turn("math", 0)], ["q:2:1"], 1)
    assert list(report["by_category"]) == ["code", "math"]
    assert report["by_category"]["math"]["turns"] == 2
    assert report["by_category"]["math"]["rounds"] == 3
    assert report["served"] == Acceptance(4, (2,)).as_dict()
    assert report["too_long"] == ["q:2:1"]
    assert questions_report([], [], 1)["served"] is None


def test_the_spread_of_the_speed_up_lies_around_it():
    even = speed_report([answer("a", 10, 1.0)] * 3, [answer("a", 10, 2.0)] * 3, "in turns")
    assert (even["speed_up"], even["speed_up_interval_95"]) == (2.0, [2.0, 2.0])
    others = [answer("a", 10, 1.0), answer("b", 30, 9.0)]
    mixed = speed_report([answer("a", 10, 1.0), answer("b", 30, 3.0)], others, "in turns")
    low, high = mixed["speed_up_interval_95"]
    assert (low, mixed["speed_up"], high) == (1.0, 2.5, 3.0)
    # prompts count alike, however long their answers
    assert (mixed["speed_up_per_prompt"], mixed["speed_up_per_prompt_interval_95"]) == (2.0, [1.0, 3.0])
    assert mixed["order"] == "in turns"


def test_a_total_is_the_sum_of_its_parts():
    assert total_of([Acceptance(1, (1, 0)), Acceptance(2, (1, 1))]) == Acceptance(3, (2, 1))
