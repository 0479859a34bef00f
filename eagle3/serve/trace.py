"""`eagle3 trace DIR`: a pulled release verified byte for byte without a network, and the story of how it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.acceptance import spread
from eagle3.dvc_records import folder_md5
from eagle3.formats.json_files import printable, read_json_object, spelled
from eagle3.git_answers import git
from eagle3.manifests import NAME as MANIFEST
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.serve.checksums import checksum_problems

PROVENANCE = "provenance.json"
# A manifest embeds those of all stages before it: its size grows with the number of shards and epochs.
MAX_MANIFEST_BYTES = 64 << 20
MAX_COMMITS = 20_000
Json = dict[str, Any]
Row = tuple[str, str]


@dataclass(frozen=True)
class Trace:
    """What a release says of itself. commits: `hash date subject (tags)`; None outside a clone of its repository."""

    files: int
    size: int
    provenance: Json
    commits: list[str] | None

    def as_dict(self) -> Json:
        return {"files": self.files, "bytes": self.size, "provenance": self.provenance, "commits": self.commits}


def trace(folder: Path) -> Trace:
    """Verify `folder` and read its lineage; `InvalidInput` with every file that is not as it was released."""
    if not folder.is_dir():
        raise invalid(
            "no-release", printable(str(folder)), "no such folder", "a release, e.g. data/release", "dvc pull"
        )
    problems = checksum_problems(folder)
    if problems:
        raise InvalidInput(*problems)
    manifest = read_json_object(folder / MANIFEST, MAX_MANIFEST_BYTES).value
    provenance = read_json_object(folder / PROVENANCE, MAX_MANIFEST_BYTES).value
    if problems := list(_disagreements(folder, manifest, provenance)):
        raise InvalidInput(*problems)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return Trace(len(paths), sum(path.stat().st_size for path in paths), provenance, matching_commits(folder))


def _disagreements(folder: Path, manifest: Json, provenance: Json) -> Iterator[Problem]:
    """The digests hold; now the documents must be those of a release, and of one and the same."""
    listed = manifest.get("files")
    here = {path.name for path in folder.iterdir()} - {MANIFEST, "SHA256SUMS"}
    if manifest.get("stage") != "serve-test" or not isinstance(listed, dict) or set(listed) != here:
        yield _not_a_release(MANIFEST, f"stage {spelled(manifest.get('stage'))}, or other files than are here")
    for key in ("verifier", "metrics", "params", "counts", "engines", "checks", "decisions"):
        if not isinstance(provenance.get(key), dict):
            yield _not_a_release(f"{PROVENANCE}: {key}", spelled(provenance.get(key)))
    if provenance.get("verifier") != manifest.get("verifier"):
        yield _not_a_release(f"{PROVENANCE}: verifier", "another verifier than in manifest.json")


def _not_a_release(where: str, found: str) -> Problem:
    return Problem("not-a-release", where, found, "what serve-test writes", "trace a folder that serve-test released")


def matching_commits(folder: Path) -> list[str] | None:
    """The commits of the repository around the current directory whose dvc.lock records exactly this folder."""
    if not Path("dvc.lock").is_file() or git("rev-parse", "--is-inside-work-tree") is None:
        return None
    digest = folder_md5(folder)
    revisions = (git("rev-list", "--all", f"-n{MAX_COMMITS}", "--", "dvc.lock") or "").split()
    tags = (git("for-each-ref", "--format=%(refname:short)", "refs/tags") or "").split()
    found = [line.rpartition(":")[0] for line in _grep(digest, revisions)]
    tagged = [line.rpartition(":")[0] for line in _grep(digest, tags)]
    lines = (git("log", "--no-walk", "--format=%h %cs %s", *found) or "").splitlines() if found else []
    return [printable(line) for line in lines] + [f"tag {printable(tag)}" for tag in tagged]


def _grep(digest: str, revisions: list[str]) -> list[str]:
    found = git("grep", "-l", "-F", f"md5: {digest}", *revisions, "--", "dvc.lock") if revisions else None
    return (found or "").splitlines()


def trace_lines(folder: Path, traced: Trace) -> Iterator[str]:
    """The story, in aligned rows; `InvalidInput` where a document lacks a part that every release has."""
    made = traced.provenance
    yield f"{printable(str(folder))}: {traced.files} files, {traced.size:,} bytes, every digest is right"
    try:
        rows = [*_origin(made), *_measured(made), *_commit(traced.commits), *_parameters(made["params"])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = printable(f"{type(error).__name__}: {error}")
        raise InvalidInput(_not_a_release(PROVENANCE, found)) from None
    width = max(len(label) for label, _ in rows) + 2
    yield from (f"{label:<{width}}{printable(text, 400)}" for label, text in rows)


def _origin(made: Json) -> Iterator[Row]:
    verifier = made["verifier"]
    yield "verifier", str(verifier["source"]) + (f" at {verifier['revision']}" if verifier["revision"] else "")
    yield "", f"sha256 {verifier['sha256']}"
    for source in made["params"]["sample"]["sources"]:
        yield "data", " ".join(str(value) for value in source.values())
    for stage, counts in made["counts"].items():
        if counts:
            yield printable(f"counts of {stage}", 60), ", ".join(f"{name} {value}" for name, value in counts.items())
    yield "engines", ", ".join(f"{name} {version}" for name, version in sorted(made["engines"].items()))
    yield "epoch", str(made["epoch"])


def _measured(made: Json) -> Iterator[Row]:
    metrics = made["metrics"]
    served = metrics["served"]
    length = f"{float(served['acceptance_length']):.3f}{spread(served['interval_95'])}"
    yield (
        "acceptance length",
        f"{length}, {metrics['num_speculative_tokens']} drafted",
    )
    yield "predicted by walk", f"{float(metrics['walk']['acceptance_length']):.3f}"
    yield "speed-up", f"{float(metrics['speed']['speed_up']):.2f} times, where it was measured"
    for name, gate in sorted(metrics["gates"].items()):
        bound = " ".join(f"{key} {spelled(value)}" for key, value in gate.items() if key not in ("value", "passed"))
        result = "passed" if gate["passed"] is True else "NOT PASSED"
        yield printable(f"gate {name}", 60), f"{spelled(gate['value'])}, {bound.replace('_', ' ')}: {result}"
    for name, check in sorted(made["checks"].items()):
        yield printable(f"check {name}", 60), f"{check['errors']} errors, {check['warnings']} warnings"


def _commit(commits: list[str] | None) -> Iterator[Row]:
    if commits is None:
        yield "commit", "not asked: the current directory is no clone with a dvc.lock"
    elif not commits:
        yield "commit", "none here: no dvc.lock in this clone's history records exactly these files (git fetch --tags?)"
    else:
        yield from (("commit" if index == 0 else "", line) for index, line in enumerate(commits))


def _parameters(params: Json, prefix: str = "") -> Iterator[Row]:
    """Every leaf, dotted, sorted."""
    for key, value in sorted(params.items()):
        if isinstance(value, dict) and value:
            yield from _parameters(value, f"{prefix}{key}.")
        else:
            yield printable(f"  {prefix}{key}", 80), spelled(value)
