"""A verifier that counts and a draft that looks one step ahead: what they say and what is accepted is known by hand.

The verifier's layers add nothing, and its head makes token x be followed by x + 1 (the last one by the end token). The
draft's layer adds nothing either: its first step sees the state of token x and proposes x + 2, right unless x + 2 is a
multiple of 3, where its head is blank; its later steps see the same state and are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import tiny_verifier

END = 2
FIRST = 3  # below are the special tokens
VOCABULARY = 320
K = 256  # verifier ids that the draft can say: FIRST .. FIRST + K - 1
HIDDEN = 64


def successor(token: int) -> int:
    return token + 1 if FIRST <= token < VOCABULARY - 1 else END


def answer_to(last: int, max_new_tokens: int) -> list[int]:
    """The greedy answer after a prompt that ends with `last`, its end token included."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and (not tokens or tokens[-1] != END):
        tokens.append(successor(tokens[-1] if tokens else last))
    return tokens


def first_step(token: int) -> int:
    """What the draft proposes first after the state of `token`; -1 where that is never right."""
    ahead = successor(successor(token))
    return ahead if FIRST <= ahead < FIRST + K and ahead % 3 else -1


def counting_verifier(path: Path) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    tiny_verifier(path, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    embedding = tensors["model.embed_tokens.weight"]
    head = torch.zeros_like(embedding)
    for token in range(FIRST, VOCABULARY):
        head[successor(token)] += embedding[token]
    tensors["lm_head.weight"] = head
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def tied_verifier(path: Path) -> Path:
    """The same, but its head gives token 102 the logit of token 101: after 100 both are the best."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(counting_verifier(path) / "model.safetensors")
    tensors["lm_head.weight"][102] = tensors["lm_head.weight"][101]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def counting_draft(path: Path, verifier: Path) -> Path:
    """A flat checkpoint for the verifier above, as `flatten` writes it."""
    import torch
    from safetensors.torch import load_file, save_file

    embedding = load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]
    head = torch.zeros(K, HIDDEN, dtype=torch.bfloat16)
    for token in range(FIRST, VOCABULARY):
        if (ahead := first_step(token)) >= 0:
            head[ahead - FIRST] = embedding[token]
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[FIRST : FIRST + K] = True
    sizes = {"q_proj": (128, 128), "k_proj": (64, 128), "v_proj": (64, 128), "o_proj": (64, 128)}
    tensors = {f"layers.0.self_attn.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    tensors |= {f"layers.0.mlp.{name}.weight": torch.zeros(128, HIDDEN) for name in ("gate_proj", "up_proj")}
    tensors |= {f"layers.0.{name}.weight": torch.ones(HIDDEN) for name in NORMS}
    tensors |= {
        "layers.0.mlp.down_proj.weight": torch.zeros(HIDDEN, 128),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.eye(HIDDEN, 3 * HIDDEN),
    }
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    tensors |= {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head, "t2d": t2d}
    tensors["d2t"] = torch.full((K,), FIRST, dtype=torch.int64)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(DRAFT_CONFIG, indent=2))
    return path


def reading_draft(path: Path, verifier: Path, embedding: bool) -> Path:
    """A draft that looks at nothing but its newest token's embedding, its own or (without one) the server's.

    Attention finds that token's own embedding, the residual is none of the hidden state's. So every step proposes the
    next number, right unless that is a multiple of 3.
    """
    import torch
    from safetensors.torch import load_file, save_file

    counting_draft(path, verifier)
    tensors, half = load_file(path / "model.safetensors"), HIDDEN // 2
    numbers = load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]
    sharp, eye = 4.0, torch.eye(half)
    query, key, value, out = (tensors[f"layers.0.self_attn.{name}_proj.weight"] for name in ("q", "k", "v", "o"))
    # heads 0 and 1 of the queries read the first half of the embedding, 2 and 3 the second
    for head, first in enumerate((0, 0, half, half)):
        query[head * half : (head + 1) * half, first : first + half] = sharp * eye
    key[:, :HIDDEN], value[:, :HIDDEN] = sharp * torch.eye(HIDDEN), torch.eye(HIDDEN)
    out[:half, :half], out[half:, HIDDEN : HIDDEN + half] = eye, eye
    tensors["layers.0.hidden_norm.weight"].zero_()
    tensors["lm_head.weight"].zero_()
    for token in range(FIRST, VOCABULARY):
        if (ahead := next_number(token)) >= 0:
            tensors["lm_head.weight"][ahead - FIRST] = numbers[token]
    if not embedding:
        del tensors["embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**DRAFT_CONFIG, "norm_before_residual": True}))
    return path


def next_number(token: int) -> int:
    """What that draft proposes after `token`; -1 where it is never right."""
    ahead = successor(token)
    return ahead if FIRST <= ahead < FIRST + K and ahead % 3 else -1


NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
DRAFT_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_theta": 10000.0,
    "layer_types": ["full_attention"],
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": K,
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "num_aux_hidden_states": 3,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
        "use_aux_hidden_state": True,
        "norm_before_fc": False,
    },
}
