"""What speculators' Trainer reports, as a progress bar while it runs and as one record per epoch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from eagle3.problems import invalid


@dataclass(frozen=True)
class EpochMetrics:
    """Means over the rows of an epoch. Accuracy s: share of supervised positions whose steps 0..s were all right,
    judged inside the draft vocabulary, so higher than what a server accepts."""

    train_loss: float
    val_loss: float
    train_accuracy: tuple[float, ...]
    val_accuracy: tuple[float, ...]


class Curves(logging.Handler):
    """What the Trainer reports (a dictionary per step and per validation) as a progress bar and as epochs.

    processes: how many train together; the Trainer's tokens/s are those of one, with a row like the others'.
    """

    def __init__(self, bar: Any, processes: int = 1) -> None:
        super().__init__()
        self.bar, self.processes = bar, processes
        self.steps: list[dict[str, float]] = []
        self.val: dict[str, float] = {}
        self.epochs: list[EpochMetrics] = []

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        if "train" in message:
            self._step(message["train"], self.processes * message["profile"]["tokens_per_s"])
        elif "val" in message:
            self.val = message["val"]

    def _step(self, metrics: dict[str, float], tokens_per_s: float) -> None:
        if not math.isfinite(metrics["loss"]):
            raise invalid(
                "diverged",
                "train.learning_rate",
                f"loss {metrics['loss']} at step {self.bar.n}",
                "a finite loss",
                "lower train.learning_rate, or raise train.warmup_ratio",
            )
        assert not metrics["error_records"], "samples were dropped from a batch"
        self.steps.append(metrics)
        said = f"loss {metrics['loss']:.3f}, accuracy {metrics['full_acc_0']:.3f}, {tokens_per_s:.0f} tokens/s"
        self.bar.set_postfix_str(said, refresh=False)
        self.bar.update()

    def go_on(self, steps: list[dict[str, float]], epochs: list[EpochMetrics], done: int) -> None:
        """Continue an earlier run: its steps of the open epoch, its closed epochs, its number of steps in all."""
        self.steps, self.epochs = list(steps), list(epochs)
        self.bar.initial = self.bar.n = done
        self.bar.refresh()

    def close_epoch(self, ttt_steps: int) -> EpochMetrics:
        def mean(name: str) -> float:
            return sum(step[name] for step in self.steps) / len(self.steps)

        metrics = EpochMetrics(
            mean("loss"),
            self.val["loss_epoch"],
            tuple(mean(f"full_acc_{step}") for step in range(ttt_steps)),
            tuple(self.val[f"full_acc_{step}_epoch"] for step in range(ttt_steps)),
        )
        self.epochs.append(metrics)
        self.steps, self.val = [], {}
        return metrics


@contextmanager
def curves_of(steps: int, processes: int = 1, silent: bool = False) -> Iterator[Curves]:
    """Attached to the library's metrics logger itself: its root handler turns the dictionaries into text.

    silent: without a progress bar.
    """
    logger = logging.getLogger("speculators.metrics")
    level = logger.level
    with tqdm(total=steps, desc="train", unit="row", disable=silent) as bar:
        curves = Curves(bar, processes)
        logger.addHandler(curves)
        logger.setLevel(logging.INFO)
        try:
            yield curves
        finally:
            logger.removeHandler(curves)
            logger.setLevel(level)


def announce(line: str) -> None:
    """A line of its own above the progress bar, on stderr as the bar."""
    tqdm.write(line, file=sys.stderr)
