"""Small literal drafts for tests: configs as trainers write them, tensors of zeros, and the verifier they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3.formats.safetensors_headers import num_bytes, write_header

Weights = dict[str, tuple[str, tuple[int, ...]]]

VERIFIER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LAYER: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["full_attention"],
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 160,
}
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 40,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/model"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": LAYER,
    "transformers_version": "5.19.0",
}
FROZEN: Weights = {
    "d2t": ("I64", (40,)),
    "embed_tokens.weight": ("BF16", (160, 64)),
    "lm_head.weight": ("BF16", (40, 64)),
    "t2d": ("BOOL", (160,)),
}
TRAINED: Weights = {
    "fc.weight": ("BF16", (64, 192)),
    "input_norm.weight": ("BF16", (192,)),
    "layers.0.hidden_norm.weight": ("BF16", (64,)),
    "layers.0.input_layernorm.weight": ("BF16", (64,)),
    "layers.0.mlp.down_proj.weight": ("BF16", (64, 96)),
    "layers.0.mlp.gate_proj.weight": ("BF16", (96, 64)),
    "layers.0.mlp.up_proj.weight": ("BF16", (96, 64)),
    "layers.0.post_attention_layernorm.weight": ("BF16", (64,)),
    "layers.0.self_attn.k_proj.weight": ("BF16", (32, 128)),
    "layers.0.self_attn.o_proj.weight": ("BF16", (64, 64)),
    "layers.0.self_attn.q_proj.weight": ("BF16", (64, 128)),
    "layers.0.self_attn.v_proj.weight": ("BF16", (32, 128)),
    "norm.weight": ("BF16", (64,)),
}


def write_tensors(path: Path, weights: Weights, fill: int = 0) -> Path:
    """A safetensors file of these dtypes and shapes; every byte of its data is `fill`."""
    size = sum(num_bytes(dtype, shape) for dtype, shape in weights.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_header(weights, {"format": "pt"}) + bytes([fill]) * size)
    return path


def write_sparse_tensors(path: Path, weights: Weights) -> Path:
    """The same, all zero, with a hole for the data: a 7168-wide draft costs one block of disk."""
    header = write_header(weights, {"format": "pt"})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(num_bytes(dtype, shape) for dtype, shape in weights.values()))
    return path


def write_nested(folder: Path, config: dict[str, Any] | None = None, fill: int = 1) -> Path:
    """A checkpoint as the train stage leaves it: two shards and an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(NESTED if config is None else config, indent=2))
    write_tensors(folder / "model-frozen.safetensors", FROZEN, 7)
    write_tensors(folder / "model-trained.safetensors", TRAINED, fill)
    weight_map = dict.fromkeys(FROZEN, "model-frozen.safetensors") | dict.fromkeys(TRAINED, "model-trained.safetensors")
    total = sum(num_bytes(dtype, shape) for dtype, shape in (FROZEN | TRAINED).values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
