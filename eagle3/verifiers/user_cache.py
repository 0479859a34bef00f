"""The user's cache: where dequantised verifiers lie, and the digests of large files that have not changed since."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from eagle3.atomic_files import sha256_of, write_json

# A file changed twice within one tick of the file system's clock keeps its times: only older times are trusted.
SETTLED_SECONDS = 2.0


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/eagle3`, or `~/.cache/eagle3`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "eagle3"


def cached_sha256(path: Path) -> str:
    """The sha256 of a file, remembered by path, size, modification and change time, and inode.

    A file in the hub's cache is named by the sha256 the hub gave it (large files) and is not read.
    """
    real = path.resolve()
    if real.parent.name == "blobs" and len(real.name) == 64 and set(real.name) <= set("0123456789abcdef"):
        return real.name
    stat = real.stat()
    key = [str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    record = cache_home() / "digests" / f"{_name(real)}.json"
    known = _read(record)
    if known and known.get("key") == key:
        return str(known["sha256"])
    digest = sha256_of(real)
    if time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_SECONDS:
        write_json(record, {"key": key, "sha256": digest})
    return digest


def _name(path: Path) -> str:
    return hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()


def _read(record: Path) -> dict[str, object] | None:
    """None also for a record that is not ours or broken: the file is then read again."""
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("sha256"), str) else None
