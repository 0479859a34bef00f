"""`eagle3 plan` against the real `dvc repro`, for every leaf of params.yaml and for what else can change.

Light stages, DVC and Git are real; sample, extract, train and serve-test are stand-ins (tests/stand_ins.py).
"""

from __future__ import annotations

import json
import re
import shutil

import pytest

from eagle3.dvc_records import file_md5, folder_md5, is_cached, is_checked_out, read_dvcignore, run_cache_key
from eagle3.params import parse_params
from eagle3.plans.overrides import override
from eagle3.plans.plan import plan
from eagle3.problems import InvalidInput
from eagle3.yaml12 import read_yaml
from tests.reruns import ALL_STAGES, FIXED, VALUES, WITH_ENGINE, changed, changes, leaves, stages_of
from tests.stand_ins import command, light_repository

# Cut off where their inputs come out the same: the only stages that a changed parameter leaves open.
CUT_OFF = {"validate-config", "simulate-weight-load"}
# One leaf of every set of stages; all of them are in `make test-all`.
FEW = ["seed", "engines.speculators", "extract.samples_per_shard", "extract.aux_layer_ids"]
FEW += ["draft.head_dim", "train.epochs", "flatten.select", "flatten.drop_embed_tokens", "serve_test.num_prompts"]

pytestmark = pytest.mark.timeout(1200)


def repro(folder) -> list[str]:
    return re.findall(r"Running stage '([^']+)'", command(folder, "dvc", "repro").stdout)


def write_params(folder, raw) -> None:
    (folder / "params.yaml").write_text(json.dumps(raw, indent=1))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The pipeline run once; tests leave it with other parameters, which the next one overwrites."""
    folder = light_repository(tmp_path_factory.mktemp("repository"))
    assert sorted(repro(folder)) == sorted(ALL_STAGES)
    return folder


@pytest.fixture(scope="module")
def base(finished):
    return read_yaml(finished / "params.yaml")


@pytest.fixture
def here(finished, monkeypatch):
    monkeypatch.chdir(finished)
    return finished


def states(raw) -> dict[str, str]:
    return {one.stage: one.state for one in plan(raw)}


def test_the_table_has_a_row_for_every_leaf():
    assert set(leaves()) >= {*VALUES, *FIXED}
    assert all(stages_of(leaf) for leaf in leaves())


@pytest.mark.parametrize("leaf", [leaf for leaf in leaves() if leaf not in FIXED])
def test_the_other_value_of_a_leaf_is_another_and_valid(leaf, base):
    raw = changed(base, changes(leaf, base))
    parse_params(raw)
    assert raw != base


@pytest.mark.parametrize(
    "leaf",
    [
        leaf if leaf in FEW else pytest.param(leaf, marks=pytest.mark.long)
        for leaf in leaves()
        if leaf not in FIXED | WITH_ENGINE
    ],
)
def test_what_ran_is_in_the_plan_and_in_the_table(here, base, leaf):
    """The workspace has another leaf's variant: what that leaf alone had changed must be restored, not run."""
    raw = changed(base, changes(leaf, base))
    parse_params(raw)
    planned = states(raw)
    write_params(here, raw)
    ran = repro(here)
    assert sorted(ran) == sorted(stages_of(leaf))
    runs, may_run = ({stage for stage, state in planned.items() if state == word} for word in ("runs", "may run"))
    assert runs <= set(ran) <= runs | may_run
    assert may_run <= CUT_OFF | ({"serve-test"} if leaf == "simulate_weight_load.max_logit_steps" else set())
    assert set(states(raw).values()) == {"unchanged"}


def test_back_to_the_first_parameters_everything_is_restored(here, base):
    planned = states(base)
    write_params(here, base)
    assert repro(here) == []
    assert set(planned.values()) <= {"unchanged", "restored"}
    assert set(states(base).values()) == {"unchanged"}


@pytest.fixture
def copy(finished, base, tmp_path, monkeypatch):
    """A repository of its own with the first parameters, to be damaged."""
    folder = shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    write_params(folder, base)
    command(folder, "dvc", "repro", "-q")
    monkeypatch.chdir(folder)
    return folder


def test_an_edit_of_code_is_named_and_leaves_open_what_follows(copy, base):
    with open(copy / "stages/flatten.py", "a") as file:
        file.write("# a comment\n")
    rows = {one.stage: one for one in plan(base)}
    assert (rows["flatten"].state, rows["flatten"].why) == ("runs", ("stages/flatten.py changed",))
    assert {rows[name].state for name in ("validate-config", "simulate-weight-load", "serve-test")} == {"may run"}
    assert {rows[name].state for name in ("sample", "extract", "vocab-map", "train")} == {"unchanged"}
    assert repro(copy) == ["flatten"]


def test_lost_outputs_are_restored_or_said_to_be_lost(copy, base):
    shutil.rmtree(copy / "data/vocab_map")
    assert states(base)["vocab-map"] == "restored"
    shutil.rmtree(copy / ".dvc/cache/files")
    rows = {one.stage: one for one in plan(base)}
    assert rows["vocab-map"].state == "runs"
    assert "dvc pull vocab-map" in rows["vocab-map"].why[0]


def test_new_conversations_run_sample_and_the_notes_for_people_run_nothing(copy, base):
    for folder in ("conversations", "questions"):
        (copy / f"data/{folder}/README.md").write_text("words for people\n")
    assert set(states(base).values()) == {"unchanged"}
    (copy / "data/conversations/more.jsonl").write_text('{"messages": [{"role": "user", "content": "more"}]}\n')
    assert states(base)["sample"] == "runs"
    base = changed(base, {"sample.sources": [*base["sample"]["sources"], {"file": "more.jsonl"}]})
    write_params(copy, base)
    command(copy, "dvc", "add", "-q", "data/conversations/more.jsonl")
    command(copy, "git", "add", "data/conversations")
    assert repro(copy)[0] == "sample"
    assert set(states(base).values()) == {"unchanged"}, "DVC's own files beside the data are counted as DVC counts them"


def test_a_clone_that_never_ran_plans_everything(tmp_path, monkeypatch):
    folder = light_repository(tmp_path)
    monkeypatch.chdir(folder)
    rows = plan(read_yaml(folder / "params.yaml"))
    assert {one.state for one in rows} == {"runs"}
    assert rows[0].why == ("it has never run here",)


def test_digests_and_run_cache_are_dvcs_own(here):
    """Every record that DVC wrote: the name of its folder, the md5 of each dependency, its outputs."""
    lock = read_yaml(here / "dvc.lock")["stages"]
    records = [path for path in (here / ".dvc/cache/runs").rglob("*") if path.is_file()]
    assert len(records) >= len(lock)
    for path in records:
        record = read_yaml(path)
        assert run_cache_key({"params": {}, **record}) == path.parent.name
    for stage in lock.values():
        for dep in stage["deps"]:
            path = here / dep["path"]
            digest = folder_md5(path.relative_to(here), read_dvcignore()) if path.is_dir() else file_md5(path)
            assert digest == dep["md5"], dep["path"]
        assert all(is_cached(out) and is_checked_out(out) for out in stage["outs"])


def test_the_command_prints_a_table_or_json(here, base):
    """How long it takes: python -m benchmarks.no_op"""
    write_params(here, base)
    command(here, "dvc", "repro", "-q")
    told = command(here, "python", "-m", "eagle3", "plan", "-S", "train.learning_rate=1e-5", "-S", "seed=7").stdout
    assert "train.learning_rate: 0.001 -> 1e-05" in told
    assert "seed: 0 -> 7" in told
    assert "may run" in told
    rows = json.loads(command(here, "python", "-m", "eagle3", "plan", "--json").stdout)
    assert [row["state"] for row in rows] == ["unchanged"] * 8
    assert "nothing runs" in command(here, "python", "-m", "eagle3", "plan").stdout


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.lerning_rate=1", "did you mean train.learning_rate"),
        ("train.epochs", "a key of params.yaml, =, a value"),
        ("+train.new=1", "override"),
        ("~train.epochs", "did you mean train.epochs"),
        ("seed.x=1", "override"),
        ("train.epochs=many", "train.epochs"),
        ("train.epochs=[1", "yaml"),
        ("train.epochs=!!python/name:os.system", "yaml"),
        ("=", "override"),
        ("verifier.source=\x1b[2J", "yaml"),
    ],
)
def test_a_setting_that_is_none_is_refused_with_the_nearest_key(base, setting, expected):
    with pytest.raises(InvalidInput, match=re.escape(expected)):
        override(base, [setting])


def test_settings_are_read_as_dvc_reads_them(base):
    found = override(base, ["train.learning_rate=1e-5", "extract.aux_layer_ids=[1,2]", "flatten.select=last"])
    assert (found["train"]["learning_rate"], found["extract"]["aux_layer_ids"]) == (1e-5, [1, 2])
    assert found["flatten"]["select"] == "last"
    assert base["train"]["learning_rate"] == 1e-3, "the parameters given are not changed"


def test_outside_a_repository_it_is_a_wrong_call(tmp_path):
    (tmp_path / ".dvc").mkdir()
    shutil.copytree("eagle3", tmp_path / "eagle3")
    assert "no dvc.yaml" in command(tmp_path, "python", "-m", "eagle3", "plan", status=2).stderr
