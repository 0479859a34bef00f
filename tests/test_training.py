from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.drafts.checkpoints import FROZEN, TRAINED, write_epoch
from eagle3.drafts.draft_architecture import DraftArchitecture, resolve_architecture
from eagle3.drafts.draft_model import build_draft, draft_steps, read_vocabulary
from eagle3.drafts.draft_walk import predict
from eagle3.drafts.training import train, trainer_config
from eagle3.drafts.training_data import PackedRows, read_documents
from eagle3.params import VerifierParams, read_params
from eagle3.problems import InvalidInput
from eagle3.states.hidden_states import HiddenStates
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier
from tests.training_inputs import AUX_LAYER_IDS, store_as_fp8, write_hidden_states, write_vocab_map

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
PARAMS = read_params(ROOT / "params.yaml")
ADAMW = {"optimizer": "adamw", "scheduler": "cosine", "warmup_ratio": 0.02}
TRAIN = replace(PARAMS.train, epochs=2, total_seq_len=128, learning_rate=3e-3, **ADAMW)
K, SEED = 128, 0


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    path = tiny_verifier(tmp_path_factory.mktemp("verifier"))
    return resolve_verifier(VerifierParams(str(path), None, None, False))


@pytest.fixture(scope="module")
def data(verifier, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_hidden_states(
        folder / "hidden_states", verifier.path, verifier.identity(), {"train": 12, "val": 4, "eval": 3}
    )
    write_vocab_map(folder / "vocab_map", K, 320)
    return folder


@pytest.fixture(scope="module")
def architecture(verifier) -> DraftArchitecture:
    return resolve_architecture(PARAMS.draft, verifier.text_config, K, AUX_LAYER_IDS)


@pytest.fixture
def model(architecture, verifier, data):
    return build_draft(architecture, verifier, read_vocabulary(data / "vocab_map", architecture), 3, SEED)


def rows_of(data: Path, split: str, seed: int | None = None) -> PackedRows:
    states = HiddenStates(data / "hidden_states")
    return PackedRows(states, read_documents(states, 128, 3).by_split[split], 128, seed)


def test_frozen_tensors_are_the_verifiers_rows_and_only_the_rest_is_trained(model, verifier, data, architecture):
    from safetensors.torch import load_file

    weights = load_file(verifier.path / "model.safetensors")
    d2t, _ = read_vocabulary(data / "vocab_map", architecture)
    ids = torch.arange(K) + d2t
    assert torch.equal(model.lm_head.weight.data, weights["lm_head.weight"].float()[ids])
    assert torch.equal(model.verifier_norm.weight.data, weights["model.norm.weight"].float())
    frozen = {name for name, tensor in model.named_parameters() if not tensor.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def test_the_model_has_exactly_the_architecture_asked_for(verifier, data):
    asked = replace(
        PARAMS.draft,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=96,
        num_hidden_layers=2,
        sliding_window=32,
        norm_before_fc=False,
        fc_norm=True,
        norm_before_residual=False,
        norm_output=False,
    )
    architecture = resolve_architecture(asked, verifier.text_config, K, AUX_LAYER_IDS)
    model = build_draft(architecture, verifier, read_vocabulary(data / "vocab_map", architecture), 3, SEED)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (128, 128)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (64, 64)
    assert shapes["layers.1.mlp.up_proj.weight"] == (96, 64)
    assert shapes["fc_norm.2.weight"] == (64,)
    config = model.config
    assert (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output) == (
        False,
        False,
        True,
        False,
    )
    assert config.transformer_layer_config.layer_types == ["sliding_attention"] * 2
    assert config.eagle_aux_hidden_state_layer_ids == AUX_LAYER_IDS


@pytest.mark.parametrize("nested", [False, True])
def test_a_verifier_of_a_type_that_transformers_does_not_know_is_read_all_the_same(
    nested, tmp_path, architecture, verifier, data, model
):
    path = tiny_verifier(tmp_path / "verifier")
    config = json.loads((path / "config.json").read_text()) | {"model_type": f"of_its_own_{nested}"}
    config["auto_map"] = {"AutoConfig": "code_that_is_not_run.Config"}
    written = {**{k: config[k] for k in ("model_type", "architectures", "auto_map")}, "text_config": config}
    (path / "config.json").write_text(json.dumps(written if nested else config))
    unknown = resolve_verifier(VerifierParams(str(path), None, None, False))
    built = build_draft(architecture, unknown, read_vocabulary(data / "vocab_map", architecture), 3, SEED)
    assert built.config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(built.state_dict()[name], tensor)


def test_a_verifier_without_its_own_head_is_refused(tmp_path, architecture, data):
    """speculators 0.9.0 would take the embedding for it and say nothing."""
    from safetensors.torch import load_file, save_file

    path = tiny_verifier(tmp_path / "verifier")
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"], weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    broken = resolve_verifier(VerifierParams(str(path), None, None, False))
    with pytest.raises(InvalidInput) as caught:
        build_draft(architecture, broken, read_vocabulary(data / "vocab_map", architecture), 3, SEED)
    assert [problem.where for problem in caught.value.problems] == ["model.norm.weight", "lm_head.weight"]


def test_the_whole_vocabulary_needs_no_map(verifier, tmp_path):
    write_vocab_map(tmp_path / "vocab_map", 320, 320)
    architecture = resolve_architecture(PARAMS.draft, verifier.text_config, 320, AUX_LAYER_IDS)
    assert read_vocabulary(tmp_path / "vocab_map", architecture) is None
    model = build_draft(architecture, verifier, None, 3, SEED)
    place = write_epoch(tmp_path / "checkpoints", 0, model, verifier.source)
    assert "d2t" not in (place / "model.safetensors.index.json").read_text()


def test_every_trainer_setting_comes_from_the_parameters(tmp_path):
    asked = replace(TRAIN, optimizer="muon", muon_learning_rate=None, warmup_ratio=0.25, scheduler="linear")
    config = trainer_config(asked, 40, tmp_path)
    assert (config.lr, config.muon_lr, config.optimizer) == (3e-3, 3e-3, "muon")
    assert (config.scheduler_type, config.scheduler_warmup_steps, config.scheduler_total_steps) == ("linear", 10, 40)
    assert config.train_call_kwargs["ttt_steps"] == 3
    assert trainer_config(replace(asked, muon_learning_rate=0.02), 40, tmp_path).muon_lr == 0.02


@pytest.mark.parametrize("store_dtype", ["bfloat16", "fp8"])
def test_loss_falls_and_every_epoch_is_reported(model, data, tmp_path, store_dtype):
    if store_dtype == "fp8":
        store_as_fp8(data / "hidden_states", tmp_path / "hidden_states")
        data = tmp_path
    before = model.state_dict()["embed_tokens.weight"].clone()
    seen = []
    rows = rows_of(data, "train", SEED), rows_of(data, "val")
    run = train(model, replace(TRAIN, epochs=4), rows, tmp_path / "none", lambda *given: seen.append(given))
    assert [epoch for epoch, *_ in seen] == [0, 1, 2, 3]
    losses = [metrics.train_loss for _, metrics, _ in seen]
    assert losses[-1] < losses[0] - 0.3
    assert all(len(metrics.val_accuracy) == 3 for _, metrics, _ in seen)
    assert run.token_passes == 4 * rows[0].positions
    assert run.settings["optimizers"][0]["name"] == "AdamW"
    assert run.settings["optimizers"][0]["betas"] == (0.9, 0.999)
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["state.pt"]
    assert torch.equal(model.state_dict()["embed_tokens.weight"], before)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_seed_gives_the_same_bytes(architecture, verifier, data, tmp_path, optimizer):
    for name in ("one", "two"):
        torch.rand(3)  # whatever ran before must not matter
        model = build_draft(architecture, verifier, read_vocabulary(data / "vocab_map", architecture), 3, SEED)
        rows = rows_of(data, "train", SEED), rows_of(data, "val")
        asked = replace(TRAIN, epochs=1, optimizer=optimizer)
        train(model, asked, rows, tmp_path / f"state of {name}", lambda *_: None)
        write_epoch(tmp_path / name, 0, model, verifier.source)
    for file in (FROZEN, TRAINED, "config.json", "model.safetensors.index.json"):
        assert (tmp_path / "one/epoch_0" / file).read_bytes() == (tmp_path / "two/epoch_0" / file).read_bytes()


def test_a_checkpoint_holds_no_path_of_this_machine_and_shares_its_frozen_shard(model, tmp_path):
    for epoch in (0, 1):
        write_epoch(tmp_path, epoch, model, "package:some/thing.gguf")
    names = {path.name for path in (tmp_path / "epoch_1").iterdir()}
    assert names == {"config.json", FROZEN, TRAINED, "model.safetensors.index.json"}
    text = (tmp_path / "epoch_1/config.json").read_text()
    assert '"name_or_path": "package:some/thing.gguf"' in text
    assert "auto_map" not in text
    assert "/tmp" not in text
    assert (tmp_path / "epoch_0" / FROZEN).stat().st_ino == (tmp_path / "epoch_1" / FROZEN).stat().st_ino


def test_predictions_do_not_depend_on_the_neighbours_in_the_row(model, data, architecture):
    """Two documents in one row propose what each proposes alone, as a server sees one request."""
    d2t, _ = read_vocabulary(data / "vocab_map", architecture)
    together = predict(draft_steps(model), rows_of(data, "eval"), d2t)
    for index, document in enumerate(rows_of(data, "eval").documents):
        states = HiddenStates(data / "hidden_states")
        [alone] = predict(draft_steps(model), PackedRows(states, [document], 128), d2t)
        assert alone == together[index]


def test_sigterm_ends_training_as_the_caller_says(model, data, tmp_path):
    """The library would save and return normally; below its decorator the caller's handler decides."""

    def terminate(number, frame):
        raise SystemExit(128 + number)

    def stop(*_):
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(SystemExit) as caught:
            train(model, TRAIN, (rows_of(data, "train", SEED), rows_of(data, "val")), tmp_path / "none", stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143


def test_a_loss_that_is_not_finite_names_the_learning_rate(model, data, tmp_path):
    torch.nn.init.constant_(model.fc.weight, float("inf"))
    with pytest.raises(InvalidInput, match=r"train\.learning_rate"):
        train(model, TRAIN, (rows_of(data, "train", SEED), rows_of(data, "val")), tmp_path / "none", lambda *_: None)
