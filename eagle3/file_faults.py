"""Faults of disks and file systems: recognised in whatever a library raises, and said as problems.

`write()` names no file in its error, and the Rust and C++ libraries below us raise errors of their own classes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.problems import Problem

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)
# Python: [Errno 28]; Rust, as in safetensors: (os error 28); Arrow: [errno 28]; vLLM quotes its worker's words.
NUMBER = re.compile(r"\b(?:os error|errno) (\d+)", re.IGNORECASE)


def error_number(error: BaseException) -> int | None:
    """The errno of a fault of files, of the error itself or quoted in its text; None for any other error.

    >>> error_number(RuntimeError("I/O error: No space left on device (os error 28)"))
    28
    """
    quoted = NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(quoted[1]) if quoted else 0
    return number if number in (*NO_SPACE, *NOT_PERMITTED, errno.EIO) else None


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """A fault of files while the block writes `path` becomes an `OSError` that names it."""
    try:
        yield
    except Exception as error:
        # torch.save raises an error of its own while it handles the one of the file
        number = error_number(error) or (error.__context__ and error_number(error.__context__))
        if not number or (isinstance(error, OSError) and error.filename):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def file_fault(error: BaseException, where: Path | str = "") -> Problem | None:
    """The problem to tell when `error` is a fault of files, else None. where: named if the error names no file."""
    number = error_number(error)
    named = isinstance(error, OSError) and (error.filename2 or error.filename)
    if number is None or (number in NOT_PERMITTED and not named):
        return None
    path = Path(os.fsdecode(named or where or "."))
    words = os.strerror(number)
    if number in NO_SPACE:
        return Problem(
            "no-space",
            str(path),
            f"{words}; {_free(path)}",
            "room for what is written there",
            "make room (dvc gc -w -a -T --all-experiments drops unused cache) or raise the limit, then run it again",
        )
    if number in NOT_PERMITTED:
        return Problem(
            "not-permitted",
            str(path),
            f"{words}; {_ownership(path)}",
            "a file system, owner and mode that let this user read and write there",
            "run as the owner, or share the repository: chmod -R g+rwX on it, and dvc config cache.shared group",
        )
    return Problem("disk-error", str(path), words, "a disk that reads and writes", "see dmesg; move to another disk")


def _free(path: Path) -> str:
    return f"{shutil.disk_usage(_existing(path)).free / 2**20:.1f} MiB free there"


def _ownership(path: Path) -> str:
    there = _existing(path)
    status = there.stat()
    return f"{there} belongs to user {status.st_uid}, mode {status.st_mode & 0o777:o}; this is user {os.geteuid()}"


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that this user can see."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
