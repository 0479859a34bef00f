"""Files that are either whole or not there: write beside the place, flush to disk, move into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.file_faults import naming

BLOCK = 1 << 20


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, moved onto it when the block ends well and removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with naming(path):
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Sorted keys, two spaces, one final newline: the same value is the same bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, so that an output costs no second copy; else a copy."""
    try:
        # a symbolic link (of a DVC cache on another disk) is followed: a link to a link would dangle elsewhere
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Make `target`, which must not exist, a copy of the folder `source`, of hard links where possible."""
    with naming(target):
        shutil.copytree(source, target, copy_function=lambda one, other: link_or_copy(Path(one), Path(other)))


def are_on_one_disk(one: Path, other: Path) -> bool:
    """Whether files can be moved and linked from one path to the other.

    Two bind mounts of one file system, as containers have them, share its device number; Linux refuses all the same.
    """
    return one.stat().st_dev == other.stat().st_dev and _mount(one) == _mount(other)


def nearest(path: Path) -> Path:
    """The path, or the first folder over it that exists: the file system that it will be on."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _mount(path: Path) -> str:
    """Linux' number of the mount; "" where no /proc tells it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    except FileNotFoundError:
        return ""
    finally:
        os.close(fd)
    return next(line for line in lines if line.startswith("mnt_id"))


def bring_beside(source: Path, target: Path) -> Path:
    """`source` (a file or a folder) where one move can make it `target`: itself, or a copy if it is on another disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if are_on_one_disk(source, target.parent):
        return source
    beside = target.with_name(f".{target.name}.partial")
    remove(beside)
    try:
        with naming(beside):
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, beside)
    except BaseException:
        remove(beside)
        raise
    return beside


def remove(path: Path) -> None:
    """A file or a folder that may be absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """The digest of a JSON value in its canonical spelling."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
