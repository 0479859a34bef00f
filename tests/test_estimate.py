"""`eagle3 estimate`: arithmetic that the presets' real checkpoints and the default run confirm."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3.__main__ import main
from eagle3.manifests import Manifest, write_manifest
from eagle3.params import read_params
from eagle3.plans.estimate import Need, estimate, shortages
from eagle3.problems import InvalidInput
from eagle3.sampling.samples import Sample, write_samples
from eagle3.stage_guard import ROOM_FOR_THE_RECORD
from eagle3.states.shard_scratch import LOW_WATER_BYTES
from tests.code_deps import ROOT
from tests.test_presets import FLAT, SIZES

VERIFIERS = ROOT / "tests/verifiers"


@pytest.mark.parametrize("name", FLAT)
def test_a_checkpoint_has_the_bytes_of_the_presets_real_one(name, tmp_path, monkeypatch):
    """One epoch of weights, as speculators' own model has them at full size; a file adds header, t2d, a wider map."""
    monkeypatch.chdir(tmp_path)
    params = read_params(ROOT / f"presets/{name}.yaml")
    once = replace(params, train=replace(params.train, epochs=1))
    train = estimate(once, VERIFIERS / f"{name}.json")[1]
    assert 0 <= SIZES[name] - train.disk < 600_000
    four = estimate(
        replace(once, train=replace(once.train, epochs=2, checkpoints_per_epoch=2)), VERIFIERS / f"{name}.json"
    )
    trained = (four[1].disk - train.disk) // 3
    assert 0 < trained < train.disk, "the frozen weights are stored once"
    assert f"{trained // 2:,} trained" in four[1].how
    assert "4 checkpoints" in four[1].how


def test_hidden_states_of_kimi_are_57344_bytes_a_token(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = read_params(ROOT / "presets/kimi-k2.5.yaml")
    extract = estimate(params, VERIFIERS / "kimi-k2.5.json")[0]
    most = (10_000 + 500 + 128) * 4096
    assert (extract.disk, extract.seconds) == (most * 57_344, None)
    write_samples_of(tmp_path, tokens=1000)
    (tmp_path / ".dvc/tmp/eagle3").mkdir(parents=True)
    run = {"stage": "extract", "seconds": 10.0, "completed": True, "tokens_per_second": 500.0}
    (tmp_path / ".dvc/tmp/eagle3/runs.jsonl").write_text(json.dumps(run) + "\n")
    extract = estimate(params, VERIFIERS / "kimi-k2.5.json")[0]
    assert "1,000 tokens in data/samples x 57,344 bytes" in extract.how
    beside = extract.disk - 57_344_000
    assert 5000 < beside < 6000, "ids, masks, offsets and names come on top"
    assert (extract.output, extract.seconds, extract.memory) == (extract.disk, 2.0, 1000 * 5 + 600)
    half = replace(params, extract=replace(params.extract, store_dtype="fp8"))
    assert 0 < estimate(half, VERIFIERS / "kimi-k2.5.json")[0].disk - 1000 * 4 * (7168 + 4) - beside < 300


def write_samples_of(folder: Path, tokens: int) -> None:
    ids = list(range(tokens))
    one = Sample("a", "a", 0, "train", ids, [index > 0 for index in ids], "stop")
    write_samples(folder / "data/samples", [one])
    write_manifest(folder / "data/samples", Manifest("sample", verifier={"sha256": "0" * 64}))


def test_too_little_disk_is_an_error_and_too_little_memory_a_warning(tmp_path, monkeypatch):
    """extract leaves a low-water mark, train none; all bytes are counted on the one disk."""
    monkeypatch.chdir(tmp_path)
    needs = [Need("extract", 1000, 0, None, "", 1000), Need("train", 1 << 31, 500, None, "", 1 << 31)]

    def found(free: int, memory: int) -> list[tuple[str, str]]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return [(problem.severity, problem.found) for problem in shortages(needs, memory)]

    enough = 1000 + (1 << 31) + ROOM_FOR_THE_RECORD
    assert not found(enough, 500)
    [(disk, said), (memory, _)] = found(enough - 1, 499)
    assert (disk, memory) == ("error", "warning")
    assert said == f"{enough - 1001:,} bytes free once extract has run"
    assert [said for _, said in found(1000 + LOW_WATER_BYTES - 1, 500)] == ["1.07 GB free"]
    needs[0] = replace(needs[0], freed=600)
    assert not found(enough - 600, 500)
    assert [said for _, said in found(enough - 601, 500)] == [f"{enough - 1001:,} bytes free once extract has run"]
    needs[0] = replace(needs[0], memory=501)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    [problem] = shortages(needs, 500)
    assert (problem.where, problem.expected) == ("extract", "501 bytes for all samples")
    assert "sample.max_train" in problem.fix


def test_the_command_says_both_and_fails_where_it_cannot_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "presets/kimi-k2.5.yaml").read_text().replace("10000", "10000000"))
    assert main(["estimate", "--verifier", str(VERIFIERS / "kimi-k2.5.json")]) == 1
    told = capsys.readouterr().out
    assert "ERROR no-space" in told
    assert "extract: writes" in told
    assert "never run here" in told


def test_a_verifier_that_is_not_here_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="eagle3 estimate --verifier"):
        estimate(read_params(ROOT / "presets/qwen3-8b.yaml"), None)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(InvalidInput, match="vocab_size"):
        estimate(read_params(ROOT / "presets/qwen3-8b.yaml"), tmp_path)


def test_layers_that_the_verifier_has_not_are_refused_as_extract_refuses_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = read_params(ROOT / "presets/qwen3-8b.yaml")
    deep = replace(params, extract=replace(params.extract, aux_layer_ids=[2, 18, 99]))
    with pytest.raises(InvalidInput, match=r"aux-layer-range: extract.aux_layer_ids\[2\]"):
        estimate(deep, VERIFIERS / "qwen3-8b.json")
