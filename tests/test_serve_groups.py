from __future__ import annotations

from eagle3.acceptance import Acceptance, Round
from eagle3.serve.question_turns import Turn
from eagle3.serve.questions import Question
from eagle3.serve.serve_groups import (
    bucket,
    by_context_length,
    context_csv,
    detail_lines,
    questions_report,
    speed_report,
    total_of,
)
from eagle3.serve.serving import Answer, Prompt


def answer(name: str, num_tokens: int, seconds: float, accepted: tuple[int, ...] = ()) -> Answer:
    return Answer(name, [5] * num_tokens, list(accepted), "length", seconds, 0.1)


def test_rounds_fall_into_doubling_ranges_of_context():
    assert [bucket(n) for n in (0, 31, 32, 63, 64, 1000)] == ["0-31", "0-31", "32-63", "32-63", "64-127", "512-1023"]
    found = by_context_length([[Round(40, 2), Round(43, 0)], [Round(3, 1)]], 2)
    assert list(found) == ["0-31", "32-63"]
    assert found["32-63"]["acceptance_length"] == 2.0
    assert (found["0-31"]["rounds"], found["0-31"]["prompts"], found["0-31"]["interval_95"]) == (1, 1, None)


def test_ranges_of_context_stand_in_their_order_with_the_spread_of_their_prompts():
    found = by_context_length([[Round(9, 1), Round(70, 1), Round(130, 0)], [Round(71, 0)]], 1)
    assert found["64-127"] == {
        "prompts": 2,
        **Acceptance(2, (1,)).as_dict(),
        "interval_95": [1.0, 2.0],
        "rate_interval_95_per_position": [[0.0, 1.0]],
    }
    assert context_csv({"by_context_length": found}).splitlines() == [
        "from_tokens,to_tokens,prompts,rounds,acceptance_length,low,high",
        *("0,31,1,1,2.0,,", "64,127,2,2,1.5,1.0,2.0", "128,255,1,1,1.0,,"),
    ]


def turn(file: str, number: int, category: str, *accepted: int, seconds: float = 1.0) -> Turn:
    one = answer("q", 8, seconds, accepted)
    question = Question(file, f"{file}:{number}", category, ("?",))
    return Turn(question, Prompt("q", [1], 9), one, answer("q", 8, 2.0))


TURNS = [
    *(turn("a.jsonl", 1, "math", 1, 1), turn("a.jsonl", 1, "math", 0)),
    *(turn("a.jsonl", 2, "code", 0, 0, 0), turn("b.jsonl", 1, "math", 0, seconds=4.0)),
]


def test_questions_are_reported_by_file_and_by_category():
    report = questions_report(TURNS, ["q:2:1"], 1)
    assert list(report["by_file"]) == ["a.jsonl", "b.jsonl"]
    assert list(report["by_category"]) == ["code", "math"]
    # one category of two files: three turns of two questions
    math = report["by_category"]["math"]
    assert (math["questions"], math["turns"], math["rounds"]) == (2, 3, 4)
    assert (report["turns"], report["too_long"]) == (4, ["q:2:1"])
    empty = questions_report([], [], 1)
    assert (empty["served"], empty["by_file"]) == (None, {})


def test_intervals_of_questions_take_the_turns_of_one_together():
    """Question 1 accepts 2 of 3, question 2 none of 3: a resampling has one of them twice, or both."""
    found = questions_report(TURNS, [], 1)["by_file"]["a.jsonl"]
    assert found["rate_per_position"] == [round(2 / 6, 6)]
    assert found["rate_interval_95_per_position"] == [[0.0, round(2 / 3, 6)]]
    assert found["interval_95"] == [1.0, round(1 + 2 / 3, 6)]
    assert questions_report(TURNS, [], 1)["by_file"]["b.jsonl"]["interval_95"] is None


def test_the_speed_up_on_questions_is_that_of_their_turns():
    report = questions_report(TURNS, [], 1)
    assert report["by_file"]["a.jsonl"]["speed_up"] == 2.0
    assert report["by_file"]["a.jsonl"]["speed_up_interval_95"] == [2.0, 2.0]
    assert report["by_file"]["b.jsonl"]["speed_up"] == 0.5
    assert report["served"]["speed_up"] == round(8 / 7, 3)


def test_files_and_categories_have_a_line_each():
    report = {"questions": questions_report(TURNS, ["q:2:1"], 1), "speed_by_drafts": []}
    lines = detail_lines(report)
    assert lines[0] == "questions             4 turns, 1 too long"
    assert [line.partition("acceptance")[0].strip() for line in lines[1:]] == [
        "a.jsonl",
        "b.jsonl",
        "of code",
        "of math",
    ]
    assert lines[2] == "  b.jsonl             acceptance length 1.000, 1 rounds; 0.50 times"
    assert max(map(len, lines)) <= 110


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


def test_the_speed_up_of_a_single_prompt_has_no_spread():
    report = speed_report([answer("a", 10, 1.0)], [answer("a", 10, 1.5)], "in turns")
    assert report["speed_up"] == report["speed_up_per_prompt"] == 1.5
    assert report["speed_up_interval_95"] is None
    assert report["speed_up_per_prompt_interval_95"] is None


def test_a_total_is_the_sum_of_its_parts():
    assert total_of([Acceptance(1, (1, 0)), Acceptance(2, (1, 1))]) == Acceptance(3, (2, 1))
