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

BLOCK = 1 << 20


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, moved onto it when the block ends well and removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
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


def publish_directory(source: Path, target: Path) -> None:
    """Make `target` a hard-linked copy of the directory `source`; an older `target` is replaced in one move."""
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for file in sorted(source.rglob("*")):
            place = staging / file.relative_to(source)
            if file.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, place)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish_file(source: Path, target: Path) -> None:
    """Copy, never link: reports live in Git and people edit the working copy."""
    with atomic_path(target) as partial:
        shutil.copyfile(source, partial)


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
