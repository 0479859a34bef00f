"""Every preset, from its parameters to the flat config and the simulated load at full size, on sparse files.

tests/verifiers/ holds the sizes of each preset's verifier as its published config.json has them. speculators' own model
is built on the meta device: its names, its shapes and its config are real, its weights do not exist.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.formats.flattening import flatten_folder
from eagle3.layer_ids import aux_layer_id_problems
from eagle3.params import Params, read_params
from eagle3.verifiers.verifier import text_config
from eagle3.verifiers.verifier_config import parse_verifier_config
from tests.code_deps import ROOT
from tests.drafts import write_sparse_tensors

# What published drafts for these verifiers have, and what our presets decide: the norms and the layer ids.
COMMON = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "fc_norm": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": ["full_attention"],
    "mlp_bias": False,
    "model_type": "llama",
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "num_aux_hidden_states": 3,
    "num_hidden_layers": 1,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
FLAT = {
    "kimi-k2.5": {
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "head_dim": 128,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embeddings": 262144,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "vocab_size": 163840,
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    },
    "llama-3.1-8b": {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        },
        "vocab_size": 128256,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    },
    "qwen3-8b": {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "vocab_size": 151936,
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    },
    "gpt-oss-20b": {
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 17280,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000,
            "rope_type": "yarn",
            "truncate": False,
        },
        "vocab_size": 201088,
        "eagle_aux_hidden_state_layer_ids": [2, 12, 21],
    },
}
# A published draft with the same config (AQ-MedAI/Kimi-K25-eagle3): what its config.json and ours must share.
PUBLISHED_KIMI = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "bos_token_id": 163584,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 64,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 163840,
}
# Bytes of the file. Of Kimi's 4.73 GB, 2.35 are the verifier's embedding, 163,840 x 7,168 bf16.
SIZES = {
    "kimi-k2.5": 2_382_362_304 + 163_840 * 7168 * 2,
    "llama-3.1-8b": 1_900_463_032,
    "qwen3-8b": 2_044_141_624,
    "gpt-oss-20b": 1_774_026_168,
}


def preset(name: str) -> Params:
    return read_params(ROOT / f"presets/{name}.yaml")


def verifier(name: str) -> dict:
    return json.loads((ROOT / f"tests/verifiers/{name}.json").read_text())


def write_checkpoint(name: str, folder: Path) -> Path:
    """The checkpoint that `train` would leave, with holes in place of its weights."""
    import torch

    from eagle3.drafts.checkpoints import NOT_SAVED, nested_config
    from eagle3.drafts.draft_model import Eagle3DraftModel, layer_config, training_arguments

    class WithoutWeights(Eagle3DraftModel):
        def load_vocab_mappings(self, t2d, d2t):
            pass

        def load_verifier_weights(self):
            pass

    params = preset(name)
    architecture = resolve_architecture(
        params.draft, text_config(verifier(name)), params.vocab_map.draft_vocab_size, params.extract.aux_layer_ids
    )
    (folder / "verifier").mkdir(parents=True)
    (folder / "verifier/config.json").write_text(json.dumps(verifier(name)))
    with torch.device("meta"):
        arguments = training_arguments(architecture, folder / "verifier", params.train.ttt_steps)
        model = WithoutWeights.from_training_args(layer_config(architecture), **arguments)
    (folder / "draft").mkdir()
    (folder / "draft/config.json").write_text(json.dumps(nested_config(model, params.verifier.source)))
    dtypes = {torch.int64: "I64", torch.bool: "BOOL", torch.float32: "BF16"}
    weights = {
        key: (dtypes[tensor.dtype], tuple(tensor.shape))
        for key, tensor in model.state_dict().items()
        if key not in NOT_SAVED
    }
    write_sparse_tensors(folder / "draft/model.safetensors", weights)
    return folder / "draft"


def test_every_preset_but_the_default_is_here():
    assert {path.stem for path in (ROOT / "presets").glob("*.yaml")} == {*FLAT, "smollm2-135m"}


@pytest.mark.parametrize("name", FLAT)
def test_its_layers_exist_and_its_heads_divide_by_eight_gpus(name):
    params, layers = preset(name), text_config(verifier(name))["num_hidden_layers"]
    assert not list(aux_layer_id_problems(params.extract.aux_layer_ids, layers))
    assert FLAT[name]["num_attention_heads"] % 8 == 0
    assert FLAT[name]["num_key_value_heads"] % 8 == 0
    assert FLAT[name]["intermediate_size"] % 8 == 0


@pytest.mark.parametrize("name", FLAT)
def test_its_engine_level_can_pass_on_a_gpu_build(name):
    assert preset(name).simulate_weight_load.engine_level == "load"


@pytest.mark.parametrize("name", FLAT)
def test_its_flat_config_has_the_reference_values_and_its_load_passes_at_full_size(name, tmp_path):
    flat = tmp_path / "flat"
    flatten_folder(write_checkpoint(name, tmp_path), flat)
    config = json.loads((flat / "config.json").read_text())
    ids = config["eagle_aux_hidden_state_layer_ids"]
    nested = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids], "use_aux_hidden_state": True}
    assert config == COMMON | FLAT[name] | {"eagle_config": nested | {"norm_before_fc": True}}

    verdict, load = check_checkpoint(flat, parse_verifier_config(verifier(name)))
    assert not verdict.problems, [problem.where for problem in verdict.problems]
    assert load is not None
    assert {fate.fate for fate in load.tensors} == {"loaded", "fused", "dropped_knowingly"}
    assert {state.state for state in load.parameters} == {"filled"}
    weights = (flat / "model.safetensors").stat()
    assert weights.st_size == SIZES[name]
    assert weights.st_blocks * 512 <= 12_288, "holes take no disk"


def test_the_kimi_preset_is_the_published_architecture():
    ours = COMMON | FLAT["kimi-k2.5"]
    assert {key: ours[key] for key in PUBLISHED_KIMI} == PUBLISHED_KIMI
