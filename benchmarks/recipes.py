"""The recipes of docs/recipes.md, run as DVC experiments; the page's list and table are written from what came of them.

    python -m benchmarks.recipes [--run]

A number comes from the reports in this folder (the default parameters) or from the experiment `recipe-NAME` (the
others). A recipe with neither keeps its row; --run runs it first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dvc.api

from eagle3.acceptance import Acceptance, acceptance_of, bootstrap, walk
from eagle3.drafts.walk_files import parse_walks, read_walks
from eagle3.params import PARAMS_FILE
from eagle3.plans.compare import exp_show, revisions
from eagle3.yaml12 import read_yaml

PAGE = Path("docs/recipes.md")
REPORTS = ("reports/train.json", "reports/serve_test.json")
WALKS = "data/draft/walk_eval.json"
DRAFTED = 3
HEAD = (
    "| recipe | walk on val | walk on eval | default more by | val loss | val accuracy | served | 95% | by position |",
    "|---|---|---|---|---|---|---|---|---|",
)
Json = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """What differs from params.yaml, as `-S` takes it, and why."""

    name: str
    why: str
    changes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        if not self.changes:
            return "dvc repro"
        return f"dvc exp run --temp -n recipe-{self.name} {' '.join(f'-S {change}' for change in self.changes)}"


ADAMW = ("train.optimizer=adamw", "train.scheduler=cosine", "train.warmup_ratio=0.02")
LIBRARY = ("train.muon_learning_rate=1.0e-3", "draft.sliding_window=2048")
# Gates of a release that a recipe for comparison need not pass.
NO_GATES = (
    *("serve_test.min_acceptance_length=1.0", "serve_test.min_position_0_rate=0.0"),
    "serve_test.max_gap_to_walk=3.0",
)
RECIPES = (
    Recipe("default", "Muon in rows of 1,024 tokens, at four times the library's rate for Muon."),
    Recipe("speculators", "speculators' defaults (below), in rows of 1,024.", LIBRARY),
    Recipe(
        "speculators-8192",
        "its default row too: 12 steps a pass.",
        ("train.total_seq_len=8192", *LIBRARY, *NO_GATES),
    ),
    Recipe("adamw-512", "AdamW, twice the steps.", ("train.total_seq_len=512", *ADAMW)),
    Recipe(
        "no-norm-before-residual",
        "the default with the un-normed residual, the only kind that SGLang serves.",
        ("draft.norm_before_residual=false",),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="first run the recipes that have no experiment here")
    if parser.parse_args().run:
        there = experiments()
        for recipe in RECIPES:
            if recipe.changes and recipe.name not in there:
                subprocess.run([sys.executable, "-m", *recipe.command.split()], check=True)
    there = experiments()
    rows = {recipe.name: row(recipe, reports_of(recipe, there), gain(there.get(recipe.name, ""))) for recipe in RECIPES}
    PAGE.write_text(renewed(PAGE.read_text(), rows))
    return 0


def experiments() -> dict[str, str]:
    """Recipe and commit of each finished experiment in this repository; one that runs has `workspace` for a commit."""
    named = {name: data.get("rev") for name, data in revisions(exp_show()) if name.startswith("recipe-")}
    return {name.removeprefix("recipe-"): rev for name, rev in named.items() if rev not in (None, "workspace")}


def reports_of(recipe: Recipe, there: dict[str, str]) -> list[Json]:
    """What train and serve-test said; nothing where neither ran."""
    if not recipe.changes:
        return [json.loads(Path(name).read_bytes()) for name in REPORTS] if is_recorded() else []
    if recipe.name not in there:
        return []
    shown = [["git", "show", f"{there[recipe.name]}:{name}"] for name in REPORTS]
    reports = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for command in shown]
    if reports[1]["walk"]["acceptance_length"] != reports[0]["walk_acceptance_length_eval_3_tokens"]:
        sys.exit(f"recipe-{recipe.name}: serve-test did not run, its report is of another draft; run: {recipe.command}")
    return reports


def is_recorded() -> bool:
    """Whether the reports in this folder are of a draft trained by params.yaml, not by other parameters."""
    recorded, asked = read_yaml(Path("dvc.lock"))["stages"]["train"]["params"]["params.yaml"], read_yaml(PARAMS_FILE)
    return all(recorded[section] == asked[section] for section in ("draft", "train"))


def gain(rev: str) -> str:
    """How much longer the default's walk over eval is than that of the draft at `rev`, with its 95% interval.

    Over the same answers, drawn together: both drafts meet the same easy and hard ones.
    """
    if not rev:
        return ""
    default, other = read_walks(Path(WALKS).parent), parse_walks(dvc.api.read(WALKS, rev=rev))
    pairs = [(_walk(right), _walk(other[name])) for name, right in default.items() if name in other]
    low, high = bootstrap(pairs, longer)
    return f"{longer(pairs):.3f} ({low:.3f} to {high:.3f})"


def _walk(right: Sequence[int]) -> Acceptance:
    return acceptance_of(walk(right, 0, DRAFTED), DRAFTED)


def longer(pairs: Sequence[tuple[Acceptance, Acceptance]]) -> float:
    one, other = (sum(halves, Acceptance(0, (0,) * DRAFTED)).length for halves in zip(*pairs, strict=True))
    return one - other


def row(recipe: Recipe, reports: list[Json], more: str = "") -> str:
    """One line of the table; empty where there are no reports."""
    if not reports:
        return ""
    train, served = reports[0], reports[1]["served"]
    accuracies = " ".join(f"{train[f'val_accuracy_inside_draft_vocabulary_step_{step}']:.3f}" for step in range(3))
    walks = [f"{train[f'walk_acceptance_length_{split}_3_tokens']:.3f}" for split in ("val", "eval")]
    low, high = served["interval_95"]
    rates = " ".join(f"{rate:.3f}" for rate in served["rate_per_position"])
    cells = [recipe.name, *walks, more, f"{train['val_loss']:.3f}", accuracies]
    cells += [f"{served['acceptance_length']:.3f}", f"{low:.3f} to {high:.3f}", rates]
    return f"| {' | '.join(cells)} |"


def commands() -> str:
    return "\n".join(f"- **{recipe.name}**: {recipe.why}\n  `{recipe.command}`" for recipe in RECIPES)


def renewed(page: str, rows: dict[str, str]) -> str:
    """The page with both generated parts made anew; an empty row stays as it was."""
    old = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    lines = [rows[recipe.name] or old.get(recipe.name, f"| {recipe.name} | not run |") for recipe in RECIPES]
    table = "\n".join([*HEAD, *lines])
    return _between(_between(page, "commands", commands()), "table", table)


def _between(page: str, name: str, made: str) -> str:
    """The page with `made` between the markers of this name."""
    start, end = f"<!-- {name}: generated -->\n\n", "\n\n<!-- end -->"
    before, rest = page.split(start)
    return f"{before}{start}{made}{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    sys.exit(main())
