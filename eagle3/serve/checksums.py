"""SHA256SUMS of a release: the digest of every file, the manifest's own included, as `sha256sum -c` reads it.

A manifest cannot hold its own digest, so without this file a changed byte in the embedded lineage would pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from eagle3.atomic_files import sha256_of, write_text
from eagle3.formats.json_files import printable
from eagle3.problems import Problem

NAME = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\0\n][^\\\0\n]*)")
MAX_BYTES = 4 << 20
FIX = "fetch it again: dvc get URL data/release --rev TAG"


def write_checksums(folder: Path) -> None:
    """Write the file, last: one line a file, sorted by name."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    write_text(folder / NAME, "".join(f"{sha256_of(folder / name)}  {name}\n" for name in names if name != NAME))


def checksum_problems(folder: Path) -> list[Problem]:
    """Everything by which the folder differs from its SHA256SUMS, that file's own form included.

    Links are followed, since DVC checks out links; what they lead to must have the digest. A changed byte in SHA256SUMS
    is a broken line, an unknown name or a wrong digest.
    """
    listed: dict[str, str] = {}
    problems = list(_parse(folder / NAME, listed))
    if not listed:
        return problems
    found = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    found.discard(NAME)
    for name in sorted(found | set(listed)):
        if name not in found:
            problems.append(_problem("missing-file", name, "no such file", "a file of the release"))
        elif name not in listed:
            problems.append(_problem("unknown-file", name, "a file that the release has not", "no file", "remove it"))
        else:
            problems += _compare(folder / name, name, listed[name])
    return problems


def _parse(path: Path, listed: dict[str, str]) -> Iterator[Problem]:
    """Fill `listed` with name -> digest; a name that leaves the folder is no line of ours."""
    if not path.is_file():
        yield _problem("no-checksums", NAME, "no such file", "the digests that a release is published with")
        return
    if path.stat().st_size > MAX_BYTES:
        yield _problem("broken-checksums", NAME, f"{path.stat().st_size} bytes", f"at most {MAX_BYTES} bytes")
        return
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    if lines.pop() != "" or not lines:
        yield _problem("broken-checksums", NAME, "no line, or one that does not end", "whole lines")
    for number, line in enumerate(lines, 1):
        match = LINE.fullmatch(line)
        if not match or ".." in match[2].split("/") or match[2] in listed:
            yield _problem(
                "broken-checksums", f"{NAME}: line {number}", line, "<64 hex digits>  <name>, each name once"
            )
        else:
            listed[match[2]] = match[1]
    if list(listed) != sorted(listed):
        yield _problem("broken-checksums", NAME, "names out of order", "names in order, as they were written")


def _compare(path: Path, name: str, digest: str) -> Iterator[Problem]:
    if not path.is_file():  # a socket, a device or a link to nothing: opening it could wait for ever
        yield _problem("changed-file", name, "no regular file", "a file of the release")
    elif (actual := sha256_of(path)) != digest:
        yield _problem("changed-file", name, f"sha256 {actual}", f"sha256 {digest}")


def _problem(code: str, where: str, found: str, expected: str, fix: str = FIX) -> Problem:
    consequence = "the folder is not what was measured and released"
    return Problem(code, printable(where), printable(found), expected, fix, consequence)
