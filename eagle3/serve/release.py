"""`data/release`: the selected draft with its lineage, its measured acceptance and a model card; what consumers pull.

It is written only when every gate was passed. Apart from the measured numbers it is a function of the inputs: no clock
times, host names or absolute paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic_files import link_or_copy, write_json, write_text
from eagle3.manifests import NAME, Manifest, write_manifest
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.serve.checksums import write_checksums
from eagle3.serve.model_card import model_card

CHECK_REPORTS = {
    "validate_config": ("validate-config", Path("reports/validate_config.json")),
    "simulate_weight_load": ("simulate-weight-load", Path("reports/simulate_weight_load.json")),
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Release:
    """What a release is made of: the draft's and the samples' manifests, the report with its gates, the other checks.

    values and engines are those of the stage serve-test.
    """

    draft: Manifest
    samples: Manifest
    report: Json
    checks: Json
    values: Json
    engines: dict[str, str]


def require_one_lineage(draft: Manifest, samples: Manifest, verifier: Json) -> None:
    """The draft was trained on this verifier and on these samples; else `InvalidInput`."""
    problems = []
    if draft.verifier != verifier:
        problems.append(
            Problem(
                "verifier-changed",
                "verifier.source",
                f"{verifier['source']} with sha256 {verifier['sha256']}",
                f"{draft.verifier['source']} with sha256 {draft.verifier['sha256']}, on which data/draft was trained",
                "bring those files back, or start over with the ones that are there: dvc repro -f sample && dvc repro",
                "a draft served with another verifier loses its acceptance without an error",
            )
        )
    walked = next((one for one in lineage(draft.as_dict()) if one["stage"] == "sample"), {})
    if walked.get("files") != samples.files:
        problems.append(
            Problem(
                "other-samples",
                "data/samples",
                "samples that data/draft was not made from",
                "those named in the manifest of data/draft",
                "dvc repro",
                "the walk of training and the server would be compared over different answers",
            )
        )
    if problems:
        raise InvalidInput(*problems)


def read_passed_checks() -> Json:
    """Both earlier reports, whole; an error in one of them is `InvalidInput`, whoever let it pass."""
    checks, problems = {}, []
    for name, (stage, path) in CHECK_REPORTS.items():
        try:
            checks[name] = json.loads(path.read_text(encoding="utf-8"))
            errors = checks[name]["errors"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise invalid("missing-input", str(path), found, f"the report of {stage}", f"dvc repro {stage}") from None
        if errors:
            fix = f"dvc repro {stage}, and mend what it names"
            problems.append(Problem("failed-check", str(path), f"{errors} errors", "no errors", fix))
    if problems:
        raise InvalidInput(*problems)
    return checks


def lineage(manifest: Json) -> Iterator[Json]:
    """A manifest and all those embedded in it; the same one can come twice."""
    yield manifest
    for embedded in manifest["inputs"].values():
        yield from lineage(embedded)


def provenance(release: Release) -> Json:
    """What made this release, read off the embedded manifests: every parameter value, count, decision and version."""
    made: Json = {"params": {}, "engines": {}, "counts": {}, "decisions": {}}
    for manifest in lineage(release.draft.as_dict()):
        _merge(made["params"], manifest["params"])
        _merge(made["engines"], manifest["engines"])
        made["counts"][manifest["stage"]] = manifest["counts"]
        made["decisions"].setdefault(manifest["stage"], {}).update(manifest["decisions"])
    _merge(made["params"], release.values)
    _merge(made["engines"], release.engines)
    # epochs that were not released stay in manifest.json
    epoch = release.draft.decisions["epoch"]
    trained = made["decisions"]["train"]
    trained["epochs"] = [record for record in trained["epochs"] if record["epoch"] == epoch]
    return {
        "schema_version": 1,
        "verifier": release.draft.verifier,
        "epoch": epoch,
        **made,
        "metrics": release.report,
        "checks": {
            name: {key: value for key, value in check.items() if key != "epochs"}
            for name, check in release.checks.items()
        },
    }


def _merge(into: Json, values: Json) -> None:
    """Two stages that used one parameter used one value."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            assert into.setdefault(key, value) == value, (key, into[key], value)


def write_release(folder: Path, draft: Path, release: Release) -> None:
    """Fill a new `folder`: the files of `draft` as hard links, three documents, the manifest, the digests of all."""
    folder.mkdir(parents=True)
    for file in sorted(draft.iterdir()):
        if file.name != NAME:
            link_or_copy(file, folder / file.name)
    made = provenance(release)
    write_json(folder / "serve_test.json", release.report)
    write_json(folder / "provenance.json", made)
    write_text(folder / "README.md", model_card(made))
    served = release.report["served"]
    counts = {name: release.report[name] for name in ("prompts", "new_tokens")} | {"rounds": served["rounds"]}
    write_manifest(
        folder,
        Manifest(
            "serve-test",
            release.values,
            {"draft": release.draft.as_dict(), "samples": release.samples.as_dict()},
            release.draft.verifier,
            release.engines,
            counts,
            {"epoch": release.draft.decisions["epoch"], "gates": release.report["gates"]},
        ),
    )
    write_checksums(folder)
