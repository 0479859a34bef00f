"""The server process: what stops it from starting, and that it never stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eagle3.serve.vllm_server as vllm_server_module
from eagle3.machine import DEFAULT, Machine
from eagle3.problems import InvalidInput
from eagle3.serve.vllm_command import ServerSettings
from eagle3.serve.vllm_server import first_error, vllm_server
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier

# Starts a server over argv[1] and stays; SIGTERM unwinds it, as under the stage guard.
STAGE = """\
import signal, sys, time
from pathlib import Path
from eagle3.machine import DEFAULT
from eagle3.serve.vllm_command import ServerSettings
from eagle3.serve.vllm_server import vllm_server

def leave(number, frame):
    raise SystemExit(128 + number)

signal.signal(signal.SIGTERM, leave)
with vllm_server(ServerSettings(Path(sys.argv[1]), 128, DEFAULT), Path(sys.argv[2])):
    time.sleep(600)
"""


def group_members(group: int) -> list[int]:
    """Processes of a group that still run; a zombie that nobody has reaped yet does not."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            members.append(int(path.parent.name))
    return members


def wait_until(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("INFO ok\nValueError: no such layer\nRuntimeError: see above", "ValueError: no such layer"),
        ("(EngineCore pid=7) ERROR 11-29 18:29:33 [core.py:1] OSError: [Errno 98] used", "OSError: [Errno 98] used"),
        ("api_server.py: error: unrecognized arguments: --x", "api_server.py: error: unrecognized arguments: --x"),
        ("all is well", "no exception in its log"),
    ],
)
def test_the_first_exception_in_the_log_is_the_cause(log, found):
    assert first_error(log) == found


def test_a_port_in_use_is_said_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ServerSettings(tmp_path, 128, Machine(**{**vars(DEFAULT), "port": port}))
        with pytest.raises(InvalidInput, match=f"port {port}") as caught, vllm_server(settings, tmp_path / "log"):
            pass
    assert caught.value.problems[0].code == "port-in-use"
    assert caught.value.problems[0].where == "machine.yaml: port"
    assert not (tmp_path / "log").exists()


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.engine
def test_a_given_port_that_is_taken_after_the_look_is_said(tmp_path, monkeypatch, taken_port):
    """vLLM itself meets the taken port; what is replaced is our look before."""
    monkeypatch.setattr(vllm_server_module, "_is_free", lambda port: True)
    settings = ServerSettings(
        tiny_verifier(tmp_path / "verifier"), 128, Machine(**{**vars(DEFAULT), "port": taken_port})
    )
    with pytest.raises(InvalidInput, match=f"port {taken_port}") as caught, vllm_server(settings, tmp_path / "log"):
        pass
    assert caught.value.problems[0].code == "port-in-use"
    assert "address already in use" in (tmp_path / "log").read_text().lower()


@pytest.mark.engine
@pytest.mark.long
def test_a_chosen_port_that_is_taken_before_the_server_binds_it_is_replaced(tmp_path, monkeypatch, taken_port, capsys):
    ports = [vllm_server_module._free_port(), taken_port]
    monkeypatch.setattr(vllm_server_module, "_free_port", ports.pop)
    with vllm_server(ServerSettings(tiny_verifier(tmp_path / "verifier"), 128, DEFAULT), tmp_path / "log") as server:
        assert server.port != taken_port
        assert server.get("/health")[0] == 200
    assert f"port {taken_port} was taken meanwhile, trying another" in capsys.readouterr().err


@pytest.mark.engine
def test_a_server_that_dies_is_reported_with_its_cause_and_the_end_of_its_log(tmp_path, capsys):
    verifier = tiny_verifier(tmp_path / "verifier")
    (verifier / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    settings = ServerSettings(verifier, 128, DEFAULT)
    with pytest.raises(InvalidInput) as caught, vllm_server(settings, tmp_path / "server.log"):
        pass
    problem = caught.value.problems[0]
    assert problem.code == "server-died"
    assert problem.found.startswith("exit status 1; ")
    assert "Error" in problem.found
    assert str(tmp_path / "server.log") in problem.fix
    assert "last lines of" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGKILL, 1), (signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGKILL, 3)],
    ids=["KILL", "TERM", "INT", "KILL_while_the_engine_starts"],
)
def test_a_killed_stage_leaves_no_server(tmp_path, number, processes):
    tiny_verifier(tmp_path / "verifier")
    command = [sys.executable, "-c", STAGE, str(tmp_path / "verifier"), str(tmp_path / "server.log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    stage = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    group = wait_until(lambda: server_of(stage.pid))
    wait_until(lambda: len(group_members(group)) >= processes, seconds=120)
    stage.send_signal(number)
    stage.wait(timeout=30)
    assert stage.returncode != 0
    wait_until(lambda: not group_members(group), seconds=5)


def server_of(stage: int) -> int:
    """The child of `stage` that runs vLLM, or 0."""
    for child in Path(f"/proc/{stage}/task/{stage}/children").read_text().split():
        if b"vllm.entrypoints" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0
