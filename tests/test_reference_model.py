"""Which verifiers have a reference, and that it is the verifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.verifiers import reference_model
from eagle3.verifiers.reference_model import NoReference, load_reference
from tests.shapes import shaped_verifier
from tests.tiny import tiny_verifier


@torch.inference_mode()
def logits(verifier: Path) -> torch.Tensor:
    return load_reference(verifier, False)(torch.tensor([[1, 60, 61, 62]])).logits


@pytest.mark.parametrize("renamed", [False, True])
def test_a_kimi_k2_is_the_deepseek_v3_it_was_made_from(renamed, tmp_path, monkeypatch):
    from transformers import AutoConfig, DeepseekV3Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    expected = logits(shaped_verifier(tmp_path / "deepseek", "deepseek_v3"))
    shaped_verifier(tmp_path / "kimi", "kimi_k2")
    if renamed:  # what vLLM 0.32.0 does in its process (transformers_utils/config.py, _register_config_class)
        monkeypatch.setattr(DeepseekV3Config, "model_type", "kimi_k2")
        monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
        AutoConfig.register("kimi_k2", DeepseekV3Config)
    assert torch.equal(logits(tmp_path / "kimi"), expected)


def test_random_numbers_in_place_of_a_weight_are_no_reference(tmp_path):
    tiny_verifier(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(NoReference, match=r"no weights for 1 tensors, model\.layers\.1\.mlp\.up_proj\.weight"):
        load_reference(tmp_path, False)


def test_a_verifier_beyond_the_memory_is_not_loaded(tmp_path, monkeypatch):
    tiny_verifier(tmp_path)
    monkeypatch.setattr(reference_model, "available_memory", lambda: 1000)
    with pytest.raises(NoReference, match=r"0\.0 GB of memory available; expected .* for the verifier in float32"):
        load_reference(tmp_path, False)
