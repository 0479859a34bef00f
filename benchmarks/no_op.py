"""What it costs to ask a finished pipeline. python -m benchmarks.no_op [TIMES]

`dvc repro` where nothing has changed, and `eagle3 plan`: of the parameters as they are, and of a changed seed, where
every stage has reasons. Run it in a repository whose pipeline has run.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.processes import medians

AT_MOST = {"dvc repro": 1.0, "plan": 1.5, "plan -S seed=1": 1.5}
PLAN = (sys.executable, "-m", "eagle3", "plan")


def main(times: int = 9) -> int:
    done = subprocess.run(["dvc", "repro", "--dry"], text=True, capture_output=True, check=False)
    if "up to date" not in done.stdout + done.stderr:
        sys.exit("no_op: dvc repro would run something here; run the pipeline first")
    commands = {"dvc repro": ("dvc", "repro"), "plan": PLAN, "plan -S seed=1": (*PLAN, "-S", "seed=1")}
    runs = medians(commands, times)
    for name, run in runs.items():
        print(f"{name:<15} {run.wall_s:.2f} s, {run.cpu_s:.2f} s of processor (at most {AT_MOST[name]} s)")
    return 0 if all(run.wall_s <= AT_MOST[name] for name, run in runs.items()) else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
