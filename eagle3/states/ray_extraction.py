"""Extraction by several engines at once: Ray keeps one in each replica, on one machine or on many, over all shards.

The shard stays the unit of work, and a replica makes it by the same function as the stage alone does, so that its bytes
are those of one engine with as many cores. Tried with Ray 2.60.0.

A shard whose replica dies or fails goes to another one; after ATTEMPTS it is left out, the others are finished and
kept, and the stage fails with its sample ids. In either case the replica is replaced: its engine may hold requests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3.file_faults import file_fault
from eagle3.machine import Machine, cores_by_rank, executor_problems
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.stage_guard import descendants
from eagle3.states.extraction import Extracted, extract_shards, start_extraction
from eagle3.states.shard_file import tokens_arrived
from eagle3.states.shard_plan import Shard
from eagle3.states.shard_scratch import remove_leftovers
from eagle3.verifiers.verifier import Verifier

ATTEMPTS = 3
SECONDS_TO_PLACE = 120.0
SECONDS_TO_SHOW = 0.5
OBJECT_STORE_BYTES = 256 << 20  # what travels are the token ids of shards
TOKEN = Path.home() / ".ray" / "auth_token"
# A full disk or a missing permission is nobody's fault but the disk's: more attempts would only fail as well.
OF_THE_DISK = ("no-space", "low-water", "not-permitted", "disk-error")


@dataclass(frozen=True)
class Job:
    """What an engine needs, alone or as one of many. window: tokens, over the longest sample; folder: on every node."""

    verifier: Verifier
    machine: Machine
    window: int
    trust_remote_code: bool
    layer_ids: Sequence[int]
    greedy_splits: Collection[str]
    folder: Path


class Replica:
    """The actor: an engine in a process of its own, and what is said of it instead of raised (errors do not travel)."""

    def node(self) -> str:
        """Where Ray has put it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, job: Job, first_core: int) -> tuple[Problem, ...]:
        """first_core: the first of the node's cores that are this replica's; of no matter where there are GPUs."""
        ranks = job.machine.tensor_parallel_size or 1
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_by_rank(ranks, job.machine.cpu_threads, first_core)
        try:
            common = job.verifier, job.machine, job.window, job.trust_remote_code, job.layer_ids
            self.job, self.engine = job, start_extraction(*common)
        except InvalidInput as error:
            return error.problems
        return ()

    def extract(self, shard: Shard) -> Extracted | tuple[Problem, ...]:
        job = self.job
        try:
            return extract_shards(self.engine, [shard], job.folder, job.layer_ids, job.greedy_splits)
        except InvalidInput as error:
            return error.problems
        except Exception as error:
            if fault := file_fault(error, job.folder):
                return (fault,)
            raise


@dataclass
class _Member:
    """A replica as the driver sees it: its actor, what it is doing, and its node and place there once it has them."""

    actor: Any
    doing: Shard | str = "node"
    node: str | None = None
    place: int = 0


def extract_with_ray(job: Job, shards: Sequence[Shard]) -> Extracted:
    """Make each of `shards` in `job.folder`; `InvalidInput` for those that failed, when all others are made."""
    begin = time.monotonic()
    num_tokens = sum(shard.num_tokens for shard in shards)
    with _cluster(job.machine) as ray, tqdm(total=num_tokens, desc="extract", unit="tok", unit_scale=True) as bar:
        run = _Run(ray, _fitted(ray, job), shards, bar)
        run.finish()
    if run.poisoned:
        raise InvalidInput(*(_poisoned_shard(shard, run.failures[shard.key]) for shard in run.poisoned))
    return Extracted(num_tokens, time.monotonic() - begin, run.asked, run.found)


class _Run:
    """The state of the driver: shards waiting, replicas at work and idle, attempts that failed."""

    def __init__(self, ray: Any, job: Job, shards: Sequence[Shard], bar: Any) -> None:
        self.ray, self.job, self.bar = ray, job, bar
        self.waiting = deque(shards)
        self.busy: dict[Any, _Member] = {}
        self.idle: list[_Member] = []
        self.failures: dict[str, list[str]] = {shard.key: [] for shard in shards}
        self.failed_starts = 0
        self.poisoned: list[Shard] = []
        self.asked = self.found = self.made = 0

    def finish(self) -> None:
        for _ in range(min(self.job.machine.replicas or 1, len(self.waiting))):
            self._hire()
        last = time.monotonic()
        while self.waiting or any(isinstance(member.doing, Shard) for member in self.busy.values()):
            done, _ = self.ray.wait(list(self.busy), timeout=SECONDS_TO_SHOW)
            silent = 0.0 if done else time.monotonic() - last
            if silent > SECONDS_TO_PLACE and all(member.node is None for member in self.busy.values()):
                raise _no_place(self.ray, self.job, f"no place found within {SECONDS_TO_PLACE:.0f} s")
            for reference in done:
                self._go_on(self.busy.pop(reference), reference)
                last = time.monotonic()
            self._show()

    def _show(self) -> None:
        """Shards in work count by what stands in their files, so that the bar moves by sample, wherever it is run."""
        doing = [member.doing for member in self.busy.values() if isinstance(member.doing, Shard)]
        arrived = sum(tokens_arrived(self.job.folder, shard) for shard in doing)
        self.bar.update(self.made + arrived - self.bar.n)

    def _hire(self) -> None:
        actor = self.ray.remote(Replica).options(**_resources(self.job.machine), scheduling_strategy="SPREAD").remote()
        self.busy[actor.node.remote()] = _Member(actor)

    def _go_on(self, member: _Member, reference: Any) -> None:
        try:
            said = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            return self._replace(member, f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())[:600]}")
        except self.ray.exceptions.RayError as error:
            # a dead actor is a RayActorError, but one that Ray's memory monitor ended is not (2.60.0: OutOfMemoryError)
            return self._replace(member, " ".join(str(error).split())[:600])
        if isinstance(said, tuple) and said:
            return self._refused(member, said)
        if member.doing == "node":
            self._start(member, said)
        elif member.doing == "start":
            self.failed_starts = 0
            self._next(member)
        else:
            self.asked, self.found, self.made = (
                self.asked + said.asked,
                self.found + said.found,
                self.made + said.tokens,
            )
            self._next(member)
        return None

    def _start(self, member: _Member, node: str) -> None:
        """On the first free place of its node; Ray puts no more replicas there than the node has cores for."""
        taken = {other.place for other in (*self.busy.values(), *self.idle) if other.node == node}
        member.place = next(place for place in range(len(taken) + 1) if place not in taken)
        member.node, member.doing = node, "start"
        first_core = member.place * (self.job.machine.cpu_threads or 1)
        self.busy[member.actor.start.remote(self.job, first_core)] = member

    def _next(self, member: _Member) -> None:
        if self.waiting:
            member.doing = self.waiting.popleft()
            self.busy[member.actor.extract.remote(member.doing)] = member
        else:
            self.idle.append(member)

    def _refused(self, member: _Member, problems: tuple[Problem, ...]) -> None:
        if member.doing == "start" or any(problem.code in OF_THE_DISK for problem in problems):
            raise InvalidInput(*problems)
        self._replace(member, "; ".join(f"{one.code}: {one.where}: {one.found}" for one in problems)[:600])

    def _replace(self, member: _Member, why: str) -> None:
        """Another replica for one that died or failed, and another attempt for its shard."""
        self.ray.kill(member.actor)
        remove_leftovers(self.job.folder)
        if isinstance(shard := member.doing, Shard):
            attempts = self.failures[shard.key]
            attempts.append(why)
            again = len(attempts) < ATTEMPTS
            (self.waiting if again else self.poisoned).append(shard)
            then = "it goes to another replica" if again else "it is left out"
            tqdm.write(f"extract: {shard.name}: attempt {len(attempts)} of {ATTEMPTS} failed, {then}: {why}")
        else:
            self.failed_starts += 1
            if self.failed_starts >= ATTEMPTS:
                raise invalid(
                    "replica-dies",
                    "machine.yaml: executor",
                    f"{ATTEMPTS} replicas ended while they started; the last: {why}",
                    "replicas that start",
                    "try one engine in this process (remove executor): it says more; or look for its memory",
                )
        while self.idle and self.waiting:
            self._next(self.idle.pop())
        if self.waiting:
            self._hire()


def _poisoned_shard(shard: Shard, why: Sequence[str]) -> Problem:
    return Problem(
        "poisoned-shard",
        f"extract: {shard.name}",
        f"{len(why)} attempts failed, the last: {why[-1]}",
        f"states of its samples {', '.join(sample.sample_id for sample in shard.samples)}",
        "python -m eagle3 show-sample shows a sample; dvc repro extract tries this shard again, the others are kept",
    )


@contextmanager
def _cluster(machine: Machine) -> Iterator[Any]:
    """Ray's module, connected to `ray_address`, or to processes of its own that end with this one."""
    if problems := list(executor_problems(machine)):
        raise InvalidInput(*problems)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if TOKEN.is_file():
        # Ray 2.60.0: `ray start` asks for the token wherever it finds the file, ray.init(address) offers it if told
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    own = {"num_cpus": len(os.sched_getaffinity(0)), "object_store_memory": OBJECT_STORE_BYTES}
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=machine.ray_address or "local",
            **{} if machine.ray_address else {**own, "include_dashboard": False},
            configure_logging=False,
            log_to_driver=False,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise invalid(
            "ray",
            "machine.yaml: executor",
            f"{type(error).__name__}: {' '.join(str(error).split())[:600]}",
            f"a cluster of Ray {ray.__version__}",
            "ray start on every node with this environment and the same ~/.ray/auth_token; ray status",
        ) from error
    # ray.init puts a handler of its own in the place of the stage's, and exits with 15
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        with nullcontext() if machine.ray_address else _killed_with_us():
            yield ray
    finally:
        ray.shutdown()


@contextmanager
def _killed_with_us() -> Iterator[None]:
    """Ray's own processes end when this one is killed, but its two agents only a minute later (2.60.0, measured).

    A shell that waits for the end of its input, which is the end of this process, kills them.
    """
    pids = " ".join(map(str, descendants(os.getpid())))
    words = ["sh", "-c", f"read until; kill -KILL {pids} 2>/dev/null"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _fitted(ray: Any, job: Job) -> Job:
    """The job with absolute paths and every number of machine.yaml: a replica a node, sharing what is there."""
    machine, there = job.machine, ray.cluster_resources()
    num = machine.replicas or sum(node["Alive"] for node in ray.nodes())
    gpus = int(there.get("GPU", 0))
    ranks = machine.tensor_parallel_size or max(1, gpus // num)
    threads = machine.cpu_threads or max(1, int(there.get("CPU", 1)) // num)
    machine = replace(machine, replicas=num, tensor_parallel_size=ranks, cpu_threads=None if gpus else threads)
    fitted = replace(
        job,
        machine=machine,
        verifier=replace(job.verifier, path=job.verifier.path.absolute()),
        folder=job.folder.absolute(),
    )
    for name, each in (("GPU", ranks if gpus else 0), ("CPU", 0 if gpus else threads)):
        if num * each > there.get(name, 0):
            raise _no_place(ray, fitted, f"{there.get(name, 0):.0f} {name}s in the cluster")
    return fitted


def _resources(machine: Machine) -> dict[str, Any]:
    """cpu_threads is None where GPUs are what replicas share."""
    if machine.cpu_threads is None:
        return {"num_gpus": machine.tensor_parallel_size, "num_cpus": 0}
    return {"num_cpus": machine.cpu_threads}


def _no_place(ray: Any, job: Job, found: str) -> InvalidInput:
    each = ", ".join(f"{name.removeprefix('num_')} {number}" for name, number in _resources(job.machine).items())
    return invalid(
        "no-place",
        "machine.yaml: replicas",
        found,
        f"room for {job.machine.replicas} replicas, each on one node with {each}",
        "fewer replicas, or a smaller tensor_parallel_size or cpu_threads, in machine.yaml; see: ray status",
    )
