"""What the pipeline has made, in one table read from manifests, reports and run times; nothing is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.acceptance import spread
from eagle3.manifests import read_manifest
from eagle3.problems import InvalidInput, invalid
from eagle3.stage_guard import scratch_home

STAGES = (
    *("sample", "extract", "vocab-map", "train"),
    *("flatten", "validate-config", "simulate-weight-load", "serve-test"),
)
LABEL_WIDTH = 22
Json = dict[str, Any]


def closing_table() -> str:
    """Plain text, at most 100 columns. A part whose files are missing says which stage makes them."""
    parts = {
        **{"data/samples": _samples, "data/vocab_map": _draft_vocabulary, "data/checkpoints": _epochs},
        **{"reports": _checks, "reports/serve_test.json": _served, "runs.jsonl": _stages, "data/release": _checkpoint},
    }
    return "\n".join(line for where, part in parts.items() for line in _lines(where, part))


def _lines(where: str, part: Callable[[], list[str]]) -> list[str]:
    try:
        return part()
    except InvalidInput as error:
        return [_row(problem.where, f"{problem.found}; {problem.fix.split('   ')[0]}") for problem in error.problems]
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # made by other code, or edited
        return [_row(where, f"of another form ({type(error).__name__}: {error}); dvc repro")]


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH - 1}} {text}"


def _samples() -> list[str]:
    counts = read_manifest(Path("data/samples"), "sample").counts
    splits = ", ".join(f"{counts[split]:,} {split}" for split in ("train", "val", "eval"))
    tokens = f"{counts['tokens']:,}, of them {counts['supervised_tokens']:,} said by the verifier"
    dropped = f"{counts['read']:,} rows read, {counts['skipped']:,} skipped, {counts['failed']:,} failed"
    return [_row("samples", f"{splits} ({dropped})"), _row("tokens", tokens)]


def _draft_vocabulary() -> list[str]:
    decisions = read_manifest(Path("data/vocab_map"), "vocab-map").decisions
    train, held_out = (f"{decisions[f'coverage_{split}']:.2%} of {split}" for split in ("train", "eval"))
    size = f"{decisions['draft_vocab_size']:,} of {decisions['vocab_size']:,} tokens"
    return [_row("draft vocabulary", f"{size}; covers {train} and {held_out} tokens")]


def _epochs() -> list[str]:
    manifest = read_manifest(Path("data/checkpoints"), "train")
    k = str(manifest.params["train"]["ttt_steps"])
    head = ("checkpoint", "train loss", "val loss", "train accuracy", "val accuracy", f"walk val k={k}", "walk eval")
    rows = [head, *(_epoch(record, k, manifest.decisions["best_epoch"]) for record in manifest.decisions["epochs"])]
    return ["", *aligned(rows), "(accuracy by unrolled step, inside the draft vocabulary; * longest walk on val)", ""]


def _epoch(record: Json, k: str, best: int) -> tuple[str, ...]:
    accuracies = (" ".join(f"{value:.3f}" for value in record[f"{split}_accuracy"]) for split in ("train", "val"))
    walks = (f"{record['walk'][split][k]['acceptance_length']:.3f}" for split in ("val", "eval"))
    mark = "*" if record["epoch"] == best else ""
    return (f"{record['epoch']}{mark}", f"{record['train_loss']:.4f}", f"{record['val_loss']:.4f}", *accuracies, *walks)


def _checks() -> list[str]:
    config = _report("validate-config", "reports/validate_config.json")
    load = _report("simulate-weight-load", "reports/simulate_weight_load.json")
    rows = (("configs", config), ("weights", load))
    found = "; ".join(f"{name}: {one['errors']} errors, {one['warnings']} warnings" for name, one in rows)
    return [_row("checkpoints validated", f"{len(load['epochs'])} ({found})")]


def _served() -> list[str]:
    report = _report("serve-test", "reports/serve_test.json")
    served, greedy, speed = report["served"], report["greedy"], report["speed"]
    rates = " ".join(f"{rate:.3f}" for rate in served["rate_per_position"])
    length = f"{served['acceptance_length']:.3f}{spread(served['interval_95'])}, {served['rounds']:,} rounds"
    free = f"{report['served_without_loops']['acceptance_length']:.3f} without loops"
    equal = f"{greedy['equal']} of {greedy['answers']} equal with and without the draft, {greedy['ties']} near-ties"
    speeds = (
        f"{speed['tokens_per_second_with_draft']:.1f} with the draft, "
        f"{speed['tokens_per_second_without_draft']:.1f} without: {speed['speed_up']:.2f} times"
        f"{spread(speed['speed_up_interval_95'], 2)}"
    )
    return [
        _row("acceptance length", f"{length}; {free}"),
        _row("  predicted by walk", _prediction(report)),
        _row("acceptance rate", f"{rates} by position, {report['num_speculative_tokens']} tokens drafted a round"),
        *_questions(report["questions"]),
        _row("greedy answers", equal),
        _row("tokens/s", speeds),
        "",
    ]


def _questions(questions: Json) -> list[str]:
    """A row for each question file, with what was served on it."""
    return [
        _row(
            f"  on {name}",
            f"{found['acceptance_length']:.3f}{spread(found['interval_95'])}, {found['turns']} turns; "
            f"{found['speed_up']:.2f} times as fast",
        )
        for name, found in questions["by_file"].items()
    ]


def _prediction(report: Json) -> str:
    walk, same = report["walk"]["acceptance_length"], report["against_walk"]
    both = f"{same['walk_acceptance_length']:.3f} predicted and {same['acceptance_length']:.3f} served"
    return f"{walk:.3f}; over the same {same['rounds']:,} rounds {both}"


def _stages() -> list[str]:
    """Time and peak memory of each stage's last completed run here."""
    runs = last_runs(scratch_home() / "runs.jsonl")
    rows = [("stage", "time", "peak memory")]
    for stage in STAGES:
        run = runs.get(stage)
        shown = (clock(run["seconds"]), f"{run['peak_memory_bytes'] / 2**30:.1f} GiB") if run else ("not run here", "")
        rows.append((stage, *shown))
    rows.append(("all", clock(sum(run["seconds"] for run in runs.values())), ""))
    return [*aligned(rows), ""]


def _checkpoint() -> list[str]:
    epoch = read_manifest(Path("data/release"), "serve-test").decisions["epoch"]
    return [_row("checkpoint", f"data/release (epoch_{epoch}; every gate passed; how to serve it: README.md there)")]


def _report(stage: str, name: str) -> Json:
    try:
        value: Json = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise invalid("missing-input", name, "not there yet", "a report", f"dvc repro {stage}") from None
    return value


def last_runs(log: Path) -> dict[str, Json]:
    """Each stage's last completed run."""
    return {row["stage"]: row for row in recorded_runs(log) if row["completed"]}


def recorded_runs(log: Path) -> Iterator[Json]:
    """The runs that the stage guard noted on this machine; a line that a killed run left unfinished is none."""
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"stage", "seconds", "completed"} <= set(row):
            yield row


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}" if seconds >= 60 else f"{seconds:.1f} s"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
