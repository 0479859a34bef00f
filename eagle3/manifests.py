"""The `manifest.json` of every folder under `data/`: what made it and the digest of each file, written last.

A manifest holds no clock times, host names, absolute paths, commit ids or code digests: DVC hashes it, and each of
those would rerun stages that have nothing to do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.atomic_files import sha256_of, write_json
from eagle3.problems import InvalidInput, Problem, invalid

NAME = "manifest.json"
SCHEMA_VERSION = 1
MAPPINGS = ("params", "inputs", "verifier", "engines", "counts", "decisions", "files")


@dataclass(frozen=True)
class Manifest:
    """What one stage recorded about one folder.

    params: the parameter values the stage used, by section. inputs: the manifests of the folders it read, whole.
    verifier: its identity (`eagle3.verifiers.verifier`). engines: name -> version. counts: integers that close.
    decisions: what the stage chose or derived. files: relative name -> {"bytes": int, "sha256": str}.
    """

    stage: str
    params: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    verifier: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def decided_size(self, name: str) -> int:
        """A decision that is a positive integer; `InvalidInput` where somebody has changed the manifest."""
        return self._size(f"decisions.{name}", self.decisions.get(name))

    def used_size(self, section: str, name: str) -> int:
        """A parameter of the stage that is a positive integer; refused like `decided_size`."""
        values = self.params.get(section)
        return self._size(f"params.{section}.{name}", values.get(name) if isinstance(values, dict) else None)

    def _size(self, where: str, value: Any) -> int:
        if type(value) is not int or value <= 0:
            raise self._changed(where, value, "a positive integer")
        return value

    def decided_list(self, name: str, of: type) -> list[Any]:
        """A decision that is a list of `of`; `InvalidInput` where somebody has changed the manifest."""
        value = self.decisions.get(name)
        if not isinstance(value, list) or any(type(item) is not of for item in value):
            raise self._changed(f"decisions.{name}", value, f"a list of {of.__name__}")
        return value

    def _changed(self, name: str, found: Any, expected: str) -> InvalidInput:
        where, fix = f"{NAME} of stage {self.stage}: {name}", f"dvc repro --single-item --force {self.stage}"
        return invalid("broken-manifest", where, repr(found)[:200], f"{expected}, as the stage writes it", fix)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Add the digest of every file in `folder` and write the manifest, last."""
    assert not manifest.files, "files are taken from the folder"
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / NAME
    }
    complete = Manifest(**{**vars(manifest), "files": files})
    write_json(folder / NAME, complete.as_dict())
    return complete


def read_manifest(folder: Path, stage: str) -> Manifest:
    """The manifest of a folder that `stage` wrote; its absence or another shape is the user's to mend.

    `stage` is the name in dvc.yaml; it is what the message tells the user to run.
    """
    path = folder / NAME
    fix = f"dvc repro {stage}   (or, to fetch what somebody else made: dvc pull {stage})"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise invalid("missing-input", str(path), "no such file", f"the output of stage {stage}", fix) from None
    except ValueError as error:
        raise invalid("broken-manifest", str(path), f"not JSON: {error}", "a manifest", fix) from None
    known = set(Manifest.__dataclass_fields__)
    if not isinstance(raw, dict) or set(raw) != known or raw.get("schema_version") != SCHEMA_VERSION:
        found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise invalid("broken-manifest", str(path), f"keys {found}", f"keys {sorted(known)}", fix)
    if wrong := [name for name in MAPPINGS if not isinstance(raw[name], dict)]:
        raise invalid("broken-manifest", str(path), f"no mapping under {wrong}", f"mappings under {MAPPINGS}", fix)
    if wrong := [name for name, entry in raw["files"].items() if not _is_entry(entry)]:
        raise invalid("broken-manifest", str(path), f"files {wrong[:5]} without bytes and sha256", "both for each", fix)
    if raw["stage"] != stage:
        raise invalid("wrong-manifest", str(path), f"written by {raw['stage']}", f"written by {stage}", fix)
    return Manifest(**raw)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Raise `InvalidInput` naming every file that is missing, of another size or of other content."""
    problems = [
        changed_file(folder / name, found, f"{entry['bytes']} bytes, sha256 {entry['sha256'][:12]}…", manifest.stage)
        for name, entry in manifest.files.items()
        if (found := _difference(folder / name, entry))
    ]
    if problems:
        raise InvalidInput(*problems)


def changed_file(path: Path, found: str, expected: str, stage: str) -> Problem:
    """An output of `stage` is not as it was made.

    DVC 3.67 looks at sizes and times alone, and never writes over an object of its cache: where a bit has flipped on
    the disk, even `dvc repro --force` leaves the broken file there, of which the output is a hard link. Where a file is
    missing, its list of the folder's files may be what is broken; it has then recorded that it is complete.
    """
    mend = f"find .dvc/cache -samefile {path} -delete; rm -f {path}; then: dvc repro {stage}"
    fix = mend if path.exists() else f"python -m eagle3 doctor; then: dvc repro --force --single-item {stage}"
    return Problem("changed-file", str(path), found, expected, f"{fix}   (or: dvc pull {stage})")


def _difference(path: Path, entry: dict[str, Any]) -> str:
    if not path.is_file():
        return "no such file"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.stat().st_size} bytes"
    actual = sha256_of(path)
    return "" if actual == entry["sha256"] else f"sha256 {actual[:12]}…"
