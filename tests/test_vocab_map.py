"""The draft's vocabulary: what is chosen, in which order, and how the two tensors agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from eagle3.drafts.vocab_map import (
    FILE,
    choose_ids,
    count_answered,
    coverage,
    map_of,
    read_vocab_map,
    write_vocab_map,
)
from eagle3.manifests import Manifest, read_manifest, write_manifest
from eagle3.problems import InvalidInput
from eagle3.sampling import samples as samples_module
from eagle3.sampling.conversations import SPLITS
from eagle3.sampling.samples import SCHEMA, Sample, token_columns, write_samples

ROOT = Path(__file__).parent.parent
NONE = np.zeros(10, np.int64)


def counts(**by_id):
    values = np.zeros(10, np.int64)
    for name, count in by_id.items():
        values[int(name[1:])] = count
    return values


def columns(*samples):
    """As the samples' file gives them: (split, input_ids, loss_mask) of each."""
    splits, ids, masks = zip(*samples, strict=True)
    lengths = [len(one) for one in ids]
    return (
        np.array(splits, np.int32),
        np.array(lengths, np.int32),
        np.concatenate(ids).astype(np.int32),
        np.concatenate(masks).astype(bool),
    )


def test_only_supervised_tokens_are_counted_each_in_its_split():
    batches = [columns((1, [5, 6, 7, 7], [0, 0, 1, 1]), (0, [7, 1], [0, 1])), columns((1, [9, 7], [0, 1]))]
    counted = count_answered(batches, 3, 10)
    assert np.argwhere(counted).tolist() == [[0, 1], [1, 7]]
    assert (counted[0, 1], counted[1, 7], counted.dtype) == (1, 3, np.int64)


@pytest.mark.parametrize("token", [10, -1, 2**31 - 1])
@pytest.mark.parametrize("mask", [[0, 1], [1, 0]])
def test_a_token_outside_the_vocabulary_is_refused(token, mask):
    with pytest.raises(InvalidInput, match=f"the token id {token}\n"):
        count_answered([columns((0, [0, token], mask))], 3, 10)


def test_counting_the_file_by_columns_is_counting_its_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module, "READ_ROWS", 7)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(40):
        length = int(rng.integers(2, 30))
        mask = [False, *(rng.random(length - 1) < 0.5).tolist()]
        ids = rng.integers(0, 50, length).tolist()
        rows.append(Sample(f"{number:02d}", "c", 0, ["train", "val", "eval"][number % 3], ids, mask, "stop"))
    rows = [row for row in rows if any(row.loss_mask)]
    write_samples(tmp_path, rows)
    expected = np.zeros((3, 50), np.int64)
    for row in rows:
        for token, answered in zip(row.input_ids, row.loss_mask, strict=True):
            expected[SPLITS.index(row.split), token] += answered
    assert (count_answered(token_columns(tmp_path), 3, 50) == expected).all()


@pytest.mark.parametrize(
    "change",
    [
        *({"split": "test"}, {"loss_mask": [True]}, {"input_ids": None}, {"loss_mask": None}, {"split": None}),
        *({"input_ids": [0, None, 5]}, {"loss_mask": [False, None, True]}),
    ],
)
def test_a_file_that_is_not_ours_is_refused_before_it_is_counted(tmp_path, change):
    good = {**sample(0, "train", [5, 5]).as_row(), **change}
    pq.write_table(pa.Table.from_pylist([good], schema=SCHEMA), tmp_path / samples_module.FILE)
    with pytest.raises(InvalidInput, match="dvc repro sample"):
        list(token_columns(tmp_path))


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lower_id():
    assert choose_ids(counts(t9=5, t4=2, t3=2, t8=1), NONE, [], 3).tolist() == [3, 4, 9]


def test_val_breaks_no_tie_of_train():
    assert choose_ids(counts(t3=2, t4=2), counts(t4=9), [], 1).tolist() == [3]


def test_special_tokens_are_always_in():
    assert choose_ids(counts(t9=5, t8=4), NONE, [2, 6], 3).tolist() == [2, 6, 9]


def test_missing_tokens_are_padded_by_val_and_then_by_id():
    assert choose_ids(counts(t9=1), counts(t7=1, t5=3), [], 4).tolist() == [0, 5, 7, 9]


def test_the_whole_vocabulary_can_be_chosen():
    assert choose_ids(NONE, NONE, [], 10).tolist() == list(range(10))


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused():
    with pytest.raises(InvalidInput, match=r"(?s)vocab_map\.draft_vocab_size.*found: +11\n.*at most 10"):
        choose_ids(NONE, NONE, [], 11)


def test_a_draft_vocabulary_without_room_for_special_tokens_is_refused():
    with pytest.raises(InvalidInput, match="at least 3, the special tokens"):
        choose_ids(NONE, NONE, [1, 2, 3], 2)


def test_d2t_holds_offsets():
    d2t, t2d = map_of(np.array([0, 1, 2, 7, 50]), 60)
    assert d2t.tolist() == [0, 0, 0, 4, 46]
    assert np.flatnonzero(t2d).tolist() == [0, 1, 2, 7, 50]


def test_coverage_is_the_share_of_counted_tokens():
    assert coverage(counts(t1=3, t2=1), np.array([1])) == 0.75
    assert coverage(NONE, np.array([1])) == 1.0


def test_a_written_map_is_read_back(tmp_path):
    written = map_of(np.array([1, 4, 5]), 8)
    write_vocab_map(tmp_path, *written)
    for read, wrote in zip(read_vocab_map(tmp_path), written, strict=True):
        assert read.dtype == wrote.dtype
        assert read.tolist() == wrote.tolist()


@pytest.mark.parametrize(
    ("d2t", "t2d", "found"),
    [
        ([1, 4, 5], [False, True, False, False, True, True], "different ids"),
        ([1, 3, 2], [False, True, False, False, True, True], "different ids"),
        ([0], [True, True], "different ids"),
    ],
    ids=["absolute ids", "another order", "another size"],
)
def test_tensors_that_disagree_are_refused(tmp_path, d2t, t2d, found):
    save_file({"d2t": np.array(d2t), "t2d": np.array(t2d)}, tmp_path / FILE)
    with pytest.raises(InvalidInput, match=found):
        read_vocab_map(tmp_path)


def test_a_map_that_is_missing_or_broken_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="dvc repro vocab-map"):
        read_vocab_map(tmp_path)
    (tmp_path / FILE).write_bytes(b"no safetensors")
    with pytest.raises(InvalidInput, match="SafetensorError"):
        read_vocab_map(tmp_path)


@st.composite
def choices(draw):
    vocab_size = draw(st.integers(1, 40))
    count = st.lists(st.integers(0, 3), min_size=vocab_size, max_size=vocab_size)
    forced = draw(st.sets(st.integers(0, vocab_size - 1)))
    size = draw(st.integers(max(1, len(forced)), vocab_size))
    return np.array(draw(count)), np.array(draw(count)), forced, size


@given(choices())
def test_chosen_ids_are_sorted_unique_in_range_and_agree_with_the_map(choice):
    train, val, forced, size = choice
    ids = choose_ids(train, val, forced, size)
    d2t, t2d = map_of(ids, len(train))
    assert (np.arange(size) + d2t == np.flatnonzero(t2d)).all()
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert 0 <= ids[0] <= ids[-1] < len(train)
    assert forced <= set(ids.tolist())


@given(choices())
def test_no_token_left_out_is_more_frequent_than_one_chosen_freely(choice):
    train, val, forced, size = choice
    chosen = set(choose_ids(train, val, forced, size).tolist())
    free = [train[i] for i in chosen - forced]
    left_out = [train[i] for i in set(range(len(train))) - chosen]
    assert not free or not left_out or max(left_out) <= min(free)


@given(choices())
def test_the_choice_depends_on_the_counts_alone(choice):
    train, val, forced, size = choice
    again = choose_ids(train.copy(), val.copy(), sorted(forced, reverse=True), size)
    assert choose_ids(train, val, forced, size).tolist() == again.tolist()


def sample(number, split, answer):
    name = f"{split}{number}"
    return Sample(name, name, 0, split, [0, *answer], [False, *[True] * len(answer)], "stop")


@pytest.fixture
def repository(tmp_path):
    """What the stage reads. Answers: train 5, 5, 6; val 5, 9; eval 8, 8, 9, 5. Special: 1 and 99; the template's: 7.

    99 has no row.
    """
    for name in ("eagle3", "stages"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    folder = tmp_path / "data" / "samples"
    write_samples(folder, [sample(0, "train", [5, 5, 6]), sample(0, "val", [5, 9]), sample(0, "eval", [8, 8, 9, 5])])
    decisions = {"vocab_size": 10, "special_token_ids": [1, 99], "template_token_ids": [7]}
    write_manifest(folder, Manifest("sample", verifier={"sha256": "a" * 64}, decisions=decisions))
    return tmp_path


def run_stage(folder, draft_vocab_size):
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["vocab_map"]["draft_vocab_size"] = draft_vocab_size
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DVC_")}
    command = [sys.executable, "-m", "stages.vocab_map"]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


def test_the_stage_writes_the_map_and_what_it_covers(repository):
    done = run_stage(repository, 4)
    assert done.returncode == 0, done.stderr
    folder = repository / "data" / "vocab_map"
    manifest = read_manifest(folder, "vocab-map")
    assert np.flatnonzero(read_vocab_map(folder)[1]).tolist() == [1, 5, 6, 7]
    assert manifest.decisions == {
        "draft_vocab_size": 4,
        "vocab_size": 10,
        "coverage_train": 1.0,
        "coverage_val": 0.5,
        "coverage_eval": 0.25,
        "special_token_ids": [1],
        "template_token_ids": [7],
        "special_token_ids_without_a_row": [99],
    }
    tokens = {"train_tokens": 3, "val_tokens": 2, "eval_tokens": 4}
    assert manifest.counts == {**tokens, "distinct_train_tokens": 2, "never_answered": 2}
    assert manifest.inputs["samples"] == read_manifest(repository / "data" / "samples", "sample").as_dict()
    assert (
        done.stdout.splitlines()[-1]
        == "vocab-map: 4 of 10 tokens, which cover 100.00% of train, 25.00% of held-out eval"
    )


def test_the_stage_warns_where_held_out_answers_are_covered_badly(repository):
    """Padding takes val's own tokens, so val would say 50% where unseen text gets 25%."""
    warning, said = run_stage(repository, 3).stdout.splitlines()
    assert warning.startswith(
        "WARNING: the draft cannot propose 75.0% of the held-out (eval) answers' tokens; raise vocab_map"
    )
    assert said == "vocab-map: 3 of 10 tokens, which cover 66.67% of train, 25.00% of held-out eval"


def test_the_stage_writes_no_map_of_the_whole_vocabulary(repository):
    done = run_stage(repository, 10)
    assert [path.name for path in (repository / "data" / "vocab_map").iterdir()] == ["manifest.json"]
    everything = "(all: no map), which cover 100.00% of train, 100.00% of held-out eval"
    assert done.stdout == f"vocab-map: 10 of 10 tokens {everything}\n"


def test_the_stage_refuses_samples_without_an_answer_and_a_manifest_that_was_changed(repository):
    folder = repository / "data" / "samples"
    write_samples(folder, [sample(0, "eval", [5])])
    (folder / "manifest.json").unlink()
    decisions = {"vocab_size": 10, "special_token_ids": [1], "template_token_ids": []}
    write_manifest(folder, Manifest("sample", decisions=decisions))
    assert "ERROR no-answers: data/samples" in run_stage(repository, 4).stderr
    (folder / "manifest.json").unlink()
    write_manifest(folder, Manifest("sample", decisions=decisions | {"vocab_size": "ten"}))
    assert "manifest.json of stage sample: decisions.vocab_size" in run_stage(repository, 4).stderr
    assert not (repository / "data" / "vocab_map").exists()


def test_a_size_that_the_stage_refuses_leaves_the_earlier_map(repository):
    run_stage(repository, 4)
    refused = run_stage(repository, 11)
    assert refused.returncode == 1
    assert "ERROR draft-vocabulary: vocab_map.draft_vocab_size" in refused.stderr
    assert len(read_vocab_map(repository / "data" / "vocab_map")[0]) == 4
