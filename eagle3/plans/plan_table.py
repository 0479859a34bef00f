"""The plan as a table: each stage's state and reasons, the time it took last, and what it will write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from eagle3.closing_table import aligned, clock, last_runs
from eagle3.plans.plan import MAY_RUN, RUNS, StagePlan
from eagle3.stage_guard import scratch_home

# What a stage loads: what makes a GPU, or much memory, necessary.
LOADS = {
    "sample": "the verifier",
    "extract": "the verifier",
    "train": "the draft, the verifier's embedding and head",
    "simulate-weight-load": "the draft, on the CPU",
    "serve-test": "the verifier and the draft",
}
MAX_REASONS = 4
Json = dict[str, Any]


def plan_rows(plans: list[StagePlan]) -> list[Json]:
    """The plan with the last run's time in seconds (None = never run here), for `--json`."""
    runs = last_runs(scratch_home() / "runs.jsonl")
    return [
        {
            "stage": one.stage,
            "state": one.state,
            "why": list(one.why),
            "seconds_last_time": runs.get(one.stage, {}).get("seconds"),
            "bytes_last_time": one.bytes_written if one.state in (RUNS, MAY_RUN) else 0,
            "loads": LOADS.get(one.stage, "") if one.state in (RUNS, MAY_RUN) else "",
        }
        for one in plans
    ]


def plan_table(rows: list[Json]) -> str:
    table = [("stage", "", "took", "wrote", "loads", "because")]
    for row in rows:
        busy = row["state"] in (RUNS, MAY_RUN)
        took = row["seconds_last_time"]
        why = "; ".join([*row["why"][:MAX_REASONS], *(["…"] if len(row["why"]) > MAX_REASONS else [])])
        shown = ("not known" if took is None else clock(took), f"{row['bytes_last_time']:,}") if busy else ("", "")
        table.append((row["stage"], row["state"], *shown, row["loads"], why))
    busy_rows = [row for row in rows if row["state"] in (RUNS, MAY_RUN)]
    return "\n".join([*aligned(table), "", _total(busy_rows)])


def _total(rows: list[Json]) -> str:
    if not rows:
        return "nothing runs"
    seconds = sum(row["seconds_last_time"] or 0 for row in rows)
    size = sum(row["bytes_last_time"] for row in rows)
    free = shutil.disk_usage(Path()).free
    unknown = [row["stage"] for row in rows if row["seconds_last_time"] is None]
    more = f" and the time of {', '.join(unknown)}" if unknown else ""
    return f"at most {clock(seconds)}{more}, {size:,} bytes written as last time, {free:,} free (eagle3 estimate: more)"
