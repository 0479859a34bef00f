"""`eagle3 plan`: what `dvc repro` would run, restore or skip, and why, before anything runs.

An output that a stage has yet to make is unknown. It is *certain to change* where its manifest will hold something new:
parameters and inputs with which no run is on record, or the manifest of an input that is certain to change. What
depends on an unknown output that may come out the same (configs, reports, anything after an edit of code alone) *may
run*: DVC compares it when it is there.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.dvc_records import (
    file_md5,
    folder_md5,
    is_cached,
    is_checked_out,
    leaves,
    listing,
    read_dvcignore,
    restorable,
    was_seen,
    was_seen_but_for,
)
from eagle3.formats.json_files import spelled
from eagle3.yaml12 import read_yaml

RUNS, RESTORED, UNCHANGED, MAY_RUN = "runs", "restored", "unchanged", "may run"
Json = dict[str, Any]

# Outputs without a manifest, and the parameters that each of them does hold.
WITHOUT_MANIFEST: dict[str, frozenset[str]] = {
    "data/configs": frozenset(),
    "reports/validate_config.json": frozenset(),
    "reports/simulate_weight_load.json": frozenset({"simulate_weight_load.engine_level"}),
}
# Parameters that a manifest leaves out, so that they rerun less (stages/flatten.py).
NOT_RECORDED = {"data/flattened": frozenset({"flatten.select"})}


@dataclass(frozen=True)
class Content:
    """What is known of a dependency or an output: its md5, or that it is yet to be made (None) and surely differs."""

    md5: str | None
    certain: bool = False


@dataclass(frozen=True)
class StagePlan:
    """state: one of the four words above. bytes_written: of its outputs when it ran last."""

    stage: str
    state: str
    why: tuple[str, ...]
    bytes_written: int = 0


@dataclass
class _Graph:
    """dvc.yaml and dvc.lock, and what became known of each output on the way."""

    stages: dict[str, Json]
    locks: dict[str, Json]
    params: Json
    outs: dict[str, Content] = field(default_factory=dict)


def plan(params: Json) -> list[StagePlan]:
    """The plan for these raw parameters (those of params.yaml, or changed ones), in the order in which DVC runs."""
    stages = read_yaml(Path("dvc.yaml"))["stages"]
    lock = read_yaml(Path("dvc.lock")) if Path("dvc.lock").is_file() else {}
    graph = _Graph(stages, lock.get("stages", {}), params)
    producers = {out: name for name, stage in stages.items() for out in out_paths(stage)}
    order = graphlib.TopologicalSorter(
        {
            name: {producers[made] for dep in stage["deps"] if (made := _made_by(dep, producers))}
            for name, stage in stages.items()
        }
    )
    return [_plan_stage(name, graph) for name in order.static_order()]


def out_paths(stage: Json) -> list[str]:
    rows = [row for kind in ("outs", "metrics", "plots") for row in stage.get(kind, [])]
    return [next(iter(row)) if isinstance(row, dict) else row for row in rows]


def _made_by(dep: str, outs: Iterable[str]) -> str | None:
    """The output that `dep` is, or lies in."""
    return next((out for out in outs if dep == out or dep.startswith(f"{out}/")), None)


def _plan_stage(name: str, graph: _Graph) -> StagePlan:
    stage, lock = graph.stages[name], graph.locks.get(name, {})
    contents = {dep: _content(dep, graph) for dep in stage["deps"]}
    declared = {key: _value(graph.params, key) for key in stage.get("params", [])}
    changed = _changed_params(declared, lock)
    before = {dep["path"]: dep["md5"] for dep in lock.get("deps", [])}
    files = [dep for dep, found in contents.items() if found.md5 and found.md5 != before.get(dep)]
    files += [dep for dep in before if dep not in contents]
    certain = [dep for dep, found in contents.items() if found.certain]
    unknown = [dep for dep, found in contents.items() if found.md5 is None and not found.certain]
    why = [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]
    why += [f"{dep} changed" for dep in files] + [f"{dep} changes" for dep in certain]
    if not lock:
        why = ["it has never run here"]
    elif lock["cmd"] != stage["cmd"]:
        why.append("its command changed")
    size = sum(out["size"] for out in lock.get("outs", []))
    assumed = _as_record(stage, {dep: found.md5 or before.get(dep) for dep, found in contents.items()}, declared)
    complete = not certain and all(dep["md5"] for dep in assumed["deps"])
    record = restorable(assumed) if complete else None
    if not why and not unknown:
        return _nothing_changed(name, lock, size, graph)
    if record and not unknown:
        graph.outs |= {out["path"]: Content(out["md5"]) for out in record["outs"]}
        return StagePlan(name, RESTORED, (*why, "the run cache has the result"))
    # another value of what is unknown may have been run before: DVC restores that
    if not why or record or (unknown and complete and was_seen_but_for(assumed, unknown)):
        _forget(stage, graph, frozenset(), None)
        condition = f"if {' or '.join(unknown)} change{'' if len(unknown) > 1 else 's'}"
        return StagePlan(name, MAY_RUN, (condition, *why), size)
    _forget(stage, graph, frozenset(changed), assumed if complete else {})
    return StagePlan(name, RUNS, tuple(why), size)


def _nothing_changed(name: str, lock: Json, size: int, graph: _Graph) -> StagePlan:
    graph.outs |= {out["path"]: Content(out["md5"]) for out in lock["outs"]}
    missing = [out["path"] for out in lock["outs"] if not is_checked_out(out)]
    if not missing:
        return StagePlan(name, UNCHANGED, ())
    lost = [out["path"] for out in lock["outs"] if not is_cached(out)]
    if not lost:
        return StagePlan(name, RESTORED, (f"{', '.join(missing)} is missing or altered, the cache has it",))
    graph.outs |= {path: Content(None) for path in lost}
    return StagePlan(name, RUNS, (f"{', '.join(lost)} is neither here nor in the cache (dvc pull {name}?)",), size)


def _forget(stage: Json, graph: _Graph, changed: frozenset[str], record: Json | None) -> None:
    """The outputs of a stage that will or may run are unknown; those that record something new will surely differ.

    record: what the stage will run on; None = it may not run, {} = an input is certain to change.
    """
    for out in out_paths(stage):
        if out in WITHOUT_MANIFEST:
            certain = bool(changed & WITHOUT_MANIFEST[out])
        elif record is None:
            certain = False
        else:
            certain = not record or not was_seen(record, NOT_RECORDED.get(out, frozenset()))
        graph.outs[out] = Content(None, certain)


def _content(dep: str, graph: _Graph) -> Content:
    out = _made_by(dep, graph.outs)
    if out is None:
        path = Path(dep)
        if path.is_dir():
            return Content(folder_md5(path, read_dvcignore()))
        return Content(file_md5(path) if path.is_file() else "absent")
    made = graph.outs[out]
    if dep == out or made.md5 is None:
        return made
    files = listing(made.md5) or {}
    return Content(files.get(dep.removeprefix(f"{out}/")))


def _as_record(stage: Json, deps: dict[str, str | None], declared: Json) -> Json:
    return {
        "cmd": stage["cmd"],
        "deps": [{"path": path, "md5": md5} for path, md5 in deps.items()],
        "params": {"params.yaml": declared} if declared else {},
        "outs": [{"path": path} for path in out_paths(stage)],
    }


def _value(params: Json, key: str) -> Any:
    for part in key.split("."):
        params = params[part]
    return params


def _changed_params(declared: Json, lock: Json) -> dict[str, tuple[str, str]]:
    """Dotted leaf -> its old and its new value, as JSON spells them."""
    before = lock.get("params", {}).get("params.yaml", {})
    old, new = dict(leaves(before)), dict(leaves(declared))
    differing = [key for key in {**old, **new} if key not in old or key not in new or old[key] != new[key]]
    return {key: tuple(spelled(side[key], 60) if key in side else "absent" for side in (old, new)) for key in differing}  # type: ignore[misc]
