"""The layer ids of our flat config, as every server that reads it looks them up: the same states everywhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from eagle3.formats.flat_config import flatten
from eagle3.layer_ids import sglang_captures
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, write_tensors

IDS = (2, 4, 5)


def llama(listed: list[int]) -> list[int]:
    """sglang 0.5.23, models/llama.py, set_eagle3_layers_to_capture; `layers_to_capture` are inputs of layers."""
    return [each + 1 for each in listed]


def deepseek(listed: list[int]) -> list[int]:
    """The same in models/deepseek_v2.py; tests/sglang_witness.py asks the real methods of both."""
    return [each + 1 for each in listed] if listed and listed[0] == 1 else list(listed)


@pytest.mark.parametrize("ids", [[2, 4, 5], [3, 4, 5], [4, 6]])
@pytest.mark.parametrize(("name", "lookup"), [("LlamaForCausalLM", llama), ("DeepseekV3ForCausalLM", deepseek)])
def test_sglang_captures_what_was_trained(ids, name, lookup):
    """model_runner_components/spec_aux_hidden_state.py hands the list in eagle_config to the verifier's class."""
    noted = {"architectures": [name], "name_or_path": "org/model"}
    nested = NESTED | {"eagle_aux_hidden_state_layer_ids": ids}
    flat = flatten(nested | {"speculators_config": NESTED["speculators_config"] | {"verifier": noted}})
    listed = flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert lookup(listed) == sglang_captures(listed, [name], 8) == ids
    assert flat["eagle_aux_hidden_state_layer_ids"] == ids


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
