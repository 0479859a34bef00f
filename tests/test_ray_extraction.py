"""Several engines over one list of shards, by a real local Ray: bytes, deaths, poisoned shards, no orphans."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eagle3.formats.safetensors_headers import read_header
from eagle3.machine import DEFAULT, executor_problems
from eagle3.sampling.samples import Sample, read_samples
from eagle3.states.ray_extraction import ATTEMPTS, Job, _Member, _Run
from eagle3.states.shard_plan import plan_shards
from eagle3.verifiers.verifier import Verifier
from tests.test_extract_stage import (
    bytes_of,
    make_repository,
    run_stage,
    set_params,
    shards_of,
    start_stage,
    write_inputs,
)

MACHINE = "executor: ray\nreplicas: 2\ncpu_threads: 1\nkv_cache_gib: 1\n"
SECONDS = 400  # cores are shared with other tests


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By one engine on one core."""
    folder = make_repository(tmp_path_factory.mktemp("finished"))
    set_params(folder, extract={"samples_per_shard": 2})
    run_stage(folder)
    return folder


def without_shards(finished: Path, folder: Path) -> Path:
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns(".dvc", "hidden_states"))
    (folder / "machine.yaml").write_text(MACHINE)
    return folder


def processes_of(stage: subprocess.Popen[str], name: str = "") -> list[psutil.Process]:
    try:
        found = psutil.Process(stage.pid).children(recursive=True)
        return [one for one in found if any(word.startswith(name) for word in one.cmdline()[:1])]
    except psutil.NoSuchProcess:
        return []


def wait_for(stage: subprocess.Popen[str], found: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not found():
        assert stage.poll() is None, stage.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def poisoned(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """(folder, sample, what was said) of a run with a replica that is killed and a sample with an impossible token."""
    folder = without_shards(finished, tmp_path_factory.mktemp("ray") / "poisoned")
    samples = read_samples(folder / "data" / "samples")
    bad = samples[len(samples) // 2]
    write_inputs(
        folder, [replace(one, input_ids=[*one.input_ids[:-1], 4000]) if one is bad else one for one in samples]
    )
    stage = start_stage(folder)
    wait_for(stage, lambda: shards_of(folder) and processes_of(stage, "ray::Replica.extract"))
    for one in processes_of(stage, "ray::Replica.extract")[:1]:
        one.kill()
    out, err = stage.communicate(timeout=SECONDS)
    assert stage.returncode == 1, err[-4000:]
    return folder, bad.sample_id, re.sub(r"\s+", " ", out + err)


@pytest.mark.engine
@pytest.mark.long
def test_a_poisoned_shard_is_named_by_its_samples_and_all_others_have_the_bytes_of_one_engine(finished, poisoned):
    folder, bad, said = poisoned
    assert "ERROR poisoned-shard: extract: shard-" in said
    assert "3 attempts failed, the last: engine: vLLM" in said
    assert bad in said
    home = Path(".dvc/tmp/eagle3/extract")
    expected = {path.name: path.read_bytes() for path in (finished / home).glob("shard-*")}
    made = {path.name: path.read_bytes() for path in (folder / home).glob("shard-*")}
    assert len(made) == len(expected) - 1
    assert made.items() <= expected.items()
    assert not list((folder / home).glob(".shard-*"))
    assert not (folder / "data/hidden_states").exists()


@pytest.mark.engine
@pytest.mark.long
def test_the_shard_of_a_dead_replica_went_to_another(poisoned):
    assert "attempt 1 of 3 failed, it goes to another replica: The actor died" in poisoned[2]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_or_killed_leaves_no_process(poisoned, number):
    """It tries the poisoned shard again. Ray's own two agents would live for a minute where nobody ended them."""
    stage = start_stage(poisoned[0])
    wait_for(stage, lambda: processes_of(stage, "ray::Replica"))
    every = processes_of(stage)
    stage.send_signal(number)
    assert stage.wait(timeout=30) != 0
    _, alive = psutil.wait_procs(every, timeout=20)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    stage.communicate()


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_ended_or_killed_in_the_middle_goes_on_to_the_bytes_of_one_engine(finished, tmp_path, number):
    """By Ray again; the second run makes what is missing and nothing else, and its bar ends at exactly that."""
    folder = without_shards(finished, tmp_path / "stopped")
    stage = start_stage(folder)
    wait_for(stage, lambda: len(shards_of(folder)) > 1)
    stage.send_signal(number)
    assert stage.wait(timeout=30) != 0
    stage.communicate()
    survived, every = shards_of(folder), shards_of(finished)
    assert 1 < len(survived) < len(every)
    assert not (folder / "data/hidden_states").exists()

    again = start_stage(folder)
    said, bar = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, bar[-4000:]
    assert f"({len(every) - len(survived)} made now" in said
    assert shards_of(folder).items() >= survived.items()
    assert bytes_of(folder) == bytes_of(finished)
    missing = sum(len(one.input_ids) for one in made_of(folder, every.keys() - survived.keys()))
    assert f"{missing} tokens now at" in said
    assert f"{missing}/{missing} [" in bar


def made_of(folder: Path, names: set[str]) -> list[Sample]:
    """The samples in these shards."""
    listed = (read_header(folder / "data/hidden_states" / name).metadata["sample_ids"] for name in names)
    ids = {sample_id for each in listed for sample_id in json.loads(each)}
    return [one for one in read_samples(folder / "data/samples") if one.sample_id in ids]


def test_the_shard_of_a_replica_that_ray_ends_for_its_memory_goes_to_another(monkeypatch, tmp_path):
    import ray

    def ended(_: object) -> None:
        raise ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.")

    hired: list[object] = []
    monkeypatch.setattr(_Run, "_hire", lambda run: hired.append(run))
    sample = Sample("a", "a", 0, "train", [1, 5, 6], [False, True, True], "stop")
    (shard,) = plan_shards([sample], {}, 1, 4, 64)
    job = Job(Verifier("verifier", None, tmp_path, "0" * 64, {}), DEFAULT, 8, False, [0, 1], (), tmp_path)
    run = _Run(SimpleNamespace(get=ended, kill=list, exceptions=ray.exceptions), job, [], None)
    run.failures = {shard.key: []}
    for attempt in range(1, ATTEMPTS + 1):
        run.waiting.clear()
        run._go_on(_Member([], shard), "the reference")
        assert len(run.failures[shard.key]) == attempt
        assert "running low on memory" in run.failures[shard.key][-1]
        assert (list(run.waiting), run.poisoned) == (([shard], []) if attempt < ATTEMPTS else ([], [shard]))
    assert hired == [run] * (ATTEMPTS - 1)


def test_an_executor_that_cannot_work_is_said_before_anything_starts():
    def found(**machine) -> list[str]:
        return [problem.found for problem in executor_problems(replace(DEFAULT, **machine))]

    assert found(executor="ray") == []
    assert found(replicas=2) == ["replicas or ray_address without an executor"]
    assert found(executor="ray", ray_address="127.0.0.1:1") == ["127.0.0.1:1: Connection refused"]


def test_replicas_get_cores_of_their_own():
    from eagle3.machine import cores_by_rank

    cores = sorted(os.sched_getaffinity(0))
    assert [cores_by_rank(1, 1, first) for first in range(len(cores))] == [str(core) for core in cores]
