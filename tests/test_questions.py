from __future__ import annotations

import json

import pytest

from eagle3.problems import InvalidInput
from eagle3.serve.questions import Question, read_questions
from tests.repository import run

MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."], "reference": ["x"]}


@pytest.fixture
def folder(tmp_path):
    run(tmp_path, "git", "init", "-q")
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions/README.md").write_text("what goes here\n")
    return tmp_path / "questions"


def write(folder, *rows, name="q.jsonl"):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    run(folder, "git", "add", name)


def test_questions_in_their_order_with_what_is_optional_left_out(folder):
    write(folder, MT_BENCH, b"", {"turns": ["Why?"]})
    write(folder, {"turns": ["How?"], "question_id": "a"}, name="r.jsonl")
    assert read_questions(["r.jsonl", "q.jsonl"], folder) == [
        Question("r.jsonl", "r.jsonl:a", "other", ("How?",)),
        Question("q.jsonl", "q.jsonl:81", "writing", ("Compose a post.", "Rewrite it.")),
        Question("q.jsonl", "q.jsonl:3", "other", ("Why?",)),
    ]


def test_a_file_is_read_as_a_file_of_conversations_is(folder):
    """A mark of UTF-8 at its begin, lines that end as Windows', a line separator inside a text."""
    write(folder, b'\xef\xbb\xbf{"turns": ["Why?"]}\r', '{"turns": ["a\u2028b"]}'.encode())
    assert [question.turns for question in read_questions(["q.jsonl"], folder)] == [("Why?",), ("a\u2028b",)]


def test_no_names_and_no_files_are_no_questions(folder):
    assert read_questions([], folder) == []
    assert read_questions([], folder / "not-there") == []


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (b"{", "no JSON"),
        (b'{"turns": ["\xff"]}', "no JSON"),
        ([], "no list `turns`"),
        ({"prompt": "Why?"}, "no list `turns`"),
        ({"turns": []}, "no list `turns`"),
        ({"turns": ["Why?", " "]}, "a turn that is no text"),
        ({"turns": [3]}, "a turn that is no text"),
        (b'{"turns": ["half a \\ud83d"]}', "a turn with a lone surrogate"),
        (b"[" * 100_000, "no JSON"),
        ({"turns": ["Why?"], "category": 3}, "`category` or `question_id`"),
        ({"turns": ["Why?"], "question_id": 81}, "a second question q.jsonl:81"),
    ],
)
def test_a_faulty_line_is_named_and_none_is_dropped(folder, row, found):
    write(folder, MT_BENCH, row)
    with pytest.raises(InvalidInput) as caught:
        read_questions(["q.jsonl"], folder)
    [problem] = caught.value.problems
    assert problem.where.endswith("q.jsonl:2")
    assert problem.found.startswith(found)


def test_a_file_of_another_form_is_said_in_a_few_problems(folder):
    write(folder, *[{"prompt": "Why?"}] * 1000)
    with pytest.raises(InvalidInput) as caught:
        read_questions(["q.jsonl"], folder)
    assert [problem.where.rpartition("/")[2] for problem in caught.value.problems] == [
        *(f"q.jsonl:{line}" for line in range(1, 6)),
        "995 more",
    ]


def test_a_file_without_a_question_is_refused(folder):
    write(folder, MT_BENCH)
    write(folder, b"", b" ", name="r.jsonl")
    with pytest.raises(InvalidInput, match=r"r.jsonl:1\n  found: +no question in the file"):
        read_questions(["q.jsonl", "r.jsonl"], folder)


def test_a_file_that_is_named_twice_is_said_once(folder):
    write(folder, MT_BENCH, {"turns": ["Why?"]})
    with pytest.raises(InvalidInput) as caught:
        read_questions(["q.jsonl", "q.jsonl"], folder)
    [problem] = caught.value.problems
    assert (problem.where, problem.found) == ("serve_test.questions", "q.jsonl twice")


def test_a_file_that_is_absent_unnamed_or_untracked_is_refused(folder):
    write(folder, MT_BENCH)
    (folder / "loose.jsonl").write_text("{}\n")
    with pytest.raises(InvalidInput) as caught:
        read_questions(["loose.jsonl", "gone.jsonl"], folder)
    found = {problem.code: problem for problem in caught.value.problems}
    assert set(found) == {"source-absent", "source-unnamed", "source-untracked"}
    assert found["source-absent"].where == "serve_test.questions[1]"
    assert "add `q.jsonl` to serve_test.questions" in found["source-unnamed"].fix
