"""Tiny random verifiers of other shapes than tests/tiny.py's Llama, with its tokenizer, for the real engines.

qwen3        norms on queries and keys
deepseek_v3  latent attention (the latent sizes of the real ones: other sizes were not tried) and routed experts
kimi_k2      the same under the type that Kimi-K2's config.json names, which transformers 5.19 does not know
kimi_k25     that as `text_config` of a multimodal config, under the tensor names of Kimi-K2.5
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import tiny_tokenizer

# Latent attention says nothing about the heads of a draft.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    # vLLM 0.32.0 makes the gate's correction bias, which the weights hold, for this method alone
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
VISION = {
    **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64},
    **{"pos_emb_height": 8, "pos_emb_width": 8},
}
# What Kimi-K2.5's preprocessor_config.json holds: vLLM starts with it though no prompt has an image.
MEDIA = {
    **{"in_patch_limit": 256, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    **{"merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512},
    **{"in_patch_limit_each_frame": 256, "in_patch_limit_video": None, "temporal_merge_kernel_size": 4},
    **{
        "sample_fps": 2.0,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    },
}


def shaped_verifier(path: Path, shape: str) -> Path:
    """Write it into `path` and return it: vocabulary 320, hidden 64, 6 layers, window 512, bf16."""
    import torch

    tokenizer = tiny_tokenizer()
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = _model(shape, tokenizer).to(torch.bfloat16)
    torch.random.set_rng_state(state)
    _still(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if shape == "kimi_k2":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    if shape == "kimi_k25":
        _as_published(path)
    return path


def draft_heads(shape: str) -> dict[str, int]:
    """`params.draft` beside such a verifier."""
    return {} if shape == "qwen3" else HEADS


def _model(shape: str, tokenizer: Any) -> Any:
    import transformers

    values = {
        **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6},
        **{"max_position_embeddings": 512, "initializer_range": 0.05, "num_attention_heads": 4},
        **{"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id},
        "pad_token_id": tokenizer.pad_token_id,
    }
    if shape == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values, num_key_value_heads=2, head_dim=32))
    text = transformers.DeepseekV3Config(**values, num_key_value_heads=4, **LATENT, **EXPERTS)
    if shape in ("deepseek_v3", "kimi_k2"):
        return transformers.DeepseekV3ForCausalLM(text)
    outer = {"image_token_id": 0, "projection_hidden_size": VISION["hidden_size"], "tie_word_embeddings": False}
    config = transformers.Kimi_K25Config(text_config=text.to_dict(), vision_config=VISION, **outer)
    return transformers.Kimi_K25ForConditionalGeneration(config)


def _still(model: Any) -> None:
    """Wider embedding and head, so that rounding seldom turns an answer or a token's way to the experts.

    With random weights of one width bf16 and float32 part at 20% of the tokens of the DeepSeek-V3 shape; so, at 2%, all
    of them within four bf16 steps of the top logit.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
        model.get_output_embeddings().weight.mul_(8)


# What stands beside text_config and vision_config there; vLLM 0.32.0 reads it where a draft is served.
OUTER = {
    **{"media_placeholder_token_id": 0, "use_unified_vision_chunk": True, "ignore_index": -100},
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
}
# Names as transformers 5.19 saves them -> as the model's own files have them and vLLM reads them.
PUBLISHED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}


def _as_published(path: Path) -> None:
    """The class and the tensors under the names of Kimi-K2.5's own files, and the processor's config beside them."""
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["KimiK25ForConditionalGeneration"], **OUTER}
    config["text_config"]["model_type"] = "kimi_k2"
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for saved, published in PUBLISHED.items():
        tensors = {name.replace(saved, published): tensor for name, tensor in tensors.items()}
    if "lm_head.weight" in tensors:
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": MEDIA}))


def quantise(path: Path, group_size: int = 32) -> Path:
    """Pack every projection of the verifier in `path` to symmetric INT4, as compressed-tensors does."""
    import torch
    from compressed_tensors.compressors import pack_to_int32
    from safetensors.torch import load_file, save_file

    packed = {}
    for name, weight_OI in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            packed[name] = weight_OI
            continue
        rows, columns = weight_OI.shape
        groups = weight_OI.float().view(rows, columns // group_size, group_size)
        scale = (groups.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16)
        integers = (groups / scale.float()).round().clamp(-8, 7).to(torch.int8).view(rows, columns)
        packed[f"{name}_packed"] = pack_to_int32(integers, 4)
        packed[f"{name}_scale"] = scale[..., 0].contiguous()
        packed[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(packed, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    config["quantization_config"] = {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
