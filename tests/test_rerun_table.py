"""What one change reruns: design's table, by real `dvc repro` with the real engines on a tiny verifier.

Three of its rows are experiments: in the workspace, in a folder of its own, queued.
"""

from __future__ import annotations

import json

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
# Those that are run by `dvc exp run`, and how.
EXPERIMENTS = {"flatten.select": "--temp", "serve_test.num_prompts": "--queue", "flatten.drop_embed_tokens": ""}

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


def experiment(folder, path, value) -> list[str]:
    """`dvc exp run` of one change, with the name of its key; the stages that ran, as the guard recorded them."""
    name, way = path.replace(".", "-").replace("_", "-"), EXPERIMENTS[path]
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-q", "--allow-empty", "-m", "as it is")
    run(folder, "dvc", "exp", "run", *filter(None, [way]), "-S", f"{path}={json.dumps(value)}", "-n", name)
    if way == "--queue":
        run(folder, "dvc", "exp", "run", "--run-all", "-j", "1")
    if way:
        assert run(folder, "git", "status", "--short").stdout == "", "it ran elsewhere"
        run(folder, "dvc", "exp", "apply", name)
        assert repro(folder) == [], "what an experiment made is what the workspace would make"
    rows = map(json.loads, (folder / ".dvc/tmp/eagle3/runs.jsonl").read_text().splitlines())
    return [row["stage"] for row in rows if row["experiment"] == name and row["completed"]]


def test_nothing_changed_runs_nothing(repository):
    assert repro(repository) == []


@pytest.mark.parametrize(("path", "value", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_a_change_runs_its_stages_and_the_way_back_runs_none(repository, path, value, expected):
    before = value_of(repository, path)
    if path in EXPERIMENTS:
        ran = experiment(repository, path, value)
    else:
        change(repository, path, value)
        ran = repro(repository)
    assert sorted(ran) == sorted(expected)
    change(repository, path, before)
    assert repro(repository) == [], "an earlier value is restored from the run cache"


def test_the_experiments_are_compared(repository):
    told = run(repository, "python", "-m", "eagle3", "compare").stdout
    for path in EXPERIMENTS:
        row = next(line for line in told.splitlines() if line.startswith(path.replace(".", "-").replace("_", "-")))
        assert f"{path}=" in row
        assert float(row.split()[1]) >= 1.0, "its acceptance length"


def test_a_comment_in_flatten_runs_flatten_only(repository):
    with open(repository / "stages/flatten.py", "a") as file:
        file.write("# a comment\n")
    assert repro(repository) == ["flatten"]


def test_nothing_of_this_machine_is_in_what_dvc_hashes(repository):
    found = run(repository, "grep", "-rlF", str(repository), "data", "reports", "dvc.lock", check=False)
    assert found.stdout == ""
