"""What training needs to go on after a kill as if nothing had happened: one file in scratch, in full precision.

speculators' own checkpoints hold weights and optimizer in bfloat16 (train/checkpointer.py, 0.9.0): a run resumed from
one is another run. Here everything that the next step depends on is stored as it is in memory.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.atomic_files import atomic_path
from eagle3.drafts.process_group import num_processes, rank
from eagle3.drafts.sharding import deal_out, gathered_state
from eagle3.drafts.training_curves import Curves, EpochMetrics
from eagle3.problems import invalid

FILE = "state.pt"
# Unless machine.yaml says otherwise: not before this many seconds, and at most this share of the time spent saving.
EVERY_SECONDS = 30.0
SHARE = 0.02


@dataclass
class SaveSchedule:
    """When to save next.

    every: seconds between two saves, 0 = after every step; None = cheap, by the two numbers above.
    seconds: time spent saving so far.
    """

    every: float | None = None
    seconds: float = 0.0
    _last: float = 0.0
    _cost: float = 0.0

    def start(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        wait = max(EVERY_SECONDS, self._cost / SHARE) if self.every is None else self.every
        return time.monotonic() - self._last >= wait

    def saved(self, seconds: float) -> None:
        self._cost = seconds
        self.seconds += seconds
        self.start()


def save_state(folder: Path, trainer: Any, curves: Curves, epoch: int, step: int, seconds: float) -> None:
    """Write what a run needs to go on with row `step` of `epoch`; whole or not at all; in the first process.

    trainer: speculators' Trainer. seconds: spent in the training loop so far. Where the state is dealt out, every
    process must call it.
    """
    weights, optimizers = _taken(trainer)
    if rank() != 0:
        return
    state = {
        "epoch": epoch,
        "step": step,
        "global_step": trainer.global_step,
        "seconds": seconds,
        "processes": num_processes(),
        "shards": trainer.config.fsdp_shard,
        "weights": weights,
        "optimizers": optimizers,
        "schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "rng": torch.get_rng_state(),
        "rng_of_gpus": torch.cuda.get_rng_state_all(),
        "steps": curves.steps,
        "epochs": [asdict(metrics) for metrics in curves.epochs],
    }
    # a file of Python's: of one that it opens itself torch 2.13 does not say why it could not be written
    with atomic_path(folder / FILE) as partial, open(partial, "wb") as file:
        torch.save(state, file)


def load_state(folder: Path, trainer: Any, curves: Curves) -> tuple[int, int, float]:
    """Put a stored state back and return its (epoch, step, seconds); (0, 0, 0.0) where none is stored."""
    path = folder / FILE
    if not path.exists():
        return 0, 0, 0.0
    state = _read(path)
    if state["processes"] != num_processes():
        raise invalid(
            "training-state",
            str(path),
            f"a run of {state['processes']} processes",
            f"as many as now: {num_processes()}",
            f"set train_processes: {state['processes']} in machine.yaml, or rm {path}   (training then starts over)",
            "steps and rows would not fit together",
        )
    if state.get("shards") is not trainer.config.fsdp_shard:
        raise invalid(
            "training-state",
            str(path),
            f"a run with train_shards: {str(state.get('shards')).lower()}",
            f"one with train_shards: {str(trainer.config.fsdp_shard).lower()}",
            f"set it back in machine.yaml, or rm {path}   (training then starts over)",
            "weights would be rounded otherwise from here on",
        )
    _put_back(trainer, state["weights"], state["optimizers"])
    for each, stored in zip(trainer.schedulers, state["schedulers"], strict=True):
        each.load_state_dict(stored)
    trainer.current_epoch, trainer.global_step = state["epoch"], state["global_step"]
    torch.set_rng_state(state["rng"])
    torch.cuda.set_rng_state_all(state["rng_of_gpus"])
    curves.go_on(state["steps"], [EpochMetrics(**metrics) for metrics in state["epochs"]], state["global_step"])
    return state["epoch"], state["step"], state["seconds"]


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        found = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise invalid(
            "training-state",
            str(path),
            found,
            "the state that an earlier run of the same training left",
            f"rm {path}   (training then starts from its first step)",
        ) from None
    return state


def _taken(trainer: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Trained weights by name, and a list of the optimizers' states; dealt out: one state by name."""
    if trainer.config.fsdp_shard:
        return gathered_state(trainer.model, trainer.optimizers)
    weights = {name: tensor.data for name, tensor in _trained(trainer.model).items()}
    return weights, [optimizer.state_dict() for optimizer in trainer.optimizers]


def _put_back(trainer: Any, stored: dict[str, torch.Tensor], optimizers: Any) -> None:
    weights = _trained(trainer.model)
    assert set(stored) == set(weights), "a state of another draft under the same inputs"
    if trainer.config.fsdp_shard:
        deal_out(trainer.model, trainer.optimizers, stored, optimizers)
        return
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(stored[name])
    for each, state in zip(trainer.optimizers, optimizers, strict=True):
        each.load_state_dict(state)


def _trained(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """The rest is copied from the verifier whenever the model is built; several processes wrap it."""
    inner = getattr(model, "module", model)
    return {name: tensor for name, tensor in inner.named_parameters() if tensor.requires_grad}
