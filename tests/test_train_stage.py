from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.manifests import read_manifest, verify_files
from eagle3.params import VerifierParams
from eagle3.verifiers.verifier import resolve_verifier
from tests.repository import environment, make_repository, set_params
from tests.training_inputs import AUX_LAYER_IDS, write_hidden_states, write_vocab_map

pytestmark = pytest.mark.engine
SMALL_ROWS = {"train": {"epochs": 12, "total_seq_len": 64}}


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages.train"],
        cwd=folder,
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A repository whose hidden states and vocabulary map are there."""
    folder = make_repository(tmp_path_factory.mktemp("repository"))
    verifier = resolve_verifier(VerifierParams(str(folder / "verifier"), None, None, False))
    identity = {**verifier.identity(), "source": "verifier"}
    write_hidden_states(folder / "data/hidden_states", verifier.path, identity, {"train": 16, "val": 4, "eval": 5})
    write_vocab_map(folder / "data/vocab_map", 128, 320)
    (folder / "machine.yaml").write_text("cpu_threads: 1\n")  # tiny matrices gain nothing from a second one
    return folder


@pytest.fixture(scope="module")
def trained(prepared) -> tuple[Path, subprocess.CompletedProcess[str]]:
    return prepared, train(prepared)


@pytest.fixture
def untrained(prepared, tmp_path) -> Path:
    """A copy of its own without checkpoints."""
    folder = tmp_path / "repository"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("checkpoints", "tmp"))
    return folder


def test_the_stage_ends_with_one_line_and_a_complete_manifest(trained):
    folder, done = trained
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("train: 2 checkpoints, best epoch_")
    manifest = read_manifest(folder / "data/checkpoints", "train")
    verify_files(folder / "data/checkpoints", manifest)
    assert manifest.decisions["draft"]["aux_layer_ids"] == AUX_LAYER_IDS
    assert manifest.decisions["draft"]["head_dim"] == 32
    assert manifest.counts["read"] == 25
    assert manifest.inputs["hidden_states"] == read_manifest(folder / "data/hidden_states", "extract").as_dict()
    assert {name.split("/")[0] for name in manifest.files} == {"epoch_0", "epoch_1", "verifier_config.json"}


def test_every_epoch_is_walked_on_val_and_eval_and_val_chooses(trained):
    folder, _ = trained
    decisions = read_manifest(folder / "data/checkpoints", "train").decisions
    lengths = []
    for number, epoch in enumerate(decisions["epochs"]):
        assert epoch["epoch"] == number
        for table in ("walk", "walk_without_loops"):
            assert list(epoch[table]) == ["eval", "val"]
            assert sorted(epoch[table]["val"]) == [str(k) for k in range(1, 9)]
        lengths.append(epoch["walk"]["val"]["3"]["acceptance_length"])
    assert lengths[decisions["best_epoch"]] == max(lengths)


def test_reports_are_numbers_and_tables(trained):
    folder, _ = trained
    report = json.loads((folder / "reports/train.json").read_text())
    assert all(isinstance(value, (int, float)) for value in report.values())
    assert "val_accuracy_inside_draft_vocabulary_step_0" in report
    assert (folder / "reports/loss.csv").read_text().splitlines()[0] == "checkpoint,train,val"
    assert len((folder / "reports/accuracy.csv").read_text().splitlines()) == 1 + 2 * 3


def test_nothing_in_the_outputs_depends_on_the_machine(trained):
    folder, _ = trained
    for path in (folder / "data/checkpoints").rglob("*.json"):
        assert str(folder) not in path.read_text(), path


def test_figures_go_to_the_run_log_alone(trained):
    folder, _ = trained
    row = json.loads((folder / ".dvc/tmp/eagle3/runs.jsonl").read_text().splitlines()[-1])
    assert row["stage"] == "train"
    assert row["tokens_per_second"] > 0
    assert row["token_passes"] > 0


def test_a_changed_manifest_is_refused(untrained):
    path = untrained / "data/hidden_states/manifest.json"
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, "decisions": made["decisions"] | {"aux_layer_ids": "all"}}))
    done = train(untrained)
    assert done.returncode == 1
    assert "ERROR broken-manifest: manifest.json of stage extract: decisions.aux_layer_ids" in done.stderr


def test_a_second_run_gives_the_same_bytes(trained, untrained):
    folder, _ = trained
    assert train(untrained).returncode == 0
    first = read_manifest(folder / "data/checkpoints", "train")
    assert read_manifest(untrained / "data/checkpoints", "train") == first


def test_a_run_killed_inside_an_epoch_goes_on_to_the_bytes_of_an_uninterrupted_one(untrained):
    set_params(untrained, SMALL_ROWS)
    (untrained / "machine.yaml").write_text("cpu_threads: 1\nsave_state_minutes: 0\n")
    whole = untrained.with_name("whole")
    shutil.copytree(untrained, whole)
    killed_after_a_row_of_the_second_epoch(untrained)
    assert not (untrained / "data/checkpoints").exists()
    done = train(untrained)
    assert done.returncode == 0, done.stderr
    assert re.search(r"train: goes on with row \d+ of epoch [1-9]", done.stderr), done.stderr
    assert train(whole).returncode == 0
    manifests = [read_manifest(path / "data/checkpoints", "train") for path in (untrained, whole)]
    assert manifests[0] == manifests[1]
    assert len(manifests[0].decisions["epochs"]) == 12
    verify_files(untrained / "data/checkpoints", manifests[0])
    for name in ("train.json", "loss.csv", "accuracy.csv"):
        assert (untrained / "reports" / name).read_bytes() == (whole / "reports" / name).read_bytes()
    [scratch] = [path for path in (untrained / ".dvc/tmp/eagle3/train").iterdir() if path.is_dir()]
    assert not list(scratch.iterdir()), "what only a killed run needs is removed"


def killed_after_a_row_of_the_second_epoch(folder: Path, number: int = signal.SIGKILL) -> None:
    """Sent as soon as the state on disk says so; never answered with success."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.train"], cwd=folder, env=environment(), stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        for path in folder.glob(".dvc/tmp/eagle3/train/*/training/state.pt"):
            state = torch.load(path, weights_only=True)
            if state["epoch"] >= 1 and state["step"]:
                process.send_signal(number)
                assert process.wait() != 0
                return
        time.sleep(0.005)
    raise AssertionError("it ended before it could be killed")


def test_an_existing_draft_is_measured_before_the_first_step(trained, untrained):
    folder, _ = trained
    shutil.copytree(folder / "data/checkpoints/epoch_1", untrained / "existing")
    asked = {"epochs": 1, "checkpoints_per_epoch": 2, "total_seq_len": 64, "warm_start": "existing"}
    set_params(untrained, {"train": asked})
    refused = train(untrained)
    assert refused.returncode == 1
    [digest] = re.findall(r"warm_start_sha256=([0-9a-f]{64})", refused.stderr)
    set_params(untrained, {"train": {"warm_start_sha256": digest}})
    done = train(untrained)
    assert done.returncode == 0, done.stderr
    assert "warm start, before the first step: " in done.stderr
    decisions = read_manifest(untrained / "data/checkpoints", "train").decisions
    assert [epoch["epoch"] for epoch in decisions["epochs"]] == [0, 1], "two checkpoints in one pass"
    start, before = decisions["warm_start"], read_manifest(folder / "data/checkpoints", "train").decisions["epochs"][1]
    assert start["sha256"] == digest
    lengths = [record["walk"]["val"]["3"]["acceptance_length"] for record in (start, before)]
    assert lengths[0] == pytest.approx(lengths[1], abs=0.1), "the draft does what it did when it was saved"
    report = json.loads((untrained / "reports/train.json").read_text())
    assert report["warm_start_walk_acceptance_length_val_3_tokens"] == lengths[0]


@pytest.mark.long
@pytest.mark.parametrize("shards", ["false", "true"])
def test_two_processes_are_ended_together_and_go_on_together(untrained, shards):
    set_params(untrained, SMALL_ROWS)
    machine = f"cpu_threads: 2\nsave_state_minutes: 0\ntrain_processes: 2\ntrain_shards: {shards}\n"
    (untrained / "machine.yaml").write_text(machine)
    killed_after_a_row_of_the_second_epoch(untrained, signal.SIGTERM)
    done = train(untrained)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("train: goes on with row ") == 1, "one process speaks"
    manifest = read_manifest(untrained / "data/checkpoints", "train")
    training = manifest.decisions["training"]
    assert (training["processes"], str(training["shards"]).lower()) == (2, shards)
    verify_files(untrained / "data/checkpoints", manifest)
    [shard] = untrained.glob("data/checkpoints/epoch_11/model-trained.safetensors")
    assert "norm.weight" in load_file(shard), "whole tensors, as in any other run"


def test_a_map_of_other_samples_is_refused(untrained):
    shutil.rmtree(untrained / "data/vocab_map")
    write_vocab_map(untrained / "data/vocab_map", 128, 320, samples={"other": 1})
    done = train(untrained)
    assert done.returncode == 1
    assert "other-samples" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (untrained / "data/checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupted_run_fails_and_publishes_nothing(untrained, number):
    set_params(untrained, {"train": {"epochs": 1000}})
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.train"], cwd=untrained, env=environment(), text=True, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    while "epoch_0:" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    start = time.monotonic()
    process.stderr.read()
    assert process.wait() != 0
    assert time.monotonic() - start < 20
    assert not (untrained / "data/checkpoints").exists()
    set_params(untrained, {"train": {"epochs": 2}})
