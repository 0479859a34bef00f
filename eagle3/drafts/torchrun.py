"""Several processes of training, started by torchrun on one node or on several, and ended with what started them.

The train stage starts those of its own node and waits for the other nodes, where somebody, or a batch system, runs

    python -m eagle3.drafts.torchrun FOLDER

in the same repository on a shared disk: FOLDER, which the stage names, is its scratch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from eagle3.atomic_files import sha256_of_json
from eagle3.machine import Machine, read_machine
from eagle3.problems import InvalidInput, invalid
from eagle3.stage_guard import die_with_parent

GRACE_SECONDS = 20
# The first node waits so long for the others.
PATIENCE_SECONDS = 3600
MODULE = "eagle3.drafts.train_process"


@dataclass(frozen=True)
class Launch:
    """processes: on each node. rendezvous: HOST:PORT of the first of several nodes."""

    processes: int
    nodes: int = 1
    rendezvous: str | None = None
    shards: bool = False

    @property
    def alone(self) -> bool:
        return self.processes * self.nodes == 1


def launch_of(machine: Machine, visible_gpus: int) -> Launch:
    """What machine.yaml asks for; `InvalidInput` where its lines do not fit together."""
    processes, nodes = processes_of(machine, visible_gpus), machine.train_nodes or 1
    launch = Launch(processes, nodes, machine.train_rendezvous, machine.train_shards or False)
    if nodes > 1 and launch.rendezvous is None:
        raise invalid(
            "machine",
            "machine.yaml: train_rendezvous",
            f"none, with train_nodes: {nodes}",
            "HOST:PORT, an address of the first node that the others reach",
            "add it: train_rendezvous: node1:29400",
        )
    if launch.shards and launch.alone:
        raise invalid(
            "machine",
            "machine.yaml: train_shards",
            "true, with one process",
            "several processes to deal the weights out to",
            "raise train_processes, or remove train_shards",
        )
    return launch


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


def run_with_torchrun(module: str, folder: Path, launch: Launch, threads: int | None) -> None:
    """Run `python -m module FOLDER` in this node's processes; SystemExit with their status unless all end well.

    The first process to fail, on whichever node, ends the others, and a signal to this one ends them all.
    """
    per_process = max(1, (threads or len(os.sched_getaffinity(0))) // launch.processes)
    command = [sys.executable, "-m", "torch.distributed.run", *_place(launch, folder)]
    torchrun = subprocess.Popen(
        [*command, "--nproc-per-node", str(launch.processes), "-m", module, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": str(per_process)},
        preexec_fn=die_with_parent,
    )
    try:
        status = torchrun.wait()
    finally:
        _end(torchrun)
    if status:
        print(f"train: one of {launch.processes} processes failed with status {status}", file=sys.stderr, flush=True)
        raise SystemExit(status if status > 0 else 1)


def _place(launch: Launch, folder: Path) -> list[str]:
    """One name for all agents of a run: the folder's, which is a digest of the inputs."""
    if launch.nodes == 1:
        return ["--standalone"]
    wait = f"join_timeout={PATIENCE_SECONDS}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(launch.rendezvous), "--rdzv-conf", wait]
    return ["--nnodes", str(launch.nodes), *meeting, "--rdzv-id", sha256_of_json(str(folder.absolute()))[:16]]


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """torchrun hands SIGTERM on to its processes."""
    torchrun.terminate()
    try:
        torchrun.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()


def main() -> int:
    """A further node's part of the run that the train stage has begun on the first."""
    if len(sys.argv) != 2:
        print("usage: python -m eagle3.drafts.torchrun FOLDER   (the train stage names it)", file=sys.stderr)
        return 2
    try:
        join(Path(sys.argv[1]), read_machine())
    except InvalidInput as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def join(folder: Path, machine: Machine) -> None:
    """`InvalidInput` where the run in `folder` waits for nobody."""
    launch = launch_of(machine, visible_gpus=0)
    if launch.nodes == 1 or not folder.is_dir():
        raise invalid(
            "machine",
            str(folder),
            "no such folder" if launch.nodes > 1 else "a run of one node, by machine.yaml",
            "the folder that the train stage has named, and train_nodes in machine.yaml, on a disk of all nodes",
            "run it in the clone where the stage runs",
        )
    run_with_torchrun(MODULE, folder, launch, machine.cpu_threads)


if __name__ == "__main__":
    sys.exit(main())
