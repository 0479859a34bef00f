"""The real vLLM OpenAI server as a child process: its start, its health, its log and its certain end.

Nothing of vLLM is imported: the server is a process of its own, as it is for its users. It starts others in turn: the
engine core and a worker for each rank.
"""

from __future__ import annotations

import http.client
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.problems import InvalidInput, invalid
from eagle3.serve.vllm_command import HOST, ServerSettings, server_command, server_environment

PORT_ATTEMPTS = 3
POLL_SECONDS = 0.2
PROGRESS_SECONDS = 10.0
# Loading a trillion parameters takes many minutes, but its progress is logged; silence for so long is a hang.
SILENCE_SECONDS = 1800.0
STOP_SECONDS = 10.0
LOG_TAIL_LINES = 25
# Waits for the end of the stage, by whatever cause, then ends the server's process group. A parent-death signal is not
# enough: vLLM 0.32.0 ignores SIGTERM while its engine starts, and only the front end would get it.
GUARDIAN = 'read group; read _; kill -s KILL -- "-$group"'
# (EngineCore pid=9) ERROR 11-29 18:29:33 [core.py:133]
LOG_PREFIX = r"(?:\([^)\n]*\) )?(?:[A-Z]+ [\d: -]+\[[^\]\n]*\] )?[ \t]*"


@dataclass(frozen=True)
class Server:
    """A running server; `name` is the model name that requests give, new for each start.

    launched: when, by the monotonic clock. start_seconds: from there until it answered.
    """

    name: str
    port: int
    process: subprocess.Popen[bytes]
    guardian: subprocess.Popen[bytes]
    log: Path
    launched: float
    start_seconds: float = 0.0

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        """HTTP status and body of a GET; no proxy is asked. Raises OSError or HTTPException when nobody answers."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def failure(self, doing: str, error: Exception) -> InvalidInput:
        """What to raise after a failed request: the server died, or it lives and refused."""
        deadline = time.monotonic() + STOP_SECONDS
        while not _ending(self.process.pid) and time.monotonic() < deadline and not _refused(error):
            time.sleep(POLL_SECONDS)
        if _ending(self.process.pid):
            return _died(self, doing)
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        return invalid("server-error", doing, found, "an answer", f"read the server's log: {self.log}")


@contextmanager
def vllm_server(settings: ServerSettings, log: Path) -> Iterator[Server]:
    """One server, as `vllm_servers` starts it."""
    with vllm_servers([(settings, log)]) as [server]:
        yield server


@contextmanager
def vllm_servers(wanted: Sequence[tuple[ServerSettings, Path]]) -> Iterator[list[Server]]:
    """Start servers, each with its log, at the same time; wait until all answer; stop all their processes in any case.

    Refused as `InvalidInput`: a port in use (`port-in-use`), a server that dies (`server-died`, with the last lines of
    its log) or says nothing for half an hour (`server-silent`).
    """
    ready: list[Server] = []
    starting: list[Server] = []
    try:
        for settings, log in wanted:
            starting.append(_launch(settings, log))
        for settings, log in wanted:
            ready.append(_answering(settings, log, starting))
        yield ready
    finally:
        for server in starting:
            # vLLM 0.32.0 does not hear SIGTERM while its engine starts
            stop(server, grace_seconds=0.0)
        for server in ready:
            stop(server)


def _answering(settings: ServerSettings, log: Path, starting: list[Server]) -> Server:
    """The first of `starting`, taken from there when it answers.

    A port chosen here can be taken before vLLM binds it; then another is tried.
    """
    given = settings.machine.port
    for attempt in range(1, PORT_ATTEMPTS + 1):
        try:
            server = _when_ready(starting[0])
        except InvalidInput:
            if "address already in use" not in _log_text(log).lower():
                raise
            port = starting[0].port
            if given or attempt == PORT_ATTEMPTS:
                raise _port_in_use(port) from None
            print(f"server: port {port} was taken meanwhile, trying another", file=sys.stderr, flush=True)
            stop(starting.pop(0), grace_seconds=0.0)
            starting.insert(0, _launch(settings, log))
        else:
            starting.pop(0)
            return server
    raise AssertionError("unreachable")


def _launch(settings: ServerSettings, log: Path) -> Server:
    given = settings.machine.port
    if given and not _is_free(given):
        raise _port_in_use(given)
    port = given or _free_port()
    name = f"verifier-{secrets.token_hex(4)}"
    log.parent.mkdir(parents=True, exist_ok=True)
    guardian = subprocess.Popen(["/bin/sh", "-c", GUARDIAN], stdin=subprocess.PIPE, process_group=0)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            server_command(settings, name, port),
            env=server_environment(settings.machine),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # a group of its own, so that all of its processes can be ended by that id and by nothing else
            process_group=0,
        )
    assert guardian.stdin is not None
    guardian.stdin.write(f"{process.pid}\n".encode())
    guardian.stdin.flush()
    return Server(name, port, process, guardian, log, time.monotonic())


def _when_ready(server: Server) -> Server:
    """Wait until the server lists our model name: another service on that port would not know it."""
    last_progress = last_growth = time.monotonic()
    last_size = -1
    while True:
        if _ending(server.process.pid):
            raise _died(server, "while it started")
        if _lists_our_model(server):
            seconds = time.monotonic() - server.launched
            print(f"server: ready after {seconds:.0f} s", file=sys.stderr, flush=True)
            return replace(server, start_seconds=seconds)
        now = time.monotonic()
        size = server.log.stat().st_size
        if size != last_size:
            last_size, last_growth = size, now
        if now - last_growth > SILENCE_SECONDS:
            raise _silent(server)
        if now - last_progress > PROGRESS_SECONDS:
            last_progress = now
            print(f"server: starting, {now - server.launched:.0f} s (log: {server.log})", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def _lists_our_model(server: Server) -> bool:
    try:
        status, body = server.get("/v1/models", timeout=2.0)
    except (OSError, http.client.HTTPException):
        return False
    return status == 200 and server.name in body


def stop(server: Server, grace_seconds: float = STOP_SECONDS) -> None:
    """SIGTERM to the front end, which stops its engine; SIGKILL to what is left of the group; returns in seconds."""
    group = server.process.pid
    os.kill(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while not _ending(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    server.guardian.kill()
    server.guardian.communicate()
    server.process.wait()


def _ending(pid: int) -> str:
    """How a child ended, or "". It stays a zombie, so that its id, which is its group's, cannot be given to another."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return ""
    return f"exit status {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"killed by signal {ended.si_status}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # as vLLM binds it: a port in TIME_WAIT counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _port_in_use(port: int) -> InvalidInput:
    return invalid(
        "port-in-use",
        "machine.yaml: port",
        f"port {port} on {HOST} is taken by another process",
        "a free port",
        "set another port in machine.yaml, or remove the line: a free one is then chosen",
    )


def _died(server: Server, when: str) -> InvalidInput:
    text = _log_text(server.log)
    tail = "\n".join(f"  | {line}" for line in text.splitlines()[-LOG_TAIL_LINES:])
    print(f"last lines of {server.log}:\n{tail}", file=sys.stderr, flush=True)
    return invalid(
        "server-died",
        when,
        f"{_ending(server.process.pid)}; {first_error(text)}",
        "a server that runs until it is stopped",
        f"mend what its log names ({server.log}), then run again; "
        "a server killed by signal 9 usually lacked memory: lower kv_cache_gib in machine.yaml",
    )


def _silent(server: Server) -> InvalidInput:
    found = f"no new line in its log for {SILENCE_SECONDS / 60:.0f} minutes, and no answer"
    return invalid("server-silent", "while it started", found, "a server that answers", f"read {server.log}")


def first_error(log: str) -> str:
    """The first exception's own line: vLLM's last lines only say that the engine failed, its cause stands above.

    >>> first_error("(EngineCore pid=7) ERROR 11-29 18:29 [core.py:1] ValueError: no room\\nRuntimeError: see above")
    'ValueError: no room'
    """
    found = re.search(rf"^{LOG_PREFIX}((?:[\w.]*(?:Error|Exception)\b|\S+: error:).*)$", log, re.MULTILINE)
    return found[1].strip() if found else "no exception in its log"


def _log_text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _refused(error: Exception) -> bool:
    """An HTTP status below 500 is an answer of a server that lives."""
    return int(getattr(error, "status_code", 500)) < 500
