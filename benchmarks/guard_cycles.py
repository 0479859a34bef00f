"""Runs of a toy stage under the guard, most of them killed: is anything lost? python -m benchmarks.guard_cycles [N]

A cycle starts the stage in a process of its own and ends it by kill -9 or SIGTERM at a random moment, or waits for its
end; some cycles start a second one with the same inputs. After each: pieces of work that were there are there, as they
were, and the output is absent or the whole of one that was finished. A finished run's output is the right one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from eagle3.manifests import read_manifest, verify_files
from eagle3.problems import InvalidInput

ROOT = Path(__file__).resolve().parents[1]
PIECES = 12
OUT, HOME = Path("data/toy"), Path(".dvc/tmp/eagle3/toy")
DVC_YAML = "stages: {toy: {cmd: python toy.py, deps: [in.txt], params: [seed], outs: [data/toy]}}\n"
TOY = f"""\
import sys, time
from pathlib import Path
from eagle3.atomic_files import link_or_copy, write_json
from eagle3.manifests import Manifest, write_manifest
from eagle3.stage_guard import run_stage

def run(stage):
    print("runs", flush=True)
    given = Path("in.txt").read_text()
    for number in range({PIECES}):
        piece = stage.scratch / f"piece-{{number}}.json"
        if not piece.exists():
            write_json(piece, [given, number] * 500)
            time.sleep(0.004)
    out = stage.out("{OUT}")
    out.mkdir(parents=True)
    for number in range({PIECES}):
        link_or_copy(stage.scratch / f"piece-{{number}}.json", out / f"piece-{{number}}.json")
    write_manifest(out, Manifest("toy", {{"given": given}}))

sys.exit(run_stage("toy", run))
"""
Pieces = dict[Path, tuple[int, int]]


def main(cycles: int = 1000) -> int:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        shutil.copyfile(ROOT / "params.yaml", "params.yaml")
        Path("dvc.yaml").write_text(DVC_YAML)
        Path("toy.py").write_text(TOY)
        Path("in.txt").write_text("0")
        start = time.monotonic()
        for number in range(cycles):
            counts += cycle(random.Random(number), counts)
        seconds = time.monotonic() - start
        os.chdir(ROOT)
    print(f"{cycles:,} cycles in {seconds:.0f} s: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    print("nothing was lost")
    return 0


def cycle(chance: random.Random, so_far: Counter[str]) -> Counter[str]:
    before, end = pieces(), chance.choices(("killed", "terminated", "waited for"), (7, 1, 2))[0]
    stages = [start() for _ in range(2 if chance.random() < 0.1 else 1)]
    if chance.random() < 0.7:
        assert stages[0].stdout is not None
        stages[0].stdout.readline()  # it is past the imports: the moment falls into the work or the publishing
    if end != "waited for":
        time.sleep(chance.uniform(0, 0.25))
        for stage in stages:
            stage.send_signal(signal.SIGKILL if end == "killed" else signal.SIGTERM)
    statuses = [stage.wait(60) for stage in stages]
    counts = Counter({f"{end}, {'finished' if 0 in statuses else 'not finished'}": 1})
    if len(stages) > 1:
        counts["with two at once"] = 1
    require(all(status in (0, -signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM) for status in statuses), statuses)
    require(end != "waited for" or set(statuses) == {0}, statuses)
    after = pieces()
    require(all(after.get(path) == known for path, known in before.items()), "a piece was lost or made again")
    for path in after:
        number = int(path.stem.partition("-")[2])
        require(json.loads(path.read_text()) == [Path("in.txt").read_text(), number] * 500, f"{path} is not whole")
    require_whole_output(finished=0 in statuses)
    if 0 in statuses:
        Path("in.txt").write_text(str(sum(so_far.values()) + 1))
    return counts


def start() -> subprocess.Popen[bytes]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("DVC_")}
    environment = {**known, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "toy.py"], env=environment, stdout=subprocess.PIPE)


def scratch() -> Path:
    """Where the guard keeps the work on the present inputs: the only folder that is younger than they are."""
    folders = [path for path in HOME.glob("*") if path.is_dir()]
    return max(folders, key=lambda path: path.stat().st_mtime, default=HOME / "none")


def pieces() -> Pieces:
    """The finished pieces of work on the present inputs, with what tells a new file from an old one."""
    given = Path("in.txt").stat().st_mtime_ns
    found = {path: path.stat() for path in scratch().glob("piece-*.json")}
    return {path: (status.st_ino, status.st_mtime_ns) for path, status in found.items() if status.st_mtime_ns > given}


def require_whole_output(finished: bool) -> None:
    try:
        manifest = read_manifest(OUT, "toy")
        verify_files(OUT, manifest)
    except InvalidInput as error:
        require(not OUT.exists() and not finished, error)
        return
    require(len(manifest.files) == PIECES, manifest.files)
    require(not finished or manifest.params["given"] == Path("in.txt").read_text(), "an older output")


def require(holds: bool, otherwise: object) -> None:
    if not holds:
        sys.exit(f"guard_cycles: {otherwise}")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
