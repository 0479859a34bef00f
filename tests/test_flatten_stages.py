"""flatten, validate-config and simulate-weight-load as stages: on literal checkpoints, and on a real one with vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3.checks.engine_load import EngineLoad
from eagle3.checks.simulated_load import SimulatedLoad
from eagle3.drafts.walk_files import write_walks
from eagle3.formats.checkpoint_files import PROBE
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.problems import InvalidInput
from eagle3.stage_guard import Stage
from stages import flatten, simulate_weight_load, validate_config
from tests.drafts import NESTED, VERIFIER, write_nested
from tests.repository import environment, make_repository, set_params


def write_checkpoints(folder: Path, best: int = 0, **config) -> None:
    for epoch in range(3):
        write_walks(write_nested(folder / f"epoch_{epoch}", {**NESTED, **config}, fill=epoch + 1), {})
    (folder / "verifier_config.json").write_text(json.dumps(VERIFIER))
    write_manifest(folder, Manifest("train", verifier={"source": "org/model"}, decisions={"best_epoch": best}))


def run(module, **params) -> None:
    """One run of a stage's body in the current folder, its outputs published, without the guard around it."""
    records = {section: SimpleNamespace(**values) for section, values in params.items()}
    stage = Stage("test", SimpleNamespace(**records), params, Path("scratch").absolute(), Path("shared").absolute())
    module.run(stage)
    stage.publish()


def flattened(select="best", drop_embed_tokens=False) -> None:
    run(flatten, flatten={"select": select, "drop_embed_tokens": drop_embed_tokens})


def simulated(level="off") -> dict:
    run(
        simulate_weight_load,
        simulate_weight_load={"engine_level": level, "max_logit_steps": 8.0},
        engines={"vllm": "0.32.0"},
    )
    return json.loads(Path("reports/simulate_weight_load.json").read_text())


def tree(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path / "data/checkpoints")
    return tmp_path


def test_every_epoch_is_flattened_and_one_is_the_draft(work, capsys):
    flattened("last")
    assert capsys.readouterr().out == "flatten: 3 checkpoints, epoch_2 is data/draft\n"
    manifest = read_manifest(Path("data/flattened"), "flatten")
    verify_files(Path("data/flattened"), manifest)
    assert manifest.counts == {"epochs": 3}
    assert manifest.inputs["checkpoints"]["decisions"] == {"best_epoch": 0}
    draft = read_manifest(Path("data/draft"), "flatten")
    verify_files(Path("data/draft"), draft)
    assert draft.decisions == {"epoch": 2}
    assert sorted(path.name for path in Path("data/draft").iterdir()) == [
        "config.json",
        "config_speculators.json",
        "manifest.json",
        "model-frozen.safetensors",
        "model-trained.safetensors",
        "model.safetensors.index.json",
        "walk_eval.json",
    ]
    assert sorted(tree("data/configs")) == [
        *(f"data/configs/epoch_{epoch}/config.json" for epoch in range(3)),
        "data/configs/verifier.json",
    ]
    assert Path("data/configs/verifier.json").read_text() == json.dumps(VERIFIER)


@pytest.mark.parametrize(("select", "epoch"), [("best", 1), ("last", 2), (0, 0)])
def test_the_selection(work, select, epoch):
    shutil.rmtree("data/checkpoints")
    write_checkpoints(work / "data/checkpoints", best=1)
    flattened(select)
    assert read_manifest(Path("data/draft"), "flatten").decisions == {"epoch": epoch}


def test_another_selection_changes_the_draft_and_nothing_else(work):
    flattened("last")
    before = tree("data/flattened") | tree("data/configs")
    draft = tree("data/draft")
    flattened(0)
    assert tree("data/flattened") | tree("data/configs") == before
    assert tree("data/draft") != draft


def test_dropping_the_embedding_leaves_the_configs_as_they_are(work):
    flattened()
    configs, files = tree("data/configs"), tree("data/flattened")
    flattened(drop_embed_tokens=True)
    assert tree("data/configs") == configs
    assert len(tree("data/flattened")["data/flattened/epoch_0/model-frozen.safetensors"]) < len(
        files["data/flattened/epoch_0/model-frozen.safetensors"]
    )
    assert simulated()["epochs"]["epoch_0"]["counts"]["shared"] == 1


def test_other_weights_leave_the_configs_as_they_are(work):
    flattened()
    configs = tree("data/configs")
    shutil.rmtree("data/checkpoints")
    write_checkpoints(work / "data/checkpoints", best=2)
    flattened()
    assert tree("data/configs") == configs


def test_an_epoch_that_is_not_there_is_refused_with_the_choices(work):
    with pytest.raises(InvalidInput, match="best, last or one of 0, 1, 2"):
        flattened(7)
    assert not Path("data/draft").exists()


def test_a_tensor_file_that_changed_since_training_is_refused(work):
    path = Path("data/checkpoints/epoch_1/model-trained.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"epoch_1/model-trained\.safetensors"):
        flattened()


def test_both_reports_of_a_good_run(work, capsys):
    flattened()
    run(validate_config)
    report = json.loads(Path("reports/validate_config.json").read_text())
    assert report["errors"] == report["warnings"] == 0
    assert report["epochs"]["epoch_2"] == {"verdict": "ok", "problems": []}
    report = simulated()
    assert report["engine_level"] == {"level": "off"}
    counts = {"dropped_knowingly": 1, "filled": 13, "fused": 5, "loaded": 11}
    assert report["epochs"]["epoch_2"] == {"verdict": "ok", "problems": [], "counts": counts}
    assert "the engine level is off" in capsys.readouterr().out


def test_a_wrong_config_fails_validate_config_for_every_epoch(work):
    shutil.rmtree("data/checkpoints")
    write_checkpoints(work / "data/checkpoints", eagle_aux_hidden_state_layer_ids=[2, 4, 9])
    flattened()
    with pytest.raises(InvalidInput) as caught:
        run(validate_config)
    assert [problem.where for problem in caught.value.problems] == [
        f"epoch_{epoch}: eagle_aux_hidden_state_layer_ids" for epoch in range(3)
    ]
    assert not Path("reports/validate_config.json").exists()


def test_a_wrong_shape_fails_simulate_weight_load(work):
    flattened()
    config = json.loads(Path("data/flattened/epoch_1/config.json").read_text())
    Path("data/flattened/epoch_1/config.json").write_text(json.dumps({**config, "head_dim": 8}))
    with pytest.raises(InvalidInput, match="epoch_1: head_dim"):
        simulated()


def test_without_vllm_the_required_level_names_both_ways_out(work, monkeypatch):
    flattened()
    monkeypatch.setattr(simulate_weight_load, "installed_version", lambda engine: None)
    with pytest.raises(InvalidInput, match="install it") as caught:
        simulated("required")
    assert "engine_level=off" in str(caught.value)


class Loaded:
    """vLLM's answer to a checkpoint that it loads."""

    def load(self, folder: Path, simulated: SimulatedLoad) -> EngineLoad:
        return EngineLoad("Eagle3", {}, {}, "", ())


@pytest.fixture
def gpu_build(work, monkeypatch) -> None:
    """vLLM that loads every file and has no attention kernel for the CPU."""
    flattened()
    monkeypatch.setattr("eagle3.checks.engine_parity.is_possible", lambda: False)
    monkeypatch.setattr("eagle3.checks.engine_load.engine", lambda config: nullcontext(Loaded()))
    monkeypatch.setattr("eagle3.checks.engine_load.witness_problems", lambda real, simulated: iter(()))


def test_the_required_level_fails_where_logits_cannot_be_compared(gpu_build):
    with pytest.raises(InvalidInput) as caught:
        simulated("required")
    [problem] = caught.value.problems
    assert (problem.code, problem.severity) == ("no-parity", "error")
    assert "engine_level=load" in problem.fix
    assert not Path("reports/simulate_weight_load.json").exists()


def test_the_level_of_the_load_warns_where_logits_cannot_be_compared(gpu_build, capsys):
    level = simulated("load")["engine_level"]
    assert level["level"] == "load"
    assert level["parity"] == {f"epoch_{epoch}": {"skipped": "vLLM's CPU build is needed"} for epoch in range(3)}
    told = capsys.readouterr().out
    assert "WARNING no-parity" in told
    assert "engine_level=load" not in told
    assert told.endswith("logits not compared\n")


def stage(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"stages.{name}"]
    return subprocess.run(command, cwd=folder, env=environment(), text=True, capture_output=True, check=False)


@pytest.mark.engine
def test_a_real_checkpoint_goes_through_all_three_stages(tmp_path):
    """Two epochs of a real speculators model with four aux layers, the real guard, and vLLM's own class as witness."""
    folder = make_repository(tmp_path)
    epochs = folder / "data/checkpoints"
    real_checkpoint(folder / "verifier", epochs)
    for name in ("flatten", "validate_config", "simulate_weight_load"):
        done = stage(folder, name)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1, done.stdout
    text = (folder / "reports/simulate_weight_load.json").read_text()
    report = json.loads(text)
    assert report["errors"] == report["warnings"] == 0
    level = report["engine_level"]
    assert level["engines"] == {"vllm": "0.32.0"}
    assert level["loads"] == 1, "epochs of one config and one set of shapes load the same way"
    real = {"class": "LlamaForCausalLMEagle3", "filled": 13, "parameters": 13, "refused": False}
    assert level["loaded"] == [real | {"epochs": ["epoch_0", "epoch_1"]}]
    assert sorted(level["parity"]) == ["epoch_0", "epoch_1"]
    assert all(0 < epoch["apart_in_bf16_steps"] <= 4 for epoch in level["parity"].values())
    assert str(tmp_path) not in text
    config = json.loads((folder / "data/draft/config.json").read_text())
    assert (config["num_aux_hidden_states"], config["norm_before_residual"]) == (4, True)
    set_params(folder, {"flatten": {"drop_embed_tokens": True}})
    assert [stage(folder, name).returncode for name in ("flatten", "simulate_weight_load")] == [0, 0]
    report = json.loads((folder / "reports/simulate_weight_load.json").read_text())
    assert report["engine_level"]["loaded"][0]["filled"] == 12, "the embedding is the verifier's"


def real_checkpoint(verifier: Path, folder: Path) -> None:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    from eagle3.drafts.checkpoints import write_epoch
    from eagle3.drafts.parity import probe_of, probe_rows
    from eagle3.drafts.training_data import read_documents
    from eagle3.formats.parity_probe import write_probe
    from tests.training_inputs import random_states

    layer = create_transformer_layer_config(
        verifier_name_or_path=str(verifier),
        num_layers=1,
        draft_arch="llama",
        hidden_act="silu",
        sliding_window=2048,
        full_attention_indices=[0],
        mrope_full_head_hack=True,
        trust_remote_code=False,
    )
    ids = torch.arange(0, 128, 2)
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[ids] = True
    model = Eagle3DraftModel.from_training_args(
        layer,
        t2d=t2d,
        d2t=ids - torch.arange(64),
        draft_vocab_size=64,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        fc_norm=False,
        embed_requires_grad=False,
        target_layer_ids=[1, 2, 3, 5],
        verifier_name_or_path=str(verifier),
        ttt_steps=3,
        draft_attn_impl="sdpa",
        trust_remote_code=False,
    )
    states = random_states(2, 30, 4)
    rows = probe_rows(states, read_documents(states, 64, 3).by_split["val"], 64, 3)
    for epoch in range(2):
        place = write_epoch(folder, epoch, model, "verifier")
        write_walks(place, {})
        write_probe(place / PROBE, probe_of(model, rows, ids - torch.arange(64), 3))
    shutil.copyfile(verifier / "config.json", folder / "verifier_config.json")
    write_manifest(folder, Manifest("train", verifier={"source": "verifier"}, decisions={"best_epoch": 1}))
