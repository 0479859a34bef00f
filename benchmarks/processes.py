"""Whole processes, measured from outside: wall time, processor time and peak memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One process: seconds of wall time and of both processors, and the most memory it had resident, in bytes."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def run(command: Sequence[str], allowed: Sequence[int] = (0,)) -> Run:
    """Start, wait, measure. The output is thrown away; a status that is not in `allowed` ends the benchmark."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) not in allowed:
        sys.exit(f"{' '.join(command)}: exit status {os.waitstatus_to_exitcode(status)}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def medians(commands: Mapping[str, Sequence[str]], times: int, allowed: Sequence[int] = (0,)) -> dict[str, Run]:
    """Each command `times` times, in turn, so that what else the machine does meets all of them alike."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(times):
        for name, command in commands.items():
            runs[name].append(run(command, allowed))
    return {
        name: Run(
            statistics.median(each.wall_s for each in every),
            statistics.median(each.cpu_s for each in every),
            max(each.peak_bytes for each in every),
        )
        for name, every in runs.items()
    }
