"""Training that begins with an existing draft: every format, every mismatch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.drafts.checkpoints import write_epoch
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.drafts.draft_model import Vocabulary, build_draft
from eagle3.drafts.warm_start import read_existing_draft, start_from
from eagle3.formats.flattening import flatten_checkpoint
from eagle3.params import DraftParams, VerifierParams, read_params
from eagle3.problems import InvalidInput
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from eagle3.verifiers.verifier_config import parse_verifier_config
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier
from tests.training_inputs import AUX_LAYER_IDS

pytestmark = pytest.mark.engine
DRAFT = read_params(ROOT / "params.yaml").draft
K = 64


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    path = tiny_verifier(tmp_path_factory.mktemp("verifier"))
    return resolve_verifier(VerifierParams(str(path), None, None, False))


def vocabulary(step: int = 3) -> Vocabulary:
    ids = torch.arange(K) * step + 1
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(K), t2d


def model_of(verifier: Verifier, seed: int, params: DraftParams = DRAFT, ids: list[int] = AUX_LAYER_IDS) -> Any:
    architecture = resolve_architecture(params, verifier.text_config, K, ids)
    return build_draft(architecture, verifier, vocabulary(), 3, seed), architecture


@pytest.fixture(scope="module")
def nested(verifier, tmp_path_factory) -> Path:
    model, _ = model_of(verifier, 1)
    return write_epoch(tmp_path_factory.mktemp("nested"), 0, model, verifier.source)


def digest_of(folder: Path, verifier: Verifier) -> str:
    """As the refusal of a draft without a digest tells it."""
    with pytest.raises(InvalidInput) as caught:
        read_existing_draft(str(folder), None, parse_verifier_config(verifier.config))
    return caught.value.problems[0].fix.rpartition("=")[2]


def started(folder: Path, verifier: Verifier, params: DraftParams = DRAFT, ids: list[int] = AUX_LAYER_IDS) -> Any:
    """A new model with the weights of the draft in `folder`, and what is said of it."""
    draft = read_existing_draft(str(folder), digest_of(folder, verifier), parse_verifier_config(verifier.config))
    model, architecture = model_of(verifier, 2, params, ids)
    return model, start_from(draft, model, architecture, vocabulary())


def as_is(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def flat(source: Path, target: Path) -> None:
    flatten_checkpoint(source, target)


def edited(
    config: Callable[[dict[str, Any]], Any] = lambda _: None,
    tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None,
) -> Callable[[Path, Path], None]:
    """The flat form in one file, changed."""

    def write(source: Path, target: Path) -> None:
        flatten_checkpoint(source, target)
        weights = {
            name: each for file in sorted(target.glob("*.safetensors")) for name, each in load_file(file).items()
        }
        for file in target.glob("*safetensors*"):
            file.unlink()
        values = json.loads((target / "config.json").read_text())
        config(values)
        tensors(weights)
        (target / "config.json").write_text(json.dumps(values))
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    return write


def midlayer(tensors: dict[str, torch.Tensor]) -> None:
    """The names that SafeAILab and SpecForge write."""
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
    tensors.pop("embed_tokens.weight")


FORMS = {"speculators": as_is, "flat": flat, "one file": edited(), "midlayer": edited(tensors=midlayer)}


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_of_every_form_are_taken(verifier, nested, tmp_path, form):
    FORMS[form](nested, tmp_path / "draft")
    model, said = started(tmp_path / "draft", verifier)
    original, _ = model_of(verifier, 1)
    for (name, tensor), wanted in zip(model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(tensor, wanted.bfloat16().float() if wanted.requires_grad else wanted), name
    assert said["format"] == ("nested" if form == "speculators" else "flat")
    assert said["other_rows_of_lm_head"] == 0
    assert said.get("other_rows_of_embed_tokens", 0) == 0


def test_a_head_of_its_own_is_counted(verifier, nested, tmp_path):
    def train_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:5] += 1

    edited(tensors=train_head)(nested, tmp_path / "draft")
    assert started(tmp_path / "draft", verifier)[1]["other_rows_of_lm_head"] == 5


def set_value(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.__setitem__(name, value)


def other_map(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"], tensors["t2d"] = vocabulary(4)


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.self_attn.out_proj.weight"] = tensors.pop("layers.0.self_attn.o_proj.weight")


def other_ids(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 5]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 4]


MISMATCHES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "residual": (edited(set_value("norm_before_residual", False)), r"draft\.norm_before_residual"),
    "output": (edited(set_value("norm_output", False)), r"draft\.norm_output"),
    "rope": (
        edited(set_value("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})),
        r"draft\.rope_parameters",
    ),
    "epsilon": (edited(set_value("rms_norm_eps", 1e-6)), r"draft\.rms_norm_eps"),
    "aux layers": (edited(other_ids), r"extract\.aux_layer_ids"),
    "map": (edited(tensors=other_map), r"d2t\n +found: +63 of 64 rows"),
    "a name": (edited(tensors=renamed), r"o_proj"),
    "a tensor that is not there": (edited(tensors=lambda each: each.pop("fc.weight")), r"fc\.weight"),
    "a tensor too many": (
        edited(tensors=lambda each: each.update({"fc.bias": torch.zeros(64).bfloat16()})),
        r"fc\.bias",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_another_draft_is_refused_by_what_differs(verifier, nested, tmp_path, mismatch):
    write, expected = MISMATCHES[mismatch]
    write(nested, tmp_path / "draft")
    with pytest.raises(InvalidInput, match=expected):
        started(tmp_path / "draft", verifier)


def test_every_difference_of_the_parameters_is_named_at_once(verifier, nested):
    asked = replace(DRAFT, num_hidden_layers=2, intermediate_size=96, norm_before_fc=False, fc_norm=True)
    with pytest.raises(InvalidInput) as caught:
        started(nested, verifier, asked, [1, 2, 3])
    found = {problem.where for problem in caught.value.problems}
    assert {"draft.num_hidden_layers", "draft.intermediate_size", "draft.fc_norm", "extract.aux_layer_ids"} <= found
    assert {"input_norm.weight", "layers.1.mlp.up_proj.weight"} <= found


def test_a_draft_that_changed_in_its_folder_is_refused(verifier, nested, tmp_path):
    as_is(nested, tmp_path / "draft")
    digest = digest_of(tmp_path / "draft", verifier)
    config = json.loads((tmp_path / "draft/config.json").read_text())
    (tmp_path / "draft/config.json").write_text(json.dumps(config | {"norm_output": False}))
    with pytest.raises(InvalidInput, match="warm_start_sha256"):
        read_existing_draft(str(tmp_path / "draft"), digest, parse_verifier_config(verifier.config))


def test_a_folder_without_a_draft_is_refused(verifier, tmp_path):
    with pytest.raises(InvalidInput, match=r"train\.warm_start"):
        read_existing_draft(str(tmp_path), None, parse_verifier_config(verifier.config))
