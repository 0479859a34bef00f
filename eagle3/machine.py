"""machine.yaml: facts of this machine, never of a result, so DVC does not track the file.

It is looked up at `$DVC_ROOT` first, since a temporary experiment runs in a folder that has no copy of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from eagle3.param_rules import flag, integer, number, rule, rule_problems, section_schema, text
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.yaml12 import read_yaml

HOST_AND_PORT = r"^(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}$"
SECONDS_TO_CONNECT = 3.0
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    """null everywhere = what is visible: every GPU, else the CPU with all its cores; any free port for the server."""

    tensor_parallel_size: int | None = integer(1, nullable=True)
    cpu_threads: int | None = integer(1, nullable=True)
    kv_cache_gib: int | None = integer(1, nullable=True)
    port: int | None = integer(1, 65535, nullable=True)
    # processes of training on each node, each on a GPU of its own, null = one; a step takes a row from each: part of
    # the result
    train_processes: int | None = integer(1, nullable=True)
    # nodes of training, all with this repository on a shared disk, null = one; the address of the first, HOST:PORT
    train_nodes: int | None = integer(1, nullable=True)
    train_rendezvous: str | None = text(r"^[\w.-]+:\d{1,5}$", nullable=True)
    # true = weights, gradients and optimizer are dealt out to the processes (FSDP), for drafts that do not fit: part of
    # the result; null = each process holds all of them (DDP)
    train_shards: bool | None = flag(nullable=True)
    # minutes between two states of a training run, 0 = after every step; null = at most 2% of the time goes into them
    save_state_minutes: float | None = number(0.0, 1e6, nullable=True)
    # ray = extract runs `replicas` engines (null = one a node) over its shards, each with the sizes above, in processes
    # of this machine or in the cluster at `ray_address`; null = one engine in the stage's process
    executor: str | None = rule(type="string", allowed=["ray"], nullable=True)
    replicas: int | None = integer(1, nullable=True)
    ray_address: str | None = text(HOST_AND_PORT, nullable=True)


def executor_problems(machine: Machine) -> Iterator[Problem]:
    """Why the executor that is asked for cannot work: no Ray here, nobody at the address."""
    if machine.executor is None:
        if machine.replicas or machine.ray_address:
            found = "replicas or ray_address without an executor"
            yield Problem("executor", "machine.yaml", found, "executor: ray beside them", "add executor: ray")
        return
    if find_spec("ray") is None:
        fix = "make .venv/.installed, or remove executor from machine.yaml"
        yield Problem("executor", "machine.yaml: executor", "ray is not installed", "the lock's ray", fix)
    elif machine.ray_address:
        host, _, port = machine.ray_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
        except OSError as error:
            fix = f"ray start --head --port={port} there; ray start --address={machine.ray_address} on each other node"
            found = f"{machine.ray_address}: {error.strerror or error}"
            yield Problem("executor", "machine.yaml: ray_address", found, "a Ray cluster", fix)


def cores_by_rank(num_ranks: int, num_threads: int | None = None, first: int = 0) -> str:
    """`0,1|2,3`: this process's cores dealt out to vLLM's CPU workers, as VLLM_CPU_OMP_THREADS_BIND takes them.

    num_threads: cores of all ranks together, None = all; first: how many cores before them are left to others. vLLM
    0.32.0 itself keeps one core back for each rank, so that two ranks find none on two cores.
    """
    every = sorted(os.sched_getaffinity(0))
    cores = (every[first:] or every)[:num_threads]
    share = max(1, len(cores) // num_ranks)
    dealt = (cores[rank * share : (rank + 1) * share] or cores[-1:] for rank in range(num_ranks))
    return "|".join(",".join(map(str, one)) for one in dealt)


def available_memory() -> int:
    """Bytes, by Linux' own estimate: free pages, and cached ones that can be dropped."""
    lines = MEMINFO.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


DEFAULT = Machine(**{item.name: None for item in fields(Machine)})


def read_machine(root: Path | None = None) -> Machine:
    """The machine's settings; says which file was used and what was taken from it."""
    path = (root or Path(os.environ.get("DVC_ROOT", "."))) / "machine.yaml"
    if not path.exists():
        print(f"machine: no {path.name}, taking everything visible", flush=True)
        return DEFAULT
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise invalid("machine", str(path), f"a {type(raw).__name__}", "a mapping", f"edit or remove {path}")
    schema = {name: {**rule, "required": False} for name, rule in section_schema(Machine).items()}
    if problems := rule_problems(raw, schema, str(path)):
        raise InvalidInput(*problems)
    machine = Machine(**{item.name: raw.get(item.name) for item in fields(Machine)})
    print(f"machine: {path} -> {', '.join(f'{key}={value}' for key, value in raw.items()) or 'empty'}", flush=True)
    return machine
