"""The closing table: every number of the pipeline from its files; a missing part names the stage that makes it."""

from __future__ import annotations

import json

import pytest

from eagle3.acceptance import Acceptance
from eagle3.closing_table import closing_table
from eagle3.manifests import Manifest, write_manifest

LENGTH = {**Acceptance(1000, (460, 240, 130)).as_dict(), "interval_95": [1.76, 1.91]}
REPORT = {
    "prompts": 72,
    "new_tokens": 6400,
    "num_speculative_tokens": 3,
    "served": LENGTH,
    "served_without_loops": LENGTH,
    "walk": LENGTH,
    "against_walk": {"rounds": 900, "acceptance_length": 1.8344, "walk_acceptance_length": 1.8311},
    "questions": {
        "by_file": {
            "mt_bench.jsonl": {"acceptance_length": 1.5, "interval_95": [1.4, 1.6], "turns": 20, "speed_up": 1.2}
        }
    },
    "greedy": {"answers": 75, "equal": 74, "ties": 1, "faults": 0},
    "speed": {
        "tokens_per_second_with_draft": 36.3,
        "tokens_per_second_without_draft": 25.1,
        "speed_up": 1.446,
        "speed_up_interval_95": [1.402, 1.497],
    },
}
CHECK = {"epochs": {"epoch_0": {}, "epoch_1": {}}, "errors": 0, "warnings": 2}
EXPECTED = """\
samples               1,200 train, 64 val, 72 eval (7,917 rows read, 6,581 skipped, 0 failed)
tokens                150,000, of them 120,000 said by the verifier
draft vocabulary      8,192 of 49,152 tokens; covers 98.70% of train and 97.90% of eval tokens

checkpoint  train loss  val loss  train accuracy     val accuracy       walk val k=3  walk eval
0           3.1000      2.9000    0.500 0.300 0.200  0.480 0.290 0.190  1.830         1.830
1*          2.1000      2.2000    0.600 0.400 0.300  0.580 0.390 0.290  1.830         1.830
(accuracy by unrolled step, inside the draft vocabulary; * longest walk on val)

checkpoints validated 2 (configs: 0 errors, 2 warnings; weights: 0 errors, 2 warnings)
acceptance length     1.830 (95%: 1.760 to 1.910), 1,000 rounds; 1.830 without loops
  predicted by walk   1.830; over the same 900 rounds 1.831 predicted and 1.834 served
acceptance rate       0.460 0.240 0.130 by position, 3 tokens drafted a round
  on mt_bench.jsonl   1.500 (95%: 1.400 to 1.600), 20 turns; 1.20 times as fast
greedy answers        74 of 75 equal with and without the draft, 1 near-ties
tokens/s              36.3 with the draft, 25.1 without: 1.45 times (95%: 1.40 to 1.50)

stage                 time          peak memory
sample                2:31          2.3 GiB
extract               not run here
vocab-map             not run here
train                 not run here
flatten               9.9 s         0.1 GiB
validate-config       not run here
simulate-weight-load  not run here
serve-test            not run here
all                   2:40

checkpoint            data/release (epoch_1; every gate passed; how to serve it: README.md there)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for name in ("samples", "vocab_map", "checkpoints", "release"):
        (tmp_path / "data" / name).mkdir(parents=True)
    counts = {"read": 7917, "skipped": 6581, "failed": 0, "train": 1200, "val": 64, "eval": 72}
    counts |= {"tokens": 150000, "supervised_tokens": 120000}
    write_manifest(tmp_path / "data/samples", Manifest("sample", counts=counts))
    coverage = {"coverage_train": 0.987, "coverage_eval": 0.979}
    sizes = {"draft_vocab_size": 8192, "vocab_size": 49152}
    write_manifest(tmp_path / "data/vocab_map", Manifest("vocab-map", decisions={**sizes, **coverage}))
    table = {split: {"3": LENGTH} for split in ("val", "eval")}
    epochs = [
        {"epoch": 0, "train_loss": 3.1, "val_loss": 2.9, "walk": table}
        | {"train_accuracy": [0.5, 0.3, 0.2], "val_accuracy": [0.48, 0.29, 0.19]},
        {"epoch": 1, "train_loss": 2.1, "val_loss": 2.2, "walk": table}
        | {"train_accuracy": [0.6, 0.4, 0.3], "val_accuracy": [0.58, 0.39, 0.29]},
    ]
    decisions = {"best_epoch": 1, "epochs": epochs}
    write_manifest(tmp_path / "data/checkpoints", Manifest("train", {"train": {"ttt_steps": 3}}, decisions=decisions))
    write_manifest(tmp_path / "data/release", Manifest("serve-test", decisions={"epoch": 1}))
    (tmp_path / "reports").mkdir()
    reports = {"validate_config": CHECK, "simulate_weight_load": CHECK, "serve_test": REPORT}
    for name, report in reports.items():
        (tmp_path / f"reports/{name}.json").write_text(json.dumps(report))
    rows = [
        {"stage": "sample", "seconds": 9.0, "peak_memory_bytes": 1 << 30, "completed": True},
        {"stage": "sample", "seconds": 151.0, "peak_memory_bytes": 2.3 * 2**30, "completed": True},
        {"stage": "sample", "seconds": 1.0, "peak_memory_bytes": 1, "completed": False},
        {"stage": "flatten", "seconds": 9.9, "peak_memory_bytes": 1e8, "completed": True},
    ]
    (tmp_path / ".dvc/tmp/eagle3").mkdir(parents=True)
    log = "".join(json.dumps(row) + "\n" for row in rows) + '{"stage": "tr'
    (tmp_path / ".dvc/tmp/eagle3/runs.jsonl").write_text(log)
    return tmp_path


def test_the_whole_table_as_it_is_printed(folder):
    assert closing_table() + "\n" == EXPECTED
    assert max(map(len, closing_table().splitlines())) <= 100


def test_a_speed_up_without_an_interval_stands_alone(folder):
    alone = {**REPORT, "speed": {**REPORT["speed"], "speed_up_interval_95": None}}
    (folder / "reports/serve_test.json").write_text(json.dumps(alone))
    assert "tokens/s              36.3 with the draft, 25.1 without: 1.45 times" in closing_table().splitlines()


def test_a_missing_part_says_what_makes_it(folder):
    (folder / "data/checkpoints/manifest.json").unlink()
    (folder / "reports/serve_test.json").unlink()
    lines = closing_table().splitlines()
    assert "data/checkpoints/manifest.json no such file; dvc repro train" in lines
    assert "reports/serve_test.json not there yet; dvc repro serve-test" in lines
    assert lines[0].startswith("samples ")


def test_a_part_that_other_code_made_or_somebody_edited_is_said_and_the_rest_is_shown(folder):
    earlier = {name: value for name, value in REPORT.items() if name != "questions"}
    (folder / "reports/serve_test.json").write_text(json.dumps(earlier))
    (folder / "reports/validate_config.json").write_text("[]")
    with open(folder / ".dvc/tmp/eagle3/runs.jsonl", "a") as log:
        log.write('\n{"x": 1}\n[]\n')
    lines = closing_table().splitlines()
    assert "reports/serve_test.json of another form (KeyError: 'questions'); dvc repro" in lines
    assert [line for line in lines if line.startswith("reports  ")]
    assert lines[-1] == EXPECTED.splitlines()[-1]
    assert "sample                2:31          2.3 GiB" in lines


def test_an_empty_repository_is_a_table_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert "dvc repro sample" in closing_table()
    assert max(map(len, closing_table().splitlines())) <= 100
