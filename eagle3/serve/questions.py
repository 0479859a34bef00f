"""data/questions/*.jsonl: questions of one or more turns, by category; the form of MT-bench's question file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.formats.json_files import printable
from eagle3.problems import InvalidInput, Problem, at_most
from eagle3.sampling.conversations import Skipped
from eagle3.sampling.named_files import file_problems
from eagle3.sampling.row_files import jsonl_rows

FOLDER, WHERE = Path("data/questions"), "serve_test.questions"
# Lines that are named; a file of another form is wrong in every line.
MANY = 5
NO_CATEGORY = "other"
EXPECTED = '{"turns": ["a question", ...], "category": "text, optional", "question_id": "optional"}'


@dataclass(frozen=True)
class Question:
    """User messages in their order. file: its name; key: that and the question's id."""

    file: str
    key: str
    category: str
    turns: tuple[str, ...]


def read_questions(names: Sequence[str], folder: Path = FOLDER) -> list[Question]:
    """Every question of every named file, in order; `InvalidInput` with the faults of all files at once."""
    problems = list(file_problems({name: f"{WHERE}[{i}]" for i, name in enumerate(names)}, folder, WHERE, "`{}`"))
    problems += [_twice(name) for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        raise InvalidInput(*problems)
    questions: dict[str, Question] = {}
    for name in names:
        before = len(questions) + len(problems)
        for line, row in _rows(folder / name, problems):
            question = _question(name, line, row)
            if isinstance(question, str) or question.key in questions:
                fault = question if isinstance(question, str) else f"a second question {printable(question.key)}"
                problems.append(_problem(folder / name, line, fault))
            else:
                questions[question.key] = question
        if len(questions) + len(problems) == before:
            problems.append(_problem(folder / name, 1, "no question in the file"))
    if problems:
        raise InvalidInput(*at_most(MANY, problems))
    return list(questions.values())


def _rows(path: Path, problems: list[Problem]) -> Iterator[tuple[int, Any]]:
    """(line number from 1, row) of every line that is JSON; the others become problems."""
    for line, (_, row) in enumerate(jsonl_rows(path), start=1):
        if not isinstance(row, Skipped):
            yield line, row
        elif row.reason != "empty":
            problems.append(_problem(path, line, f"no JSON: {row.reason}, {row.detail}"))


def _question(file: str, line: int, row: Any) -> Question | str:
    """The question, or what is wrong with the row."""
    if not isinstance(row, dict) or not isinstance(turns := row.get("turns"), list) or not turns:
        return "no list `turns`"
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return "a turn that is no text, or blank"
    if any("\ud800" <= char <= "\udfff" for turn in row["turns"] for char in turn):
        return "a turn with a lone surrogate"
    category, key = row.get("category", NO_CATEGORY), row.get("question_id", line)
    if not isinstance(category, str) or not isinstance(key, int | str):
        return "`category` or `question_id` is no text"
    return Question(file, f"{file}:{key}", category, tuple(turns))


def _twice(name: str) -> Problem:
    return Problem("question", WHERE, f"{name} twice", "each file once", "remove one of the two")


def _problem(path: Path, line: int, found: str) -> Problem:
    return Problem("question", f"{path}:{line}", found, EXPECTED, "correct the line, or remove it")
