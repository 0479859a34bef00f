"""A draft of Kimi-K2.5's sizes, for the other benchmarks: config and headers true, tensor data a hole in the file.

By hand: python -m benchmarks.kimi_draft DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eagle3.formats.safetensors_headers import num_bytes, write_header

Weights = dict[str, tuple[str, tuple[int, ...]]]

# The sizes of public drafts for Kimi-K2.5 (AQ-MedAI/Kimi-K25-eagle3's config.json) and of SmolLM2-135M-Instruct.
KIMI = {
    "hidden_size": 7168, "vocab_size": 163840, "draft_vocab_size": 32000, "intermediate_size": 18432,
    "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "vocab_size": 49152, "draft_vocab_size": 8192, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip


def draft_config(sizes: dict[str, int]) -> dict[str, Any]:
    """A flat config with these sizes that `eagle3 check` finds nothing wrong with."""
    ids = [2, 15, 27] if sizes is SMOLLM2 else [2, 30, 58]
    return sizes | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 50000.0,
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in ids], "use_aux_hidden_state": True},
    }


def verifier_config(sizes: dict[str, int]) -> dict[str, Any]:
    """A Llama verifier of the same widths; the witness needs no more of a verifier than its config."""
    layers = 30 if sizes is SMOLLM2 else 61
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: sizes[name] for name in names} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 50000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def draft_weights(sizes: dict[str, int]) -> Weights:
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_rows, kv_rows = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    vocab, rows = sizes["vocab_size"], sizes["draft_vocab_size"]
    matrices = {
        "embed_tokens": (vocab, hidden),
        "fc": (hidden, 3 * hidden),
        "lm_head": (rows, hidden),
        "midlayer.self_attn.q_proj": (q_rows, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_rows, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_rows, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q_rows),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    weights: Weights = {f"{name}.weight": ("BF16", shape) for name, shape in matrices.items()}
    weights |= {f"{name}.weight": ("BF16", (hidden,)) for name in norms}
    return weights | {"d2t": ("I64", (rows,)), "t2d": ("BOOL", (vocab,))}


def write_draft(folder: Path, sizes: dict[str, int]) -> Path:
    """config.json, verifier.json and a sparse model.safetensors in `folder`: a block of disk, gigabytes to read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config(sizes)))
    (folder / "verifier.json").write_text(json.dumps(verifier_config(sizes)))
    weights = draft_weights(sizes)
    header = write_header(weights, {"format": "pt"})
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(num_bytes(dtype, shape) for dtype, shape in weights.values()))
    return folder


if __name__ == "__main__":
    write_draft(Path(sys.argv[1]), KIMI)
