"""One process of a small training in float32: `python -m tests.training_worker FOLDER`, alone or under torchrun.

FOLDER holds `job.json`: total_seq_len, optimizer, shards, stop_after (steps, or null); `result.pt` is left there. The
library's own forward in float32 throughout, so that what is compared is the distribution and not the rounding of
bfloat16.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eagle3.drafts import draft_model, training
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.drafts.process_group import num_processes, process_group, rank
from eagle3.drafts.training_data import PackedRows, Row, read_documents
from eagle3.params import VerifierParams, read_params
from eagle3.verifiers.verifier import resolve_verifier
from tests.code_deps import ROOT
from tests.training_inputs import States, random_states

POSITIONS, SAMPLES = 64, 13


def equal_samples() -> States:
    """Samples of equal length and supervision, one for validation; 12 to train on, six pairs."""
    states = random_states(SAMPLES, POSITIONS + 1, 3)
    samples = [states.get(name) for name in states.sample_ids]
    return States(*(replace(each, split="val" if number == 0 else "train") for number, each in enumerate(samples[:-1])))


class Float32Rows(PackedRows):
    """FSDP casts what it is given to the dtype of its weights, so that a norm of bfloat16 states is rounded later."""

    def batch(self, row: Row) -> dict[str, Any]:
        batch = super().batch(row)
        return batch | {name: batch[name].float() for name in ("hidden_states", "verifier_last_hidden_states")}


def stop_after(steps: int) -> None:
    """End every process when so many steps are taken, and saved."""
    save = training.EpochTrainer._step_done

    def step_done(trainer: training.EpochTrainer) -> None:
        save(trainer)
        if trainer.global_step == steps:
            sys.exit(9)

    training.EpochTrainer._step_done = step_done


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    total_seq_len, result = job["total_seq_len"], {}
    if job["stop_after"]:
        stop_after(job["stop_after"])
    torch.set_num_threads(1)
    params = read_params(ROOT / "params.yaml")
    asked = replace(params.train, epochs=2, total_seq_len=total_seq_len, optimizer=job["optimizer"])
    verifier = resolve_verifier(VerifierParams(str(folder.parent / "verifier"), None, None, False))
    architecture = resolve_architecture(params.draft, verifier.text_config, 320, [1, 3, 5])
    config = training.trainer_config
    training.trainer_config = lambda *given: config(*given)._replace(hidden_states_dtype=torch.float32)
    draft_model.draft_class = lambda _: Eagle3DraftModel

    def keep(epoch: int, metrics: Any, model: Eagle3DraftModel) -> None:
        weights = {name: tensor.data for name, tensor in model.named_parameters() if tensor.requires_grad}
        result.update(weights={name: tensor.clone() for name, tensor in weights.items()})

    with process_group():
        model = draft_model.build_draft(architecture, verifier, None, asked.ttt_steps, 0)
        states = equal_samples()
        splits = read_documents(states, total_seq_len, asked.ttt_steps).by_split
        rows = Float32Rows(states, splits["train"], total_seq_len, 0, share=(rank(), num_processes()))
        both = rows, Float32Rows(states, splits["val"], total_seq_len)
        done = training.train(model, asked, both, folder, keep, save_every=0.0, shards=job["shards"])
        if rank() == 0:
            losses = [(epoch.train_loss, epoch.val_loss, *epoch.val_accuracy) for epoch in done.epochs]
            torch.save({**result, "losses": losses, "settings": done.settings}, folder / "result.pt")


if __name__ == "__main__":
    main()
