"""data/hidden_states, data/vocab_map -> tokens/s of a training step, the library's forward against ours, in turns.

    python -m benchmarks.train_speed [--steps 50] [--threads 2] [--rows 1024] [--optimizer adamw] [--free]

The library trains; before each step ours takes over its weights (not timed), so that both compute the same thing:
forward under bfloat16 autocast, backward, clipping and the optimizers of params.yaml, as speculators' Trainer does them
(0.9.0), one side after the other on one row, so that whatever else the machine does hits both. The library's side is
its own forward with `sdpa`, its eager loss and torch's default AdamW. Exit status 1 when the losses differ by more than
1e-3 at any step, or ours is less than twice as fast.

--free: also let ours train alone from the same start, and beside it the library from weights that differ by 1e-6 of
themselves: how far apart two runs drift that differ by rounding, printed for each step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers

from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.drafts.draft_model import build_draft, read_vocabulary
from eagle3.drafts.training import one_pass_adamw, trainer_config
from eagle3.drafts.training_data import PackedRows, read_documents
from eagle3.manifests import read_manifest
from eagle3.params import Params, read_params
from eagle3.states.hidden_states import HiddenStates
from eagle3.verifiers.verifier import resolve_verifier

HIDDEN_STATES, VOCAB_MAP = Path("data/hidden_states"), Path("data/vocab_map")
MAX_LOSS_DIFFERENCE, MIN_RATIO = 1e-3, 2.0
# The first steps allocate memory and choose kernels.
WARM_UP = 2
PER_LINE = 10


@dataclass
class Side:
    """One way to take a step. seconds and losses: of every step so far."""

    name: str
    model: Any
    forward: Callable[..., Any]
    optimizers: list[torch.optim.Optimizer]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def take_over(self, other: Side) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                if mine.requires_grad:
                    mine.copy_(theirs)

    def step(self, batch: dict[str, Any], call: dict[str, Any]) -> None:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, metrics = self.forward(self.model, **batch, **call)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.losses.append({name: value.item() for name, value in metrics.items()}["loss_sum"])
        self.seconds.append(time.perf_counter() - start)


class Bench:
    """A new draft for the data in this repository, as often as asked for, and rows of `size` tokens to train it on."""

    def __init__(self, params: Params, size: int) -> None:
        self.params, steps = params, params.train.ttt_steps
        verifier = resolve_verifier(params.verifier)
        hidden, vocab_map = read_manifest(HIDDEN_STATES, "extract"), read_manifest(VOCAB_MAP, "vocab-map")
        sizes = vocab_map.decisions["draft_vocab_size"], hidden.decisions["aux_layer_ids"]
        architecture = resolve_architecture(params.draft, verifier.text_config, *sizes)
        self.model = build_draft(architecture, verifier, read_vocabulary(VOCAB_MAP, architecture), steps, params.seed)
        states = HiddenStates(HIDDEN_STATES)
        documents = read_documents(states, size, steps).by_split["train"]
        self.rows = PackedRows(states, documents, size, params.seed)
        self.config = trainer_config(params.train, 1, Path("unused"))
        self.call = self.config.train_call_kwargs or {}

    def side(self, name: str, library: bool) -> Side:
        model = copy.deepcopy(self.model)
        optimizers = build_optimizers(model, self.config)
        if library:
            return Side(name, model, Eagle3DraftModel.forward, optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.AdamW):
                one_pass_adamw(optimizer)
        return Side(name, model, type(model).forward, optimizers)

    def batches(self, count: int) -> Iterator[dict[str, Any]]:
        rows = (row for epoch in range(count) for row in self.rows.rows(epoch))
        return (self.rows.batch(row) for row in islice(rows, count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], help="instead of that of params.yaml")
    parser.add_argument("--free", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    params = read_params()
    asked = replace(params.train, optimizer=options.optimizer or params.train.optimizer)
    bench = Bench(replace(params, train=asked), options.rows)
    library, ours = bench.side("speculators", library=True), bench.side("ours", library=False)
    free = [bench.side("ours, alone", library=False), bench.side("speculators, moved", library=True)]
    with torch.no_grad():
        for tensor in free[1].model.parameters():
            tensor.mul_(1 + 1e-6)
    tokens = []
    for batch in bench.batches(options.steps):
        tokens.append(int((batch["document_ids"] != -1).sum()))
        ours.take_over(library)
        for side in (library, ours, *(free if options.free else ())):
            side.step(batch, bench.call)
    for side in (library, ours):
        speed = sum(tokens[WARM_UP:]) / sum(side.seconds[WARM_UP:])
        print(f"{side.name:12} {speed:6.0f} tokens/s, {1000 * statistics.median(side.seconds):4.0f} ms a step (median)")
    for side in free if options.free else ():
        print(f"{side.name}, trained from the same start: losses apart by at most {apart(side, library):.1e}; by step:")
        each = differences(side, library)
        for first in range(0, len(each), PER_LINE):
            print(f"  {first:3}", *(f"{one:.1e}" for one in each[first : first + PER_LINE]))
    ratio = statistics.median(a / b for a, b in zip(library.seconds, ours.seconds, strict=True))
    difference = apart(ours, library)
    print(f"{ratio:.2f} times as fast (median over {len(tokens)} steps), losses apart by at most {difference:.2e}")
    return int(difference > MAX_LOSS_DIFFERENCE or ratio < MIN_RATIO)


def apart(side: Side, library: Side) -> float:
    """The largest relative difference of the losses of any step."""
    return max(differences(side, library))


def differences(side: Side, library: Side) -> list[float]:
    """Of each step's loss, relative."""
    return [abs(mine - theirs) / theirs for mine, theirs in zip(side.losses, library.losses, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
