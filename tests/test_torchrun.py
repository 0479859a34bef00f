"""Several processes of one training, on the CPU with gloo: the same numbers as one, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3.drafts.torchrun import processes_of, run_with_torchrun
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


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """One process at twice the row length, and two."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_verifier(folder / "verifier")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for processes, total_seq_len in ((1, 128), (2, 64)):
            place = folder / str(processes)
            place.mkdir()
            (place / "total_seq_len").write_text(str(total_seq_len))
            run_with_torchrun("tests.training_worker", place, processes, 2)
            found.append(torch.load(place / "result.pt", weights_only=True))
    return found


def test_two_processes_train_what_one_does_with_rows_twice_as_long(results):
    one, two = results
    assert (one["settings"]["processes"], two["settings"]["processes"]) == (1, 2)
    assert one["settings"]["optimizer_steps"] == two["settings"]["optimizer_steps"] == 12
    for alone, shared in zip(one["losses"], two["losses"], strict=True):
        assert shared == pytest.approx(alone, rel=1e-5)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_a_process_that_fails_ends_the_run_with_its_status(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        run_with_torchrun("tests.training_worker", tmp_path, 2, 2)  # there is no file total_seq_len
    assert caught.value.code == 1
    assert "one of 2 processes failed" in capfd.readouterr().err


def test_sigterm_ends_every_process(tmp_path):
    """The caller's own handler decides its status; nothing of the run outlives it."""
    code = (
        "import signal, sys; from pathlib import Path; from eagle3.drafts.torchrun import run_with_torchrun\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"run_with_torchrun('tests.sleeping_worker', Path({str(tmp_path)!r}), 2, 2)"
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
