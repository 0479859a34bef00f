"""What a kill or a full disk leaves of DVC's own files and of Git's HEAD, each with the commands that mend it.

DVC 3.67 empties dvc.lock and writes it again in pieces of 8 KiB after every stage (dvc/utils/serialize/_common.py,
`_dump_data`). Stopped in between it leaves a beginning of the file, and most of these it takes for a shorter lock
without a word: 5,190 of 6,010 cuts of a lock of 42 KB. What ran is in the run cache whichever way the lock was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.git_answers import git
from eagle3.plans.plan import out_paths
from eagle3.problems import InvalidInput, Problem
from eagle3.yaml12 import parse_yaml, read_yaml

LOCK, RWLOCK = Path("dvc.lock"), Path(".dvc/tmp/rwlock")
FROM_GIT = f"git checkout HEAD {LOCK}; then: dvc repro   (it restores what has run since)"
ANEW = f"rm {LOCK}; then: dvc repro   (it restores what has run)"
Json = dict[str, Any]


def kill_faults() -> Iterator[Problem]:
    """Faults of the repository in the current folder, which has a dvc.yaml."""
    yield from _detached_head()
    if RWLOCK.is_file() and not _is_json(RWLOCK):
        fix = f"rm {RWLOCK}; then: dvc repro   (after looking that no dvc is running)"
        yield Problem(
            "cut-rwlock", str(RWLOCK), "no JSON", "DVC's list of its commands", fix, "every dvc command stops"
        )
    if not LOCK.is_file():
        return
    stages, text, committed = (
        read_yaml(Path("dvc.yaml"))["stages"],
        LOCK.read_text(errors="replace"),
        git("show", f"HEAD:./{LOCK}") or "",
    )
    entries, found = _read(text, stages)
    before, unusable = (entries, found) if text == committed else _read(committed, stages)
    fix = ANEW if unusable else FROM_GIT
    lost = [name for name in stages if _lacks(entries.get(name, {}), before.get(name, {}))]
    if found:
        consequence = "DVC 3.67 stops, or takes it for a shorter lock without a word"
        yield Problem("cut-lock", str(LOCK), found, "DVC's record, as a whole", fix, consequence)
    elif lost and not unusable:
        found = f"no record of {', '.join(lost)}, which the last commit has and whose outputs are here"
        consequence = "DVC restores them from the run cache, or runs them again where that has not got them"
        yield Problem("short-lock", str(LOCK), found, "a record that nobody cut", fix, consequence, "warning")


def _detached_head() -> Iterator[Problem]:
    """DVC detaches HEAD for an experiment in the workspace, by its full id; its next command leaves it there."""
    if git("symbolic-ref", "-q", "HEAD") or not git("for-each-ref", "--count=1", "refs/exps"):
        return
    came = re.search(r"^checkout: moving from (\S+) to (\S+)$", git("reflog", "--format=%gs") or "", re.MULTILINE)
    if came and re.fullmatch("[0-9a-f]{40}", came[2]):
        fix = f"git checkout {came[1]}   (unless an experiment is running just now)"
        found = "detached, as a killed `dvc exp run` leaves it"
        yield Problem("detached-head", "HEAD", found, "a branch", fix, "commits would belong to no branch", "warning")


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def _read(text: str, stages: Json) -> tuple[Json, str]:
    """The lock's entries by stage, and what shows that this is not the whole file ("" where nothing does)."""
    if not text:
        return {}, "0 bytes"
    try:
        lock = parse_yaml(text, str(LOCK))
    except InvalidInput as error:
        return {}, f"no YAML: {error.problems[0].found}"
    entries = lock.get("stages") if isinstance(lock, dict) else None
    if not isinstance(entries, dict) or not entries:
        return {}, "no stage in it"
    partial = [name for name, entry in entries.items() if not _is_whole(entry, stages.get(name, {}))]
    if partial:
        return {}, f"half an entry: {', '.join(partial)}"
    return entries, "" if text.endswith("\n") else "its last line has no end"


def _is_whole(entry: Any, stage: Json) -> bool:
    """Whether a stage's entry has all that DVC writes: cmd, outs where dvc.yaml has some, each file's last field."""
    if not isinstance(entry, dict) or not entry.get("cmd") or (out_paths(stage) and "outs" not in entry):
        return False
    files = [entry[key] for key in ("deps", "outs") if key in entry]
    return all(isinstance(rows, list) and all(map(_is_whole_row, rows)) for rows in files)


def _is_whole_row(row: Any) -> bool:
    if not isinstance(row, dict) or any(row.get(key) is None for key in ("path", "size")):
        return False
    return "nfiles" in row or not str(row.get("md5", "")).endswith(".dir")


def _lacks(entry: Json, before: Json) -> bool:
    """Whether a stage's entry records fewer outputs than `before`, the committed one, did, and they are here."""
    here, there = ({out["path"] for out in one.get("outs", [])} for one in (entry, before))
    return any(Path(out).exists() for out in there - here)
