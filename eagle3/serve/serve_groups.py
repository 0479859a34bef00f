"""The parts of serve-test's report that split what was measured: by context, question category and drafted tokens."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from eagle3.acceptance import (
    Acceptance,
    Part,
    Round,
    acceptance_of,
    acceptance_of_counts,
    bootstrap,
    length_interval,
    rate_intervals,
    spread,
)
from eagle3.formats.json_files import printable
from eagle3.serve.measuring import Measured
from eagle3.serve.question_turns import Turn
from eagle3.serve.serving import Answer, tokens_per_second

Report = dict[str, Any]
SHORTEST_BUCKET = 32
SPEED_COLUMNS = ("num_speculative_tokens", "acceptance_length", "tokens_per_second", "speed_up")


def total_of(parts: Sequence[Acceptance]) -> Acceptance:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def with_intervals(prompts: Sequence[Acceptance]) -> Report:
    """The sum over prompts; 95% intervals of its length and its rates, null of a single prompt, which has no spread."""
    several = len(prompts) > 1
    return {
        **total_of(prompts).as_dict(),
        "interval_95": _rounded(length_interval(prompts)) if several else None,
        "rate_interval_95_per_position": [_rounded(one) for one in rate_intervals(prompts)] if several else None,
    }


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(bound, 6) for bound in interval]


def bucket(position: int) -> str:
    """Doubling ranges of context length.

    >>> bucket(31), bucket(32), bucket(200)
    ('0-31', '32-63', '128-255')
    """
    low, high = 0, SHORTEST_BUCKET
    while position >= high:
        low, high = high, 2 * high
    return f"{low}-{high - 1}"


def by_context_length(rounds: Iterable[Sequence[Round]], k: int) -> Report:
    """Every round by the number of tokens before it, the shortest context first. rounds: of each prompt."""
    found: dict[str, list[Acceptance]] = {}
    for of_prompt in rounds:
        for name, part in groupby(of_prompt, lambda one: bucket(one.position)):
            found.setdefault(name, []).append(acceptance_of(part, k))
    ordered = sorted(found, key=lambda name: int(name.partition("-")[0]))
    return {name: {"prompts": len(found[name]), **with_intervals(found[name])} for name in ordered}


def context_csv(report: Report) -> str:
    """reports/context.csv: acceptance length with its 95% interval; a row for each range of context length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["from_tokens", "to_tokens", "prompts", "rounds", "acceptance_length", "low", "high"])
    for name, row in report["by_context_length"].items():
        bounds = row["interval_95"] or (None, None)
        writer.writerow([*name.split("-"), row["prompts"], row["rounds"], row["acceptance_length"], *bounds])
    return text.getvalue()


def questions_report(turns: Sequence[Turn], too_long: Sequence[str], k: int) -> Report:
    """Acceptance over all turns, by file and by category, as the server counted it, and the turns that did not fit.

    Intervals are over questions: the turns of one are not independent.
    """
    files, categories = (_grouped(turns, name) for name in ("file", "category"))
    return {
        "turns": len(turns),
        "too_long": list(too_long),
        "served": _of_questions(turns, k) if turns else None,
        "by_file": {name: _of_questions(found, k) for name, found in sorted(files.items())},
        "by_category": {name: _of_questions(found, k) for name, found in sorted(categories.items())},
    }


def _grouped(turns: Sequence[Turn], name: str) -> dict[str, list[Turn]]:
    """The turns by this field of their questions."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(getattr(turn.question, name), []).append(turn)
    return groups


def _of_questions(turns: Sequence[Turn], k: int) -> Report:
    found = [*_grouped(turns, "key").values()]
    accepted = ([count for turn in of_one for count in turn.answer.accepted] for of_one in found)
    return {
        "questions": len(found),
        "turns": len(turns),
        **with_intervals([acceptance_of_counts(counts, k) for counts in accepted]),
        "speed_up": round(_speed_up_of_questions(found), 3),
        "speed_up_interval_95": _interval(found, _speed_up_of_questions),
    }


def _speed_up_of_questions(questions: Sequence[Sequence[Turn]]) -> float:
    return _speed_up([(turn.answer, turn.other) for of_one in questions for turn in of_one])


def speed_report(answers: Sequence[Answer], others: Sequence[Answer], order: str) -> Report:
    """Tokens per second with the draft (`answers`) and without it; intervals are over prompts, null of a single one.

    speed_up: of all tokens; speed_up_per_prompt: the median of the prompts' own ratios.
    """
    pairs = [*zip(answers, others, strict=True)]
    return {
        "order": order,
        "tokens_per_second_with_draft": round(tokens_per_second(answers), 2),
        "tokens_per_second_without_draft": round(tokens_per_second(others), 2),
        "speed_up": round(_speed_up(pairs), 3),
        "speed_up_interval_95": _interval(pairs, _speed_up),
        "speed_up_per_prompt": round(_median_speed_up(pairs), 3),
        "speed_up_per_prompt_interval_95": _interval(pairs, _median_speed_up),
        "first_token_seconds_with_draft": round(median(one.first_token_seconds for one in answers), 4),
        "first_token_seconds_without_draft": round(median(one.first_token_seconds for one in others), 4),
    }


def _interval(parts: Sequence[Part], figure: Callable[[Sequence[Part]], float]) -> list[float] | None:
    """95%, by resampling `parts`; of a single one there is no spread."""
    return [round(bound, 3) for bound in bootstrap(parts, figure)] if len(parts) > 1 else None


def _speed_up(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    with_draft, without = zip(*pairs, strict=True)
    return tokens_per_second(with_draft) / tokens_per_second(without)


def _median_speed_up(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    return median(_speed_up([pair]) for pair in pairs)


def speed_by_drafts(measured: Measured) -> list[Report]:
    """One row for each number of drafted tokens that was served, 0 (no draft) among them, ascending."""
    runs = {0: measured.without_draft, measured.k: measured.with_draft, **measured.sweep}
    alone = tokens_per_second(measured.without_draft)
    rows = []
    for k, answers in sorted(runs.items()):
        acceptance = total_of([acceptance_of_counts(answer.accepted, k) for answer in answers])
        speed = tokens_per_second(answers)
        values = k, round(acceptance.length, 6), round(speed, 2), round(speed / alone, 3)
        rows.append(dict(zip(SPEED_COLUMNS, values, strict=True)))
    return rows


def speed_csv(report: Report) -> str:
    """reports/speed.csv: a row for each number of drafted tokens."""
    text = io.StringIO()
    writer = csv.DictWriter(text, SPEED_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(report["speed_by_drafts"])
    return text.getvalue()


def detail_lines(report: Report) -> list[str]:
    """What was asked beyond the eval split, on lines for a person; none where nothing was."""
    lines = []
    questions = report["questions"]
    if questions["turns"] or questions["too_long"]:
        lines.append(f"questions             {questions['turns']} turns, {len(questions['too_long'])} too long")
        groups = {**questions["by_file"], **{f"of {name}": row for name, row in questions["by_category"].items()}}
        lines += [f"  {printable(name, 40):<19} {_question_line(row)}" for name, row in groups.items()]
    if len(report["speed_by_drafts"]) > 2:
        fastest = max(report["speed_by_drafts"], key=lambda row: row["tokens_per_second"])["num_speculative_tokens"]
        lines += [
            f"  {row['num_speculative_tokens']} drafted a round   acceptance length {row['acceptance_length']:.3f}, "
            f"{row['tokens_per_second']} tokens/s, {row['speed_up']} times"
            f"{', the fastest here, one server after the other' if row['num_speculative_tokens'] == fastest else ''}"
            for row in report["speed_by_drafts"]
        ]
    return lines


def _question_line(row: Report) -> str:
    return (
        f"acceptance length {row['acceptance_length']:.3f}{spread(row['interval_95'])}, {row['rounds']} rounds; "
        f"{row['speed_up']:.2f} times"
    )
