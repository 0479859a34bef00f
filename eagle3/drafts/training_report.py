"""What training leaves behind in numbers: the record of a checkpoint, the best one, and the reports under reports/.

A checkpoint is one of `train.checkpoints_per_epoch` in a pass over the samples; number N, from 0, lies in `epoch_N`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle3.atomic_files import write_json, write_text
from eagle3.drafts.training_curves import EpochMetrics

Record = dict[str, Any]


def epoch_record(epoch: int, metrics: EpochMetrics, walk: Record, walk_without_loops: Record) -> Record:
    """One entry of the manifest's `decisions.epochs`; numbers rounded to six digits.

    walk: as `eagle3.drafts.draft_walk.walk_table` returns them, by split and number of drafted tokens.
    """
    return {
        "epoch": epoch,
        "train_loss": round(metrics.train_loss, 6),
        "val_loss": round(metrics.val_loss, 6),
        "train_accuracy": [round(value, 6) for value in metrics.train_accuracy],
        "val_accuracy": [round(value, 6) for value in metrics.val_accuracy],
        "walk": walk,
        "walk_without_loops": walk_without_loops,
    }


def walk_length(record: Record, split: str, k: int, table: str = "walk") -> float:
    return float(record[table][split][str(k)]["acceptance_length"])


def best_epoch(records: Sequence[Record], k: int) -> int:
    """The checkpoint with the longest walk over val at k drafted tokens, the earliest of equals; eval selects nothing.

    Its number, as in `epoch_N`.
    """
    return int(max(records, key=lambda record: (walk_length(record, "val", k), -record["epoch"]))["epoch"])


def summary(records: Sequence[Record], k: int) -> Record:
    """reports/train.json: the best checkpoint's numbers. The accuracies' names say what they ignore."""
    best = records[best_epoch(records, k)]
    accuracies = {
        f"{split}_accuracy_inside_draft_vocabulary_step_{step}": value
        for split in ("train", "val")
        for step, value in enumerate(best[f"{split}_accuracy"])
    }
    walks = {
        f"{table}_acceptance_length_{split}_{k}_tokens": walk_length(best, split, k, table)
        for table in ("walk", "walk_without_loops")
        for split in ("val", "eval")
    }
    losses = {name: best[name] for name in ("train_loss", "val_loss")}
    return {"best_checkpoint": best["epoch"], **losses, **accuracies, **walks}


def verdict(records: Sequence[Record], k: int, start: Record | None = None) -> str:
    """One line for people; says so when training, or all after its first checkpoint, did not help.

    start: as in `write_reports`.
    """
    best = records[best_epoch(records, k)]
    text = (
        f"{len(records)} checkpoints, best epoch_{best['epoch']}: val loss {best['val_loss']:.3f}, acceptance length "
        f"by walk at k={k}: {walk_length(best, 'val', k):.3f} on val, {walk_length(best, 'eval', k):.3f} on eval"
    )
    if start and walk_length(best, "val", k) <= walk_length(start, "val", k):
        return f"{text}; validation did not improve on the draft it started from ({walk_length(start, 'val', k):.3f})"
    if len(records) > 1 and best["epoch"] == records[0]["epoch"]:
        return f"{text}; validation did not improve after the first checkpoint"
    return text


def step_0(record: Record, k: int) -> str:
    """What a draft to start from is accepted for before the first step."""
    right, length = ([walk_length(record, split, tokens) for split in ("val", "eval")] for tokens in (1, k))
    return (
        f"warm start, before the first step: {right[0] - 1:.1%} of first tokens right on val, {right[1] - 1:.1%} on "
        f"eval; acceptance length by walk at k={k}: {length[0]:.3f} on val, {length[1]:.3f} on eval"
    )


def progress(record: Record, k: int) -> str:
    """The line of one checkpoint, while training goes on."""
    accuracies = " ".join(f"{value:.3f}" for value in record["val_accuracy"])
    return (
        f"epoch_{record['epoch']}: loss {record['train_loss']:.3f}, val {record['val_loss']:.3f}, acceptance length by "
        f"walk at k={k}: {walk_length(record, 'val', k):.3f} on val, {walk_length(record, 'eval', k):.3f} on eval; "
        f"accuracy on val, inside the draft vocabulary, {accuracies}"
    )


def write_reports(out: Callable[[str], Path], records: Sequence[Record], k: int, start: Record | None = None) -> None:
    """train.json, loss.csv (a row per checkpoint) and accuracy.csv (per checkpoint and step, inside the vocabulary).

    start: the walk of the draft that training began with.
    """
    losses = [(record["epoch"], record["train_loss"], record["val_loss"]) for record in records]
    accuracies = [
        (record["epoch"], step, train, val)
        for record in records
        for step, (train, val) in enumerate(zip(record["train_accuracy"], record["val_accuracy"], strict=True))
    ]
    before = {
        f"warm_start_walk_acceptance_length_{split}_{k}_tokens": walk_length(start, split, k)
        for split in ("val", "eval")
        if start
    }
    write_json(out("reports/train.json"), summary(records, k) | before)
    write_text(out("reports/loss.csv"), _csv("checkpoint,train,val", losses))
    write_text(out("reports/accuracy.csv"), _csv("checkpoint,step,train,val", accuracies))


def _csv(header: str, rows: Iterable[tuple[Any, ...]]) -> str:
    return "".join(f"{line}\n" for line in [header, *(",".join(map(str, row)) for row in rows)])
