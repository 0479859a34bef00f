"""data/hidden_states, data/vocab_map -> tokens/s of a training step, the library's forward against ours, in turns.

    python -m benchmarks.train_speed [--steps 50] [--threads 2]

Both sides start from the same weights and take the same rows in the same order, one step each in turn, so that whatever
else the machine does hits both: forward under bfloat16 autocast, backward, clipping, AdamW, as speculators' Trainer
does them (0.9.0). The library's side is its own forward with `sdpa`, its eager loss and torch's default AdamW. Exit
status 1 when the losses differ by more than 1e-3 at any step, or ours is less than twice as fast.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel

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


@dataclass
class Side:
    """One way to take a step. seconds and losses: of every step so far."""

    name: str
    model: Any
    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, batch: dict[str, Any], call: dict[str, Any]) -> None:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, metrics = self.forward(self.model, **batch, **call)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append({name: value.item() for name, value in metrics.items()}["loss_sum"])
        self.seconds.append(time.perf_counter() - start)


def sides(params: Params) -> tuple[Side, Side, Iterator[dict[str, Any]], dict[str, Any]]:
    """The library and ours with equal weights, the rows of the first epochs, and the arguments of a training call."""
    verifier = resolve_verifier(params.verifier)
    hidden, vocab_map = read_manifest(HIDDEN_STATES, "extract"), read_manifest(VOCAB_MAP, "vocab-map")
    sizes = vocab_map.decisions["draft_vocab_size"], hidden.decisions["aux_layer_ids"]
    architecture = resolve_architecture(params.draft, verifier.text_config, *sizes)
    vocabulary = read_vocabulary(VOCAB_MAP, architecture)
    ours = build_draft(architecture, verifier, vocabulary, params.train.ttt_steps, params.seed)
    theirs = copy.deepcopy(ours)
    states = HiddenStates(HIDDEN_STATES)
    train_documents = read_documents(states, params.train.total_seq_len, params.train.ttt_steps).by_split["train"]
    rows = PackedRows(states, train_documents, params.train.total_seq_len, params.seed)

    def adamw(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=params.train.learning_rate)

    batches = (rows.batch(row) for epoch in range(100) for row in rows.rows(epoch))
    library = Side("speculators", theirs, Eagle3DraftModel.forward, adamw(theirs))
    own = Side("ours", ours, type(ours).forward, one_pass_adamw(adamw(ours)))
    call = trainer_config(params.train, 1, Path("unused")).train_call_kwargs
    assert call is not None
    return library, own, batches, call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library, ours, batches, call = sides(read_params())
    tokens = []
    for _, batch in zip(range(options.steps), batches, strict=False):
        tokens.append(int((batch["document_ids"] != -1).sum()))
        for side in (library, ours):
            side.step(batch, call)
    for side in (library, ours):
        speed = sum(tokens[WARM_UP:]) / sum(side.seconds[WARM_UP:])
        print(f"{side.name:12} {speed:6.0f} tokens/s, {1000 * statistics.median(side.seconds):4.0f} ms a step (median)")
    ratio = statistics.median(a / b for a, b in zip(library.seconds, ours.seconds, strict=True))
    difference = max(abs(a - b) / a for a, b in zip(library.losses, ours.losses, strict=True))
    print(f"{ratio:.2f} times as fast (median over {len(tokens)} steps), losses differ by at most {difference:.1e}")
    return int(difference > MAX_LOSS_DIFFERENCE or ratio < MIN_RATIO)


if __name__ == "__main__":
    sys.exit(main())
