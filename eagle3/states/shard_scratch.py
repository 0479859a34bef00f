"""The folder in which shards wait for their output: what is left behind there, and whether the disks have room.

    scratch   .dvc/tmp/eagle3/extract   every shard that is missing
    data      data/hidden_states        hard links to scratch; on another file system copies, of all shards
    cache     DVC's cache               hard links to data; on another file system than data copies, of what is new

Each file system is judged by itself, and a low-water mark is left on it.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from eagle3.atomic_files import are_on_one_disk, nearest
from eagle3.dvc_records import cache_folder
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.states.shard_plan import Shard

LOW_WATER_BYTES = 1 << 30
KEPT_SECONDS = 7 * 24 * 3600
DATA = Path("data")
# Locked by every run of extract, shared with the others.
IN_USE = "in-use.lock"
MAKE_ROOM = (
    "make room (dvc gc -w -a -T --all-experiments drops unused cache, and the next run of extract the shards that its "
    "scratch alone then has; while another run is at work they stay)"
)


@contextmanager
def scratch_in_use(folder: Path, shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Those of `shards` that are still to be made, when the folder is clean and every disk has room for them.

    Until the context ends no other run deletes whole shards here.
    """
    remove_leftovers(folder)
    with open(folder / IN_USE, "w", encoding="utf-8") as lock:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean_scratch(folder, shards)
        # not one step with the release of the other lock: another run may have cleaned, so we look only from here on
        fcntl.flock(lock, fcntl.LOCK_SH)
        check_sizes(folder, shards)
        missing = _missing(folder, shards)
        require_space(folder, shards, missing)
        yield missing


def clean_scratch(folder: Path, current: Sequence[Shard]) -> None:
    """Delete whole shards of other inputs, where no other run is at work: those made over a week ago, and, where a
    disk is short of room, all that have no other name: what `dvc gc` has dropped from the cache is free then.
    """
    new, every = (sum(shard.num_bytes for shard in each) for each in (_missing(folder, current), current))
    is_short = any(space_problems(folder, new, every, ""))
    for path in _outdated(folder, current):
        found = path.stat()
        if found.st_mtime < time.time() - KEPT_SECONDS or (is_short and found.st_nlink == 1):
            path.unlink(missing_ok=True)


def _missing(folder: Path, shards: Sequence[Shard]) -> list[Shard]:
    return [shard for shard in shards if not (folder / shard.name).exists()]


def remove_leftovers(folder: Path) -> None:
    """Delete half-written shards whose writer is gone."""
    for path in _abandoned(folder):
        path.unlink(missing_ok=True)


def _abandoned(folder: Path) -> Iterator[Path]:
    """Half-written shards whose writer is gone, each locked as long as it is looked at."""
    for path in folder.glob(".shard-*.partial-*"):
        with suppress(BlockingIOError, FileNotFoundError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path


def _outdated(folder: Path, current: Sequence[Shard]) -> Iterator[Path]:
    kept = {shard.name for shard in current}
    yield from (path for path in folder.glob("shard-*.safetensors") if path.name not in kept)


def bytes_to_clean(folder: Path, current: Sequence[Shard]) -> int:
    """What a run that needs it will free; a file with a second name keeps its bytes."""
    left = (path.stat() for path in chain(_abandoned(folder), _outdated(folder, current) if _is_idle(folder) else ()))
    return sum(found.st_blocks * 512 for found in left if found.st_nlink == 1)


def _is_idle(folder: Path) -> bool:
    """No run is at work here."""
    try:
        with open(folder / IN_USE, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Writing:
    """What is written to one file system. where: the first folder on it; whats: what each part is."""

    where: Path
    num_bytes: int
    whats: tuple[str, ...]

    @property
    def disk(self) -> int:
        return self.where.stat().st_dev


def writings(scratch: Path, new: int, every: int) -> list[Writing]:
    """What is written to each file system. new, every: bytes of the output that are still to be made, and of all."""
    scratch, data, cache = map(nearest, (scratch, DATA, cache_folder()))
    parts = [Writing(scratch, new, ("what is still to be made",))]
    if not are_on_one_disk(scratch, data):
        parts.append(Writing(data, every, (f"the whole output, for {data} is on another file system than {scratch}",)))
    if not are_on_one_disk(data, cache):
        parts.append(Writing(cache, new, (f"DVC's copy, for {cache} is on another file system than {data}",)))
    found: dict[int, Writing] = {}
    for part in (part for part in parts if part.num_bytes):
        one = found.get(part.disk, Writing(part.where, 0, ()))
        found[part.disk] = Writing(one.where, one.num_bytes + part.num_bytes, one.whats + part.whats)
    return list(found.values())


def space_problems(scratch: Path, new: int, every: int, how: str, freed: int = 0) -> Iterator[Problem]:
    """One for each file system that the shards would take under the low-water mark.

    how: what the bytes come from. freed: bytes of scratch that will be deleted first (`bytes_to_clean`).
    """
    for writing in writings(scratch, new, every):
        free = shutil.disk_usage(writing.where).free + (freed if writing.disk == nearest(scratch).stat().st_dev else 0)
        if writing.num_bytes + LOW_WATER_BYTES > free:
            yield Problem(
                "no-space",
                str(writing.where),
                f"{free / 1e9:.2f} GB free",
                f"{writing.num_bytes / 1e9:.2f} GB for {' and for '.join(writing.whats)} ({how}), and "
                f"{LOW_WATER_BYTES / 1e9:.2f} GB left for everything else on this disk",
                f"{MAKE_ROOM}, or store half the bytes (extract.store_dtype=fp8), or "
                "take fewer samples (sample.max_train) or layers (extract.aux_layer_ids)",
            )


def require_space(scratch: Path, shards: Sequence[Shard], missing: Sequence[Shard]) -> None:
    """`InvalidInput` with the sums where making `missing` of `shards` would take a disk under the low-water mark."""
    new, every = (sum(shard.num_bytes for shard in each) for each in (missing, shards))
    num_tokens, one = sum(shard.num_tokens for shard in shards), shards[0]
    how = (
        f"{num_tokens} tokens of {one.bytes_per_token} bytes are {every / 1e9:.2f} GB: {one.num_states} states of "
        f"{one.hidden_size} {one.store_dtype} numbers each"
    )
    if problems := list(space_problems(scratch, new, every, how)):
        raise InvalidInput(*problems)


def require_room(folder: Path, shard: Shard) -> None:
    """`InvalidInput` before a shard would take the disk under the low-water mark; those made so far stay."""
    free = shutil.disk_usage(folder).free
    if free - shard.num_bytes < LOW_WATER_BYTES:
        raise invalid(
            "low-water",
            str(folder),
            f"{free / 1e9:.2f} GB free, and the next shard takes {shard.num_bytes / 1e9:.2f} GB",
            f"{LOW_WATER_BYTES / 1e9:.2f} GB left for everything else on this disk",
            f"{MAKE_ROOM}, then: dvc repro extract   (it goes on with the shards that are missing)",
            "a full disk would stop other programs, and this run in the middle of a shard",
        )


def check_sizes(folder: Path, shards: Sequence[Shard]) -> None:
    """`InvalidInput` for a shard in `folder` whose length is not the planned one (a file changed under its name)."""
    problems = [
        Problem(
            "changed-shard",
            str(path),
            f"{path.stat().st_size} bytes",
            f"{shard.num_bytes} bytes",
            f"remove {path}, then: dvc repro extract",
        )
        for shard in shards
        if (path := folder / shard.name).exists() and path.stat().st_size != shard.num_bytes
    ]
    if problems:
        raise InvalidInput(*problems)
