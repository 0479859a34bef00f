"""docs/recipes.md: its commands are the benchmark's and can be run, its first row is the recorded run."""

from __future__ import annotations

import pytest

from benchmarks import recipes
from benchmarks.recipes import PAGE, RECIPES, Recipe, longer, renewed, reports_of, row
from eagle3.acceptance import Acceptance
from eagle3.params import PARAMS_FILE
from eagle3.plans.overrides import override
from eagle3.yaml12 import read_yaml
from tests.code_deps import ROOT


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_changes_what_the_default_parameters_say(recipe: Recipe):
    default = read_yaml(ROOT / PARAMS_FILE)
    assert (override(default, list(recipe.changes)) != default) == bool(recipe.changes)


def test_the_page_is_that_of_the_benchmark_and_of_the_recorded_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = {recipe.name: "" for recipe in RECIPES} | {"default": row(RECIPES[0], reports_of(RECIPES[0], {}))}
    assert PAGE.read_text() == renewed(PAGE.read_text(), rows), "run: python -m benchmarks.recipes"


def test_a_recipe_that_never_ran_is_not_a_row_of_numbers():
    page = "<!-- commands: generated -->\n\n\n\n<!-- end -->\n<!-- table: generated -->\n\n\n\n<!-- end -->\n"
    made = renewed(page, {recipe.name: "" for recipe in RECIPES})
    assert f"| {RECIPES[-1].name} | not run |" in made
    assert f"`{RECIPES[-1].command}`" in made


def test_the_difference_of_two_drafts_is_over_all_their_rounds():
    one, other = Acceptance(10, (6, 3, 1)), Acceptance(5, (1, 0, 0))
    assert longer([(one, other), (other, one)]) == 0
    assert longer([(one, other), (one, other)]) == pytest.approx(2.0 - 1.2)
    assert longer([(one, other), (other, other)]) == pytest.approx(1 + 11 / 15 - 1.2)


def test_an_experiment_that_still_runs_gives_no_row(monkeypatch):
    """DVC 3.67 lists it under its name, with `workspace` where a finished one has its commit."""
    found = {"recipe-speculators": "a" * 40, "recipe-adamw-512": "workspace", "other": "b" * 40, "recipe-failed": None}
    revs = [{"revs": [{"name": name, "rev": rev, "data": rev and {"rev": rev}}]} for name, rev in found.items()]
    shown = [{"data": {}}, {"name": "main", "rev": "c" * 40, "data": {"rev": "c" * 40}, "experiments": revs}]
    monkeypatch.setattr(recipes, "exp_show", lambda: shown)
    assert recipes.experiments() == {"speculators": "a" * 40}
