"""What DVC 3 has recorded, read without DVC: digests of files and folders, dvc.lock, the cache and the run cache.

Importing DVC and building its index costs more than a whole plan may. tests/test_dvc_records.py compares every function
with what the real DVC wrote.
"""

from __future__ import annotations

import configparser
import fnmatch
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from eagle3.problems import InvalidInput
from eagle3.yaml12 import parse_yaml, read_yaml

Json = dict[str, Any]


def file_md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def folder_md5(folder: Path, ignored: tuple[str, ...] = ()) -> str:
    """`<md5>.dir`: of the JSON list of the folder's files, by path; `ignored` are lines of .dvcignore."""
    paths = sorted((path.relative_to(folder).parts, path) for path in folder.rglob("*") if path.is_file())
    entries = [
        {"md5": file_md5(path), "relpath": "/".join(parts)} for parts, path in paths if not _is_ignored(path, ignored)
    ]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def read_dvcignore() -> tuple[str, ...]:
    path = Path(".dvcignore")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def _is_ignored(path: Path, patterns: tuple[str, ...]) -> bool:
    """The three forms that our .dvcignore has: /from/the/root, folder/ and *.suffix."""
    return any(
        path.as_posix() == pattern[1:]
        if pattern.startswith("/")
        else any(fnmatch.fnmatchcase(part, pattern.rstrip("/")) for part in path.parts)
        for pattern in patterns
    )


def cache_folder() -> Path:
    """`cache.dir` of .dvc/config.local or .dvc/config, which is relative to .dvc, else .dvc/cache."""
    for name in ("config.local", "config"):
        config = dvc_config(name)
        if config.has_option("cache", "dir"):
            return Path(".dvc") / os.path.expanduser(config["cache"]["dir"].strip("\"'"))
    return Path(".dvc/cache")


def dvc_config(name: str) -> configparser.ConfigParser:
    """A file of settings in .dvc, `config` or `config.local`; empty where there is none. Quotes stay around values."""
    config = configparser.ConfigParser(interpolation=None, strict=False)
    config.read(Path(".dvc") / name, encoding="utf-8")
    return config


def cached_path(md5: str) -> Path:
    return cache_folder() / "files" / "md5" / md5[:2] / md5[2:]


def listing(md5: str) -> dict[str, str] | None:
    """relpath -> md5 of a recorded folder; None where the cache has not got the list."""
    try:
        return {entry["relpath"]: entry["md5"] for entry in json.loads(cached_path(md5).read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rotten_listings() -> list[Path]:
    """The cache's lists of a folder's files that have another content than their names say; DVC itself trusts them."""
    found = (cache_folder() / "files" / "md5").glob("*/*.dir")
    return [path for path in found if file_md5(path) != path.parent.name + path.name.removesuffix(".dir")]


def is_cached(out: Json) -> bool:
    """Whether every object of one `outs` entry of dvc.lock is in the cache."""
    if not out["md5"].endswith(".dir"):
        return cached_path(out["md5"]).is_file()
    files = listing(out["md5"])
    return files is not None and all(cached_path(md5).is_file() for md5 in files.values())


def is_checked_out(out: Json) -> bool:
    """Whether the workspace has the output, judged by number and size of its files; content is not read."""
    path = Path(out["path"])
    if path.is_file():
        return path.stat().st_size == out["size"]
    files = [file for file in path.rglob("*") if file.is_file()]
    return len(files) == out.get("nfiles") and sum(file.stat().st_size for file in files) == out["size"]


def run_cache_key(stage: Json) -> str:
    """The name of a stage's run cache folder. stage: cmd, deps, params as in dvc.lock, and `outs` with their paths.

    sha256 of the JSON without sizes (dvc/stage/cache.py and dvc/utils/__init__.py, dict_sha256, in DVC 3.67).
    """
    deps = sorted(({**dep, "hash": "md5"} for dep in stage["deps"]), key=lambda dep: dep["path"])
    plain = {
        "cmd": stage["cmd"],
        "deps": [{key: dep[key] for key in ("path", "hash", "md5")} for dep in deps],
        "params": stage["params"],
        "outs": sorted(out["path"] for out in stage["outs"]),
    }
    if not plain["params"]:
        del plain["params"]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def restorable(stage: Json) -> Json | None:
    """The newest record of a run with these inputs whose outputs are all in the cache; a broken record is none."""
    key = run_cache_key(stage)
    folder = cache_folder() / "runs" / key[:2] / key
    records = sorted(_files(folder), key=lambda path: path.stat().st_mtime, reverse=True)
    try:
        record: Json = read_yaml(records[0]) if records else {}
        return record if records and all(is_cached(out) for out in record["outs"]) else None
    except (InvalidInput, KeyError, TypeError):
        return None


def was_seen(stage: Json, unrecorded: frozenset[str]) -> bool:
    """Whether a run is on record with these data and these parameters, those in `unrecorded` and the code aside."""

    def told(record: Json) -> tuple[Json, Json]:
        data = {dep["path"]: dep["md5"] for dep in record["deps"] if not dep["path"].endswith(".py")}
        return data, {key: value for key, value in _values(record).items() if key not in unrecorded}

    return _on_record(stage, told)


def was_seen_but_for(stage: Json, unknown: Collection[str]) -> bool:
    """Whether a run is on record with this code, these data and these parameters, whatever is in the deps `unknown`."""

    def told(record: Json) -> tuple[Json, Json]:
        return {dep["path"]: dep["md5"] for dep in record["deps"] if dep["path"] not in unknown}, _values(record)

    return _on_record(stage, told)


def _on_record(stage: Json, told: Callable[[Json], tuple[Json, Json]]) -> bool:
    """Whether any run of the stage's command tells what `stage` does."""
    wanted, head = told(stage), f"cmd: {stage['cmd']}\n"
    for path in (cache_folder() / "runs").glob("*/*/*"):
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            if text.startswith(head) and told(parse_yaml(text, str(path))) == wanted:
                return True
        except (InvalidInput, KeyError, TypeError, AttributeError):
            continue  # DVC passes a broken record over, too
    return False


def _values(record: Json) -> Json:
    return dict(leaves(record.get("params", {}).get("params.yaml", {})))


def leaves(values: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of nested mappings."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else iter(())
