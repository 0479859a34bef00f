"""data/questions/*.jsonl: questions of one or more turns, by category; the form of MT-bench's question file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.problems import InvalidInput, Problem
from eagle3.sampling.named_files import file_problems

FOLDER = Path("data/questions")
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
    """Every question of every named file, in order; `InvalidInput` with all faults at once."""
    where = "serve_test.questions"
    problems = list(file_problems({name: f"{where}[{i}]" for i, name in enumerate(names)}, folder, where, "`{}`"))
    if problems:
        raise InvalidInput(*problems)
    questions: dict[str, Question] = {}
    for name in names:
        for line, row in _rows(folder / name, problems):
            question = _question(name, line, row)
            if isinstance(question, str) or question.key in questions:
                found = question if isinstance(question, str) else f"a second question {question.key}"
                problems.append(_problem(folder / name, line, found))
            else:
                questions[question.key] = question
    if problems:
        raise InvalidInput(*problems)
    return list(questions.values())


def _rows(path: Path, problems: list[Problem]) -> Iterator[tuple[int, Any]]:
    """(line number from 1, row) of every line that is JSON; the others become problems."""
    for line, raw in enumerate(path.read_bytes().splitlines(), start=1):
        if raw.strip():
            try:
                yield line, json.loads(raw)
            except ValueError as error:
                problems.append(_problem(path, line, f"no JSON: {error}"))


def _question(file: str, line: int, row: Any) -> Question | str:
    """The question, or what is wrong with the row."""
    if not isinstance(row, dict) or not isinstance(turns := row.get("turns"), list) or not turns:
        return "no list `turns`"
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return "a turn that is no text, or blank"
    category, key = row.get("category", NO_CATEGORY), row.get("question_id", line)
    if not isinstance(category, str) or not isinstance(key, int | str):
        return "`category` or `question_id` is no text"
    return Question(file, f"{file}:{key}", category, tuple(turns))


def _problem(path: Path, line: int, found: str) -> Problem:
    return Problem("question", f"{path}:{line}", found, EXPECTED, "correct the line, or remove it")
