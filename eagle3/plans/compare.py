"""`make compare`: all experiments in one table, by `dvc exp show --json`: what differs, and what came of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.closing_table import aligned, clock, recorded_runs
from eagle3.formats.json_files import printable, spelled
from eagle3.git_answers import git
from eagle3.problems import invalid
from eagle3.stage_guard import scratch_home

Json = dict[str, Any]
HEAD = ("experiment", "acceptance length", "speed-up", "val loss", "release bytes", "time", "differs in")


def compare() -> str:
    """The table; `InvalidInput` where DVC cannot show its experiments."""
    shown = exp_show()
    baseline: Json = {}
    rows = [HEAD]
    seconds = experiment_seconds(scratch_home() / "runs.jsonl")
    for name, data in revisions(shown):
        params = dict(_leaves(data.get("params") or {}))
        baseline = baseline or params
        rows.append((printable(name, 40), *_measured(data), _time(seconds.get(name)), _differences(baseline, params)))
    return "\n".join(aligned(rows))


def exp_show() -> list[Json]:
    revisions = [word for commit in commits() for word in ("--rev", commit)]
    words = [sys.executable, "-m", "dvc", "exp", "show", "--json", *revisions]
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    try:
        shown: list[Json] = json.loads(done.stdout)
    except ValueError:
        found = printable(done.stderr.strip() or "no output", 400)
        raise invalid("no-experiments", "dvc exp show", found, "a list of experiments", "dvc exp show") from None
    return shown


def commits() -> list[str]:
    """HEAD and every commit that has experiments, which DVC keeps as Git refs; it shows those of HEAD alone."""
    listing = ("for-each-ref", "--sort=-committerdate", "--format=%(refname)", "refs/exps")
    head, refs = (git(*words) or "" for words in (("rev-parse", "HEAD"), listing))
    found = re.findall(r"^refs/exps/([0-9a-f]{2})/([0-9a-f]{38})/", refs, re.MULTILINE)
    return list(dict.fromkeys([*head.split(), *map("".join, found)]))


def revisions(shown: list[Json]) -> Iterator[tuple[str, Json]]:
    """(name, its data): the commit first, so that the others are compared with it; then its experiments, then here."""
    for commit in shown[1:]:
        yield commit["name"] or commit["rev"][:7], commit["data"] or {}
        for experiment in commit["experiments"] or ():
            last = experiment["revs"][0]
            yield last["name"] or last["rev"][:7], last["data"] or {}
    for here in shown[:1]:
        yield "workspace", here["data"] or {}


def _measured(data: Json) -> tuple[str, str, str, str]:
    served = _metric(data, "reports/serve_test.json", "served", "acceptance_length")
    speed_up = _metric(data, "reports/serve_test.json", "speed", "speed_up")
    loss = _metric(data, "reports/train.json", "val_loss")
    size = (data.get("outs") or {}).get("data/release", {}).get("size")
    return _number(served, 3), _number(speed_up, 2), _number(loss, 4), "" if size is None else f"{size:,}"


def _metric(data: Json, file: str, *keys: str) -> Any:
    value: Any = ((data.get("metrics") or {}).get(file) or {}).get("data")
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "failed or not run"


def _differences(baseline: Json, params: Json) -> str:
    keys = [key for key in {**baseline, **params} if baseline.get(key) != params.get(key)]
    return ", ".join(f"{key}={spelled(params.get(key), 40)}" for key in keys)


def _leaves(values: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted leaves of every params file that DVC shows (ours has one)."""
    for key, value in values.items():
        if key == "params.yaml":
            yield from _leaves(value.get("data") or {})
        elif isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def experiment_seconds(log: Path) -> dict[str, float]:
    """Seconds of the stages that ran for each experiment on this machine."""
    total: dict[str, float] = {}
    for row in recorded_runs(log):
        if name := row.get("experiment"):
            total[name] = total.get(name, 0.0) + row["seconds"]
    return total


def _time(seconds: float | None) -> str:
    return "" if seconds is None else clock(seconds)
