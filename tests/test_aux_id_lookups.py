"""The layer ids of our flat config, as every server that reads it looks them up: the same states everywhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from eagle3.formats.flat_config import flatten
from eagle3.layer_ids import from_output_of
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, write_tensors

IDS = (2, 4, 5)


def sglang_lookup(config: dict) -> list[int]:
    """sglang 0.5.23: model_runner_components/spec_aux_hidden_state.py reads the list in eagle_config, and
    models/llama.py (set_eagle3_layers_to_capture) adds 1; its `layers_to_capture` are inputs of layers."""
    return [layer_id + 1 for layer_id in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]


def test_sglang_captures_what_was_trained():
    flat = flatten(NESTED)
    assert sglang_lookup(flat) == list(IDS)
    assert from_output_of(flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == list(IDS)


@pytest.mark.engine
@pytest.mark.parametrize("form", ["flat", "nested"])
def test_both_runners_of_vllm_capture_what_was_trained(tmp_path, form):
    """The V2 runner cannot start without Triton; its lookup is a function. Configs go through vLLM's own parsing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    draft, verifier = tmp_path / "draft", tmp_path / "verifier"
    write_tensors(draft / "model.safetensors", FROZEN | TRAINED)
    (draft / "config.json").write_text(json.dumps(flatten(NESTED) if form == "flat" else NESTED))
    verifier.mkdir()
    (verifier / "config.json").write_text(json.dumps(VERIFIER))
    config = EngineArgs(
        model=str(verifier),
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config={"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3},
    ).create_engine_config()
    runner = SimpleNamespace(speculative_config=config.speculative_config)
    assert GPUModelRunner._get_eagle3_aux_layers_from_config(runner) == IDS
    assert get_eagle3_aux_layers_from_config(config.speculative_config) == IDS
