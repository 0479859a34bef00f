"""What is wrong with an input, as data: one record per fault, and the exception that carries them to the user."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

SEVERITIES = ("error", "warning")
TEXTS = ("code", "where", "found", "expected", "fix", "consequence", "severity")
# What a change does, as its problem says it and as `check --fix` does it (eagle3/checks/repairs.py).
CHANGES = {
    "write": "write {where}: {value}",
    "remove": "remove {where}",
    "keep": "keep the last {where}: {value}",
    "strip": "strip {where} from every tensor's name",
    "rename": "rename {where}* to {value}*",
    "rename one": "rename {where} to {value}",
    "drop": "remove {where} from the tensors",
    "integers": "write {where} as int64",
    "one dimension": "write {where} in one dimension",
    "offsets": "write {where} - arange(len({where}))",
    "from mask": "write {where} from t2d: its ids less arange",
    "index": "write {where} again",
}


@dataclass(frozen=True)
class Change:
    """One repair whose result is certain, a key of CHANGES.

    where: a dotted path in config.json, the name of a tensor, or the beginning of such names; value: what is written.
    """

    kind: str
    where: str
    value: Any = None

    def told(self) -> str:
        value = self.value if self.kind.startswith("rename") else json.dumps(self.value)
        return CHANGES[self.kind].format(where=self.where, value=value)


@dataclass(frozen=True)
class Problem:
    """One fault of an input.

    `code` is short and stable, `where` a dotted path, a tensor or a file, `consequence` says what the server or the
    stage would do, with the version it was seen in, and `fix` is a value or a command. Where the right value is certain
    `changes` holds it, and `fix` begins with the words of `changes`: see `repairable`.
    """

    code: str
    where: str
    found: str
    expected: str
    fix: str
    consequence: str = ""
    severity: str = "error"
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity
        assert self.fix.startswith(told(self.changes)), self.fix

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in TEXTS}


Fix = str | Change | tuple[Change, ...]


def told(changes: Iterable[Change]) -> str:
    return "; ".join(change.told() for change in changes)


def changes_of(fix: Fix) -> tuple[Change, ...]:
    """The changes of a fix, none where it is words."""
    return () if isinstance(fix, str) else (fix,) if isinstance(fix, Change) else fix


def repairable(problem: Problem, *changes: Change) -> Problem:
    """`problem` with a certain repair; its words for a fix become a remark behind it."""
    remark = f" ({problem.fix})" if problem.fix else ""
    return replace(problem, fix=told(changes) + remark, changes=changes)


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


def at_most(count: int, problems: Iterable[Problem]) -> list[Problem]:
    """`count` problems of each code, and one more that says how many of its kind were left out."""
    seen: dict[str, int] = {}
    kept: list[Problem] = []
    last: dict[str, Problem] = {}
    for problem in problems:
        seen[problem.code] = seen.get(problem.code, 0) + 1
        if seen[problem.code] <= count:
            kept.append(problem)
            continue
        worse = last.get(problem.code, problem)
        last[problem.code] = worse if worse.severity == "error" else problem
    for code, problem in last.items():
        left = seen[code] - count
        kept.append(replace(problem, where=f"{left} more", found=f"e.g. {problem.where}", changes=()))
    return kept


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
