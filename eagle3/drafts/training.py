"""Training by speculators' own Trainer: every setting explicit, its CPU workarounds beside the import, exact resume."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import speculators.train.trainer
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.trainer import Trainer, TrainerConfig

from eagle3.drafts.draft_model import INITIAL_STD
from eagle3.drafts.process_group import first_says, num_processes, rank
from eagle3.drafts.sharding import gathered_weights
from eagle3.drafts.training_curves import Curves, EpochMetrics, announce, curves_of
from eagle3.drafts.training_data import PackedRows
from eagle3.drafts.training_state import SaveSchedule, load_state, save_state
from eagle3.gpus import device
from eagle3.params import TrainParams
from eagle3.problems import invalid

# What the library decides alone, at its own values: trainer.py and optimizers.py of 0.9.0.
MAX_GRADIENT_NORM = 1.0
MUON_NS_STEPS = 5
MUON_ADJUST_LR = "match_rms_adamw"
COSINE_CYCLES = 0.5  # from the peak to zero, once
FLEX_BLOCK = 128
OnEpoch = Callable[[int, EpochMetrics, Eagle3DraftModel], None]


@dataclass(frozen=True)
class TrainingRun:
    """seconds: in the training loop, without validation, in all runs that led here; saving_seconds: of this run.

    settings: what the run used, for the manifest.
    """

    epochs: tuple[EpochMetrics, ...]
    seconds: float
    saving_seconds: float
    token_passes: int
    settings: dict[str, Any]


def train(
    model: Eagle3DraftModel,
    params: TrainParams,
    rows: tuple[PackedRows, PackedRows],
    folder: Path,
    on_epoch: OnEpoch,
    save_every: float | None = None,
    shards: bool = False,
) -> TrainingRun:
    """Train `model`; `on_epoch(number, metrics, model)` runs after each epoch's validation, in the first process.

    rows: training and validation. Where torchrun has started several processes (see `eagle3.drafts.process_group`),
    each takes training rows of its own and a step is the mean over them; since the loss of a row is a mean over its
    targets, a target weighs more in a row with few of them. folder: keeps the state of the run; a killed run that is
    called again with the same model, parameters, rows and folder goes on from there, and on a CPU ends with the bytes
    of an uninterrupted one. save_every: seconds between two states, None = at most 2% of the time (`SaveSchedule`).
    shards: weights, gradients and optimizer are dealt out to the processes (FSDP); `on_epoch` gets a whole copy. Else
    `model` itself is trained.

    SIGTERM and SIGINT end the run with the caller's own handlers. Raises `InvalidInput` when the loss is no longer
    finite.
    """
    _check_blocks(params.total_seq_len)
    train_rows, val_rows = rows
    checkpoints = params.epochs * params.checkpoints_per_epoch
    sizes = [len(train_rows.own_rows(number)) for number in range(checkpoints)]
    _check_parts(min(sizes), params.checkpoints_per_epoch)
    steps = sum(sizes)
    config = trainer_config(params, steps, folder / "unused")._replace(fsdp_shard=shards)
    whole = copy.deepcopy(model) if shards and rank() == 0 else model
    with ExitStack() as stack:
        stack.enter_context(_on_this_device())
        curves = stack.enter_context(curves_of(steps, num_processes(), silent=rank() != 0))
        trainer = EpochTrainer(model, config, train_rows, val_rows)
        if device().type == "cpu":
            trainer.device_type = "cpu"  # it falls back to "cuda", where autocast switches itself off
        settings = _settings(trainer)  # a state that is loaded adds torch's own defaults to them
        trainer.on_epoch = partial(_close_epoch, on_epoch, trainer, whole, params.ttt_steps)
        trainer.go_on(folder, curves, SaveSchedule(save_every))
        # The decorator around run_training answers SIGTERM and SIGINT with a save and a normal return, exit code 0
        # (graceful_shutdown.py, 0.9.0); below it the signals do what the stage guard says.
        Trainer.run_training.__wrapped__(trainer)
    assert len(curves.epochs) == checkpoints, "the library returned before the last epoch"
    passes = train_rows.positions * params.epochs
    epochs, saving = tuple(curves.epochs), trainer.schedule.seconds
    return TrainingRun(epochs, trainer.seconds, saving, passes, settings)


def _close_epoch(on_epoch: OnEpoch, trainer: EpochTrainer, whole: Eagle3DraftModel, ttt_steps: int, epoch: int) -> None:
    """Every process has the same metrics and weights, or its part of them; the first one speaks and writes."""
    metrics = trainer.curves.close_epoch(ttt_steps)
    if not trainer.config.fsdp_shard:
        if rank() == 0:
            on_epoch(epoch, metrics, whole)
        return
    weights = gathered_weights(trainer.model)
    if rank() == 0:
        whole.load_state_dict(weights)
        on_epoch(epoch, metrics, whole.to(device()))
        whole.to("cpu")


def trainer_config(params: TrainParams, steps: int, folder: Path) -> TrainerConfig:
    """Every field of the library's TrainerConfig (0.9.0), so that none of its defaults (not the CLI's) decides."""
    train_call, val_call = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn=params.loss,
        loss_implementation="fused" if torch.cuda.is_available() else "eager",
        ttt_steps=params.ttt_steps,
        ttt_step_loss_decay=params.ttt_step_loss_decay,
    )
    muon_lr = params.learning_rate if params.muon_learning_rate is None else params.muon_learning_rate
    config = TrainerConfig(
        lr=params.learning_rate,
        num_epochs=params.epochs * params.checkpoints_per_epoch,
        save_path=str(folder),
        resume_from_checkpoint=False,
        train_call_kwargs=train_call,
        val_call_kwargs=val_call,
        optimizer=params.optimizer,
        weight_decay=params.weight_decay,
        muon_lr=muon_lr,
        muon_momentum=params.muon_momentum,
        muon_weight_decay=params.muon_weight_decay,
        muon_ns_steps=MUON_NS_STEPS,
        muon_adjust_lr_fn=MUON_ADJUST_LR,
        scheduler_type=params.scheduler,
        scheduler_warmup_steps=round(params.warmup_ratio * steps),
        scheduler_warmup_ratio=None,
        scheduler_total_steps=steps,
        scheduler_num_cosine_cycles=COSINE_CYCLES,
        checkpoint_freq=1,
        save_best=False,
        hidden_states_dtype=torch.bfloat16,
        log_freq=1,
        fsdp_shard=False,
        gradient_checkpointing=False,
        max_steps=None,
    )
    assert len(config) == 25, "a field of another version of TrainerConfig is left to its default"
    return config


def _check_blocks(total_seq_len: int) -> None:
    """On a GPU the library extends a block mask by whole blocks (0.9.0, models/eagle3/attention.py)."""
    if device().type == "cuda" and total_seq_len % FLEX_BLOCK:
        raise invalid(
            "row-length",
            "train.total_seq_len",
            str(total_seq_len),
            f"a multiple of {FLEX_BLOCK}, the block of flex attention on a GPU",
            f"dvc exp run -S train.total_seq_len={-(-total_seq_len // FLEX_BLOCK) * FLEX_BLOCK}",
        )


def _check_parts(smallest: int, parts: int) -> None:
    if not smallest:
        raise invalid(
            "checkpoints-per-epoch",
            "train.checkpoints_per_epoch",
            str(parts),
            "at most one per packed row of an epoch",
            "lower train.checkpoints_per_epoch, or train.total_seq_len",
        )


def _settings(trainer: Trainer) -> dict[str, Any]:
    """What the library used that params do not name: optimizer constants, steps, its own limits."""
    optimizers = [
        {"name": type(optimizer).__name__, "tensors": sum(len(group["params"]) for group in optimizer.param_groups)}
        | {name: value for name, value in optimizer.defaults.items() if isinstance(value, (int, float, str, tuple))}
        for optimizer in trainer.optimizers
    ]
    return {
        "optimizers": optimizers,
        "optimizer_steps": trainer.config.scheduler_total_steps,
        "warmup_steps": trainer.config.scheduler_warmup_steps,
        "cosine_cycles": trainer.config.scheduler_num_cosine_cycles,
        "max_gradient_norm": MAX_GRADIENT_NORM,
        "initial_std": INITIAL_STD,
        "autocast": "bfloat16",
        "processes": num_processes(),
        "shards": trainer.config.fsdp_shard,
    }


def use_threads(count: int | None) -> None:
    """Threads of one operation on the CPU; None leaves all cores. Sums depend on it in the last bits."""
    if count is not None:
        torch.set_num_threads(count)


def one_pass_adamw(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """AdamW's same update in one pass over memory instead of a dozen; torch 2.13 does not choose it by itself."""
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


class EpochTrainer(Trainer):
    """The library's loop. It writes no checkpoint of its own (optimizer state in bf16): a state of ours instead."""

    on_epoch: Callable[[int], None]
    seconds = 0.0

    def go_on(self, folder: Path, curves: Curves, schedule: SaveSchedule) -> None:
        """Take up what an earlier run left in `folder`, and leave there what a later one needs."""
        self.folder, self.curves, self.schedule = folder, curves, schedule
        epoch, self.step, self.seconds = load_state(folder, self, curves)
        self.train_loader.skip = self.step
        if self.global_step and rank() == 0:
            announce(f"train: goes on with row {self.step} of epoch {epoch} ({self.global_step} steps were done)")
        schedule.start()

    def setup_optimizer(self) -> None:
        super().setup_optimizer()
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.AdamW) and device().type == "cpu":
                one_pass_adamw(optimizer)

    def train_epoch(self, epoch: int, **kwargs: Any) -> None:
        self.epoch, self.began = epoch, time.monotonic() - self.schedule.seconds
        super().train_epoch(epoch, step_callback=self._step_done)
        self.seconds += self._elapsed()

    def _elapsed(self) -> float:
        """Seconds of this epoch in the training loop, those spent saving not counted."""
        return time.monotonic() - self.began - self.schedule.seconds

    def _step_done(self) -> None:
        """The weights, the optimizer and the curves have taken the row in."""
        self.step += 1
        due = self.schedule.due()
        if first_says(due) if self.config.fsdp_shard else due:
            self._save(self.epoch, self.step, self.seconds + self._elapsed())

    def _save(self, epoch: int, step: int, seconds: float) -> None:
        if rank() != 0 and not self.config.fsdp_shard:
            return
        start = time.monotonic()
        save_state(self.folder, self, self.curves, epoch, step, seconds)
        self.schedule.saved(time.monotonic() - start)

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        pass

    def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        """Called last in every epoch, after validation."""
        self.on_epoch(epoch)
        self.step = 0
        self._save(epoch + 1, 0, self.seconds)


@contextmanager
def _on_this_device() -> Iterator[None]:
    """speculators 0.9.0 needs an accelerator; without one, three places that ask for it are answered with the CPU.

    trainer.py:348 and :533 move to `get_local_rank()`, trainer.py:80 synchronises an accelerator at every logged step.
    Its progress bar (tqdm.rich) goes on every device: ours shows loss, accuracy and the time left.
    """
    module = speculators.train.trainer
    with ExitStack() as stack:
        stack.enter_context(_replaced(module, "tqdm", lambda rows, **_: rows))
        if device().type == "cpu":
            stack.enter_context(_replaced(module, "get_local_rank", device))
            stack.enter_context(_replaced(torch.accelerator, "synchronize", lambda *_, **__: None))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
