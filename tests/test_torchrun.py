"""Several processes of one training, on the CPU with gloo: the same numbers as one, and no orphan."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from eagle3.drafts.torchrun import Launch, join, launch_of, processes_of, run_with_torchrun
from eagle3.machine import DEFAULT, Machine
from eagle3.problems import InvalidInput
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier

pytestmark = pytest.mark.engine


def machine(processes: int | None) -> Machine:
    return Machine(**{**vars(DEFAULT), "train_processes": processes})


def test_one_process_unless_the_machine_says_otherwise(capsys):
    assert [processes_of(machine(None), gpus) for gpus in (0, 1, 8)] == [1, 1, 1]
    assert capsys.readouterr().out == "train: on one of 8 visible GPUs; train_processes in machine.yaml takes more\n"
    assert processes_of(machine(2), 0) == 2
    assert processes_of(machine(4), 8) == 4
    with pytest.raises(InvalidInput, match="8, and 4 GPUs are visible"):
        processes_of(machine(8), 4)


def test_lines_of_the_machine_that_do_not_fit_together_are_refused():
    def launch(**lines: object) -> Launch:
        return launch_of(Machine(**{**vars(DEFAULT), **lines}), 0)

    assert launch() == Launch(1)
    assert launch().alone
    two = launch(train_processes=8, train_nodes=2, train_rendezvous="node1:29400", train_shards=True)
    assert two == Launch(8, 2, "node1:29400", True)
    assert not launch(train_nodes=2, train_rendezvous="node1:29400").alone
    with pytest.raises(InvalidInput, match=r"(?s)train_rendezvous.*node1:29400"):
        launch(train_nodes=2)
    with pytest.raises(InvalidInput, match=r"(?s)train_shards.*train_processes"):
        launch(train_shards=True)


def test_a_node_joins_only_a_run_that_waits_for_it(tmp_path):
    two = Machine(**{**vars(DEFAULT), "train_nodes": 2, "train_rendezvous": "node1:29400"})
    with pytest.raises(InvalidInput, match="no such folder"):
        join(tmp_path / "none", two)
    with pytest.raises(InvalidInput, match="a run of one node"):
        join(tmp_path, DEFAULT)
    usage = subprocess.run([sys.executable, "-m", "eagle3.drafts.torchrun"], cwd=ROOT, capture_output=True, text=True)
    assert (usage.returncode, usage.stderr.split()[0]) == (2, "usage:")


def trained(
    folder: Path,
    name: str,
    total_seq_len: int,
    *launches: Launch,
    stop_after: int | None = None,
    optimizer: str = "adamw",
) -> dict:
    """What a run leaves; each launch is an agent of its own, as on a node of its own."""
    place = folder / name
    place.mkdir(exist_ok=True)
    job = {"total_seq_len": total_seq_len, "shards": launches[0].shards, "stop_after": stop_after}
    job["optimizer"] = optimizer
    (place / "job.json").write_text(json.dumps(job))
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(launches)) as agents:
        patch.chdir(ROOT)
        waiting = [agents.submit(run_with_torchrun, "tests.training_worker", place, each, 2) for each in launches]
        for agent in waiting:
            agent.result()
    return torch.load(place / "result.pt", weights_only=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tiny_verifier(folder / "verifier")
    return folder


@pytest.fixture(scope="module")
def one(runs) -> dict:
    """One process at twice the row length of the others."""
    return trained(runs, "one", 128, Launch(1))


@pytest.fixture(scope="module")
def dealt_out(runs) -> dict:
    return trained(runs, "dealt_out", 64, Launch(2, shards=True))


def assert_trained_alike(two: dict, one: dict) -> None:
    assert (one["settings"]["processes"], two["settings"]["processes"]) == (1, 2)
    assert one["settings"]["optimizer_steps"] == two["settings"]["optimizer_steps"] == 12
    for alone, shared in zip(one["losses"], two["losses"], strict=True):
        assert shared == pytest.approx(alone, rel=1e-5)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_two_processes_train_what_one_does_with_rows_twice_as_long(runs, one):
    assert_trained_alike(trained(runs, "two", 64, Launch(2)), one)


def test_two_processes_with_half_of_the_weights_each_train_what_one_does(dealt_out, one):
    assert dealt_out["settings"]["shards"] is True
    assert_trained_alike(dealt_out, one)


@pytest.mark.long
def test_muon_rounds_otherwise_where_its_matrices_are_dealt_out(runs):
    """It orthogonalises in bfloat16, which makes rounding of its gradients larger: 5e-5 of the losses, not 1e-5."""
    one, two = (
        trained(runs, f"muon_{launch.processes}", size, launch, optimizer="muon")
        for size, launch in ((128, Launch(1)), (64, Launch(2, shards=True)))
    )
    assert [each["name"] for each in two["settings"]["optimizers"]] == ["Muon", "AdamW"]
    for alone, shared in zip(one["losses"], two["losses"], strict=True):
        assert shared[:2] == pytest.approx(alone[:2], rel=2e-4)


@pytest.mark.long
def test_a_dealt_out_run_that_was_ended_goes_on_to_the_same_bytes_on_two_nodes(runs, dealt_out):
    """Two agents that meet at an address stand for two nodes; with shards each process has a part of the state."""
    with pytest.raises(SystemExit):
        trained(runs, "ended", 64, Launch(2, shards=True), stop_after=8)
    assert not (runs / "ended/result.pt").exists()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    found = trained(runs, "ended", 64, *[Launch(1, 2, address, shards=True)] * 2)
    assert found["losses"] == dealt_out["losses"]
    assert found["settings"] == dealt_out["settings"]
    for name, tensor in dealt_out["weights"].items():
        assert torch.equal(found["weights"][name], tensor), name


def test_a_process_that_fails_ends_the_run_with_its_status(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        run_with_torchrun("tests.training_worker", tmp_path, Launch(2), 2)  # there is no job.json
    assert caught.value.code == 1
    assert "one of 2 processes failed" in capfd.readouterr().err


def test_sigterm_ends_every_process(tmp_path):
    """The caller's own handler decides its status; nothing of the run outlives it."""
    code = (
        "import signal, sys; from pathlib import Path; from eagle3.drafts.torchrun import Launch, run_with_torchrun\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"run_with_torchrun('tests.sleeping_worker', Path({str(tmp_path)!r}), Launch(2), 2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not [pid for pid in workers if alive(pid)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
