"""What one change reruns: design's table, by real `dvc repro` with the real engines on a tiny verifier."""

from __future__ import annotations

import pytest

from eagle3.yaml12 import read_yaml
from tests.repository import make_repository, repro, run, set_params
from tests.reruns import ALL_STAGES as ALL
from tests.reruns import DATA, FROM_TRAIN, WEIGHTS

# One row for every set of stages of tests/reruns.py: what changes, its new value, the stages that run.
TABLE: list[tuple[str, object, list[str]]] = [
    ("draft.head_dim", 64, FROM_TRAIN),
    ("extract.aux_layer_ids", [1, 2, 4], ["extract", *FROM_TRAIN]),
    ("vocab_map.draft_vocab_size", 96, ["vocab-map", *FROM_TRAIN]),
    ("train.learning_rate", 0.0005, ["train", "flatten", "simulate-weight-load", "serve-test"]),
    ("flatten.select", 0, ["flatten", "serve-test"]),
    ("flatten.drop_embed_tokens", True, ["flatten", "simulate-weight-load", "serve-test"]),
    ("serve_test.num_prompts", 2, ["serve-test"]),
    ("sample.max_train", 20, DATA),
    ("extract.samples_per_shard", 6, ["extract", *WEIGHTS]),
    ("simulate_weight_load.engine_level", "off", ["simulate-weight-load", "serve-test"]),
]

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = make_repository(tmp_path_factory.mktemp("repository"))
    assert sorted(repro(folder)) == sorted(ALL)
    return folder


def change(folder, path, value):
    section, key = path.split(".")
    set_params(folder, {section: {key: value}})


def value_of(folder, path):
    section, key = path.split(".")
    return read_yaml(folder / "params.yaml")[section][key]


def test_nothing_changed_runs_nothing(repository):
    assert repro(repository) == []


@pytest.mark.parametrize(("path", "value", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_a_change_runs_its_stages_and_the_way_back_runs_none(repository, path, value, expected):
    before = value_of(repository, path)
    change(repository, path, value)
    assert sorted(repro(repository)) == sorted(expected)
    change(repository, path, before)
    assert repro(repository) == [], "an earlier value is restored from the run cache"


def test_a_comment_in_flatten_runs_flatten_only(repository):
    with open(repository / "stages/flatten.py", "a") as file:
        file.write("# a comment\n")
    assert repro(repository) == ["flatten"]


def test_nothing_of_this_machine_is_in_what_dvc_hashes(repository):
    found = run(repository, "grep", "-rlF", str(repository), "data", "reports", "dvc.lock", check=False)
    assert found.stdout == ""
