"""What every stage runs inside: declared params only, scratch of its own, outputs published whole or not at all.

DVC hashes a stage's dependencies after the run (treeverse/dvc#11058), leaves its child running when it is killed, and
deletes outputs before a run. So the guard digests the inputs at the start and again at the end, ties the process to its
parent, keeps resumable work in `$DVC_ROOT/.dvc/tmp/eagle3/<stage>/<digest>`, and moves the outputs into place at the
end.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3.atomic_files import bring_beside, remove, sha256_of, sha256_of_json
from eagle3.file_faults import file_fault, naming
from eagle3.manifests import NAME as MANIFEST
from eagle3.params import PARAMS_FILE, params_as_dict, parse_params
from eagle3.problems import InvalidInput, format_problem, invalid
from eagle3.yaml12 import read_yaml

KEPT_DIGESTS = 2
# dvc.lock, rwlock, an entry of the run cache and .dir objects, several times over.
ROOM_FOR_THE_RECORD = 1 << 20
PR_SET_PDEATHSIG = 1


class Declared:
    """The parameters that dvc.yaml declares for this stage; reading another one is a fault of the stage."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the stage reads `{name}`, which its `params:` in dvc.yaml do not declare")


@dataclass
class Stage:
    """One run of a stage.

    params: records of the declared sections (`stage.params.train.epochs`); `values` is the same as plain JSON for
    the manifest. scratch: survives a kill, keyed by the digest of the inputs; `spent`: the part of it that nobody needs
    once the outputs are published. figures: numbers for `runs.jsonl`.
    """

    name: str
    params: Any
    values: dict[str, Any]
    scratch: Path
    shared_scratch: Path
    figures: dict[str, float] = field(default_factory=dict)
    spent: list[Path] = field(default_factory=list)
    _outs: dict[Path, Path] = field(default_factory=dict)

    def out(self, target: str) -> Path:
        """A fresh staging path for an output of dvc.yaml; it is moved to `target` when the stage has succeeded."""
        staged = self.scratch / "out" / target
        if staged.is_dir():
            shutil.rmtree(staged)
        staged.parent.mkdir(parents=True, exist_ok=True)
        self._outs[Path(target)] = staged
        return staged

    def publish(self) -> None:
        """What can fail for want of room comes before the first old output goes."""
        ready = {target: bring_beside(staged, target) for target, staged in self._outs.items()}
        _require_room_for_the_record(self.name)
        for target, path in ready.items():
            _put_aside(target, self.scratch / "out" / "old" / target)
            os.replace(path, target)
        for path in (self.scratch / "out", *self.spent):
            shutil.rmtree(path, ignore_errors=True)


def _put_aside(path: Path, aside: Path) -> None:
    """An old output goes in one move, if it can: a kill while its files are removed one by one would leave a part."""
    remove(aside)
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove(path)


def run_stage(name: str, body: Callable[[Stage], None]) -> int:
    """`main()` of a stage: run `body` under the guard; the exit status. Bad input prints its problems, no traceback."""
    if len(sys.argv) > 1:
        print(f"usage: python -m {_module(name)}   (parameters: {PARAMS_FILE}; normally run by: dvc repro {name})")
        return 0 if sys.argv[1] in ("-h", "--help") else 2
    try:
        with _guarded(name) as stage:
            body(stage)
    except InvalidInput as error:
        return _failed(name, str(error))
    except Exception as error:
        problem = file_fault(error, scratch_home() / name)
        if problem is None:
            raise
        return _failed(name, format_problem(problem))
    return 0


def _failed(name: str, why: str) -> int:
    print(f"{why}\n{name}: failed; nothing was recorded{_way_back()}", file=sys.stderr, flush=True)
    return 1


def _way_back() -> str:
    """What DVC has changed in the workspace by now, with the commands that undo it; "" where no DVC runs the stage."""
    if "DVC_ROOT" not in os.environ:
        return ""
    if Path(os.environ["DVC_ROOT"]).resolve() != Path.cwd().resolve():
        return "; the workspace is as it was, this experiment ran in a folder of its own"
    if "DVC_EXP_NAME" in os.environ:
        commands = "git checkout params.yaml dvc.lock reports && dvc checkout"
        return f"; DVC had changed the workspace for the experiment, it comes back as committed with: {commands}"
    return "; DVC had removed the old outputs, they come back with: dvc checkout && git checkout reports"


@contextmanager
def _guarded(name: str) -> Iterator[Stage]:
    signal.signal(signal.SIGTERM, _terminate)
    die_with_parent()
    _require_living_dvc()
    values, params = _declared(name)
    digest = inputs_digest(name)
    home = scratch_home() / name
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / f"{digest}.lock"), _measured(name, digest) as figures:
        scratch = home / digest
        scratch.mkdir(exist_ok=True)
        os.utime(scratch)
        _drop_old_scratch(home, keep=digest)
        stage = Stage(name, params, values, scratch, home, figures)
        yield stage
        if inputs_digest(name) != digest:
            raise invalid(
                "inputs-changed",
                name,
                "a parameter, a code file or a data dependency changed while the stage ran",
                "inputs that stay as they are until the stage ends",
                f"dvc repro {name}",
                "DVC would record the new inputs with the old output (treeverse/dvc#11058)",
            )
        stage.publish()


def _require_room_for_the_record(name: str) -> None:
    """On a full disk DVC 3.67 cuts its own lock files to nothing, and every later command fails."""
    free = shutil.disk_usage(".").free
    if free < ROOM_FOR_THE_RECORD:
        raise invalid(
            "no-space",
            str(Path.cwd()),
            f"{free / 2**10:.0f} KiB free when {name} had finished",
            f"{ROOM_FOR_THE_RECORD / 2**10:.0f} KiB, for DVC to record it",
            f"make room (dvc gc -w -a -T --all-experiments drops unused cache), then: dvc repro {name}",
        )


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to signal this process when its parent dies, so that a killed `dvc repro` leaves no orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def _require_living_dvc() -> None:
    """Leave if DVC was killed before `die_with_parent`, while Python started: nobody would record what we make.

    DVC 3.67 (rwlock.py) names the process that is about to run a stage in its lock file.
    """
    if "DVC_STAGE" not in os.environ:
        return
    try:
        writers = json.loads(Path(".dvc/tmp/rwlock").read_text(encoding="utf-8"))["write"].values()
        pids = [int(writer["pid"]) for writer in writers]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # another DVC, which writes it otherwise
    if pids and not any(map(_is_alive, pids)):
        raise SystemExit(128 + signal.SIGTERM)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True


def scratch_home() -> Path:
    """DVC names the parent repository in DVC_ROOT, also inside temporary experiments, so these share scratch."""
    return Path(os.environ.get("DVC_ROOT", ".")).absolute() / ".dvc" / "tmp" / "eagle3"


def inputs_digest(name: str) -> str:
    """sha256 of the declared parameter values and of every dependency that dvc.yaml names for the stage."""
    spec = _spec(name)
    deps = {dep: _dep_digest(Path(dep), name) for dep in spec.get("deps", [])}
    return sha256_of_json([name, _declared(name)[0], deps])


def _dep_digest(path: Path, stage: str) -> Any:
    if path.is_file():
        return sha256_of(path)
    if (path / MANIFEST).is_file():
        return sha256_of(path / MANIFEST)
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.is_file())
        return {file.relative_to(path).as_posix(): sha256_of(file) for file in files}
    raise invalid(
        "missing-input", str(path), "no such file or folder", f"a dependency of stage {stage}", f"dvc repro {stage}"
    )


def _module(name: str) -> str:
    return f"stages.{name.replace('-', '_')}"


def _spec(name: str) -> dict[str, Any]:
    stages = read_yaml(Path("dvc.yaml")).get("stages", {})
    if name not in stages:
        raise invalid("no-stage", "dvc.yaml", f"stages {sorted(stages)}", name, "run it from the repository's root")
    return dict(stages[name])


def _declared(name: str) -> tuple[dict[str, Any], Declared]:
    """The stage's parameters, as plain values and as records; `engines.vllm` gives `engines` with that leaf alone."""
    params = parse_params(read_yaml(PARAMS_FILE), str(PARAMS_FILE))
    plain = params_as_dict(params)
    values: dict[str, Any] = {}
    records: dict[str, Any] = {}
    for key in _spec(name).get("params", []):
        section, _, leaf = key.partition(".")
        if leaf:
            values.setdefault(section, {})[leaf] = plain[section][leaf]
            records[section] = Declared(values[section])
        else:
            values[section] = plain[section]
            records[section] = getattr(params, section)
    return values, Declared(records)


def _terminate(number: int, frame: object) -> None:
    """SIGTERM unwinds the stage, so that servers stop, and never ends in exit 0."""
    raise SystemExit(128 + number)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock on these inputs: a second run with the same ones waits, then finds the work done."""
    import fcntl  # absent on Windows, where only the light commands run

    with open(path, "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run of this stage with the same inputs", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _drop_old_scratch(home: Path, keep: str) -> None:
    """Remove the scratch of other inputs, the newest few excepted; a folder in use is locked and stays."""
    import fcntl

    folders = [path for path in home.iterdir() if path.is_dir() and len(path.name) == 64 and path.name != keep]
    for path in sorted(folders, key=lambda folder: folder.stat().st_mtime)[: -KEPT_DIGESTS or None]:
        with open(home / f"{path.name}.lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _measured(name: str, digest: str) -> Iterator[dict[str, float]]:
    """Append wall time, peak memory and the stage's own figures to runs.jsonl, which nothing hashes."""
    figures: dict[str, float] = {}
    start = time.monotonic()
    peak = _PeakMemory()
    peak.start()
    try:
        yield figures
    finally:
        row = {
            "stage": name,
            "digest": digest,
            "experiment": os.environ.get("DVC_EXP_NAME", ""),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - start, 1),
            "peak_memory_bytes": peak.stop(),
            "completed": sys.exc_info()[0] is None,
            **figures,
        }
        # where the stage has failed, a full disk must not be said in place of its own error
        with nullcontext() if row["completed"] else suppress(OSError):
            _append(scratch_home() / "runs.jsonl", row)


def _append(log: Path, row: dict[str, Any]) -> None:
    with naming(log), open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


class _PeakMemory(threading.Thread):
    """Highest proportional memory of this process and all its descendants together.

    A look at it takes 22 ms of processor per GiB and holds up the process meanwhile; resident sizes cost nothing. They
    are read twice a second, and looks take at most a tenth of the time while they grow, a hundredth while they do not.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self._peak = 0

    def run(self) -> None:
        seen, took, ended = 0, 0.0, 0.0
        while not self._stopped.wait(0.5):
            tree = [os.getpid(), *descendants(os.getpid())]
            resident, began = sum(map(_resident_memory, tree)), time.monotonic()
            if began - ended >= took * (10 if resident > seen else 100):
                self._peak = max(self._peak, sum(map(_proportional_memory, tree)))
                ended = time.monotonic()
                seen, took = max(seen, resident), ended - began

    def stop(self) -> int:
        self._stopped.set()
        return max(self._peak, _own_peak())


def _own_peak() -> int:
    """Highest resident memory of this process in bytes; getrusage's is never less than its parent's (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("\nVmHWM:")[2].split()[0]) * 1024


def _resident_memory(pid: int) -> int:
    """Bytes, pages shared with other processes included; 0 if the process ended meanwhile (Linux /proc)."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _proportional_memory(pid: int) -> int:
    """Bytes, a page of n processes counted as 1/n, so that a tree's sum counts it once; 0 if the process ended."""
    with suppress(OSError, IndexError, ValueError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(rollup.partition("\nPss:")[2].split()[0]) * 1024
    return 0


def descendants(root: int) -> list[int]:
    """The process ids of a process's children and of theirs (Linux /proc)."""
    found, todo = [], [root]
    while todo:
        try:
            tasks = list(Path(f"/proc/{todo.pop()}/task").iterdir())
            children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        except OSError:
            continue  # the process ended meanwhile
        found += children
        todo += children
    return found
