"""The parts of serve-test's report that split what was measured: by context, question category and drafted tokens."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from eagle3.acceptance import Acceptance, Round, acceptance_of, acceptance_of_counts, bootstrap
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
    """Every round by the number of tokens before it."""
    found: dict[str, list[Round]] = {}
    for round_ in sorted((one for rounds_ in rounds for one in rounds_), key=lambda one: one.position):
        found.setdefault(bucket(round_.position), []).append(round_)
    return {name: acceptance_of(rounds_, k).as_dict() for name, rounds_ in found.items()}


def questions_report(turns: Sequence[Turn], too_long: Sequence[str], k: int) -> Report:
    """Acceptance over all turns and by category, as the server counted it, and the turns that did not fit."""
    categories: dict[str, list[Acceptance]] = {}
    for turn in turns:
        categories.setdefault(turn.category, []).append(acceptance_of_counts(turn.answer.accepted, k))
    everything = [one for found in categories.values() for one in found]
    by_category = {
        name: {"turns": len(found), **total_of(found).as_dict()} for name, found in sorted(categories.items())
    }
    return {
        "turns": len(turns),
        "too_long": list(too_long),
        "served": total_of(everything).as_dict() if everything else None,
        "by_category": by_category,
    }


def speed_report(answers: Sequence[Answer], others: Sequence[Answer], order: str) -> Report:
    """Tokens per second with the draft (`answers`) and without it; intervals are over prompts.

    speed_up: of all tokens; speed_up_per_prompt: the median of the prompts' own ratios.
    """
    pairs = [*zip(answers, others, strict=True)]
    low, high = bootstrap(pairs, _speed_up)
    low_median, high_median = bootstrap(pairs, _median_speed_up)
    return {
        "order": order,
        "tokens_per_second_with_draft": round(tokens_per_second(answers), 2),
        "tokens_per_second_without_draft": round(tokens_per_second(others), 2),
        "speed_up": round(_speed_up(pairs), 3),
        "speed_up_interval_95": [round(low, 3), round(high, 3)],
        "speed_up_per_prompt": round(_median_speed_up(pairs), 3),
        "speed_up_per_prompt_interval_95": [round(low_median, 3), round(high_median, 3)],
        "first_token_seconds_with_draft": round(median(one.first_token_seconds for one in answers), 4),
        "first_token_seconds_without_draft": round(median(one.first_token_seconds for one in others), 4),
    }


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
    if questions["turns"]:
        lengths = ", ".join(f"{name} {row['acceptance_length']:.3f}" for name, row in questions["by_category"].items())
        lines.append(
            f"questions             {questions['turns']} turns, {len(questions['too_long'])} too long; {lengths}"
        )
    if len(report["speed_by_drafts"]) > 2:
        fastest = max(report["speed_by_drafts"], key=lambda row: row["tokens_per_second"])["num_speculative_tokens"]
        lines += [
            f"  {row['num_speculative_tokens']} drafted a round   acceptance length {row['acceptance_length']:.3f}, "
            f"{row['tokens_per_second']} tokens/s, {row['speed_up']} times"
            f"{', the fastest here' if row['num_speculative_tokens'] == fastest else ''}"
            for row in report["speed_by_drafts"]
        ]
    return lines
