"""Several processes of training on this machine, started by torchrun and ended with the stage that started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from eagle3.machine import Machine
from eagle3.problems import invalid
from eagle3.stage_guard import die_with_parent

GRACE_SECONDS = 20


def processes_of(machine: Machine, visible_gpus: int) -> int:
    """As many as the machine says, else one: a step is over all of them, so their number is part of the result."""
    if machine.train_processes is None:
        if visible_gpus > 1:
            print(
                f"train: on one of {visible_gpus} visible GPUs; train_processes in machine.yaml takes more", flush=True
            )
        return 1
    if 0 < visible_gpus < machine.train_processes:
        raise invalid(
            "machine",
            "machine.yaml: train_processes",
            f"{machine.train_processes}, and {visible_gpus} GPUs are visible",
            "at most one process a GPU",
            "lower it, or make more GPUs visible (CUDA_VISIBLE_DEVICES)",
        )
    return machine.train_processes


def run_with_torchrun(module: str, folder: Path, processes: int, threads: int | None) -> None:
    """Run `python -m module FOLDER` in so many processes; SystemExit with their status unless all end well.

    The first process to fail ends the others, and a signal to this one ends them all.
    """
    per_process = max(1, (threads or len(os.sched_getaffinity(0))) // processes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    torchrun = subprocess.Popen(
        [*command, "-m", module, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": str(per_process)},
        preexec_fn=die_with_parent,
    )
    try:
        status = torchrun.wait()
    finally:
        _end(torchrun)
    if status:
        print(f"train: one of {processes} processes failed with status {status}", file=sys.stderr, flush=True)
        raise SystemExit(status if status > 0 else 1)


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """torchrun hands SIGTERM on to its processes."""
    torchrun.terminate()
    try:
        torchrun.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()
