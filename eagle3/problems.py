"""What is wrong with an input, as data: one record per fault, and the exception that carries them to the user."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass

SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Problem:
    """One fault of an input.

    `code` is short and stable, `where` a dotted path, a tensor or a file, `consequence` says what the server or the
    stage would do, with the version it was seen in, and `fix` is a value or a command.
    """

    code: str
    where: str
    found: str
    expected: str
    fix: str
    consequence: str = ""
    severity: str = "error"

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class InvalidInput(Exception):
    """An input that a person can correct; carries every problem found, never only the first."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "InvalidInput needs at least one problem"
        self.problems = problems
        super().__init__(format_problems(problems))


def invalid(code: str, where: str, found: str, expected: str, fix: str, consequence: str = "") -> InvalidInput:
    """An `InvalidInput` with one error, ready to raise."""
    return InvalidInput(Problem(code, where, found, expected, fix, consequence))


def has_errors(problems: Iterable[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def sorted_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Errors first; the order in which they were found otherwise."""
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))


def format_problem(problem: Problem, width: int = 110) -> str:
    """A few terminal lines: code and place, then one indented line for each thing said."""
    head = f"{problem.severity.upper()} {problem.code}: {problem.where}"
    rows = [(name, getattr(problem, name)) for name in ("found", "expected", "consequence", "fix")]
    body = [
        textwrap.fill(text, width, initial_indent=f"  {name + ':':<13}", subsequent_indent=" " * 15)
        for name, text in rows
        if text
    ]
    return "\n".join([head, *body])


def format_problems(problems: Iterable[Problem]) -> str:
    return "\n".join(format_problem(problem) for problem in sorted_problems(problems))
