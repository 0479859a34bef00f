"""The table of parameters that SGLang 0.5.23's EAGLE-3 classes have, and which checkpoint tensors fill each.

From srt/models/llama_eagle3.py (LlamaForCausalLMEagle3) and kimi_k25_eagle3.py (Eagle3DeepseekV2ForCausalLM) of the
wheel on PyPI. tests/sglang_witness.py builds the real classes and compares. What differs from vLLM's table:

    embed_tokens  loaded, then replaced by the verifier's in any case, unless target_hidden_size is another width
    lm_head       replaced by the verifier's where draft_vocab_size is null; none where the embedding is tied
    q, k, v       never a bias; o_proj has one with attention_bias or bias, fc with bias, the MLP never
    layers 1...   normed by hidden_norm; their input_layernorm is loaded and never used (vLLM: the reverse)
    d2t           read wherever it is, also beside equal vocabularies

Letters as in eagle3.checks.expected_tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from eagle3.checks.draft_config import DraftConfig
from eagle3.checks.expected_tensors import (
    CUTS_ROWS,
    EXACT,
    SHARED,
    UNINITIALISED,
    UNUSED,
    VOCABULARY,
    ZERO,
    Parameter,
    Part,
)

# srt/layers/linear.py, weight_loader of MergedColumnParallelLinear and RowParallelLinear with pad_or_narrow_weight: a
# larger tensor is cut, a smaller one filled up with zeros, both without a word.
PADS_ROWS = "pads rows"
PADS_COLUMNS = "pads columns"
HOT_TOKEN_ID = "hot_token_id"


def as_sglang_reads(config: DraftConfig) -> DraftConfig:
    """The record of the same config as SGLang's classes resolve it; defaults are transformers' in both servers."""
    raw, eagle = config.raw, config.raw.get("eagle_config", {})
    biased = bool(raw.get("attention_bias") or raw.get("bias"))
    mla = config.variant == "mla"
    listed = config.nested_ids or config.ids or (1, 2, 3)
    return replace(
        config,
        num_aux=len(listed) if mla else config.num_aux,
        use_aux=eagle.get("use_aux_hidden_state", True),
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm", False)),
        qkv_bias=False,
        o_bias=biased and not mla,
        mlp_bias=False,
    )


def shares_embedding(config: DraftConfig) -> bool:
    """set_embed: the draft keeps its own only where target_hidden_size is written and is not hidden_size."""
    return config.raw.get("target_hidden_size") in (None, config.hidden_size)


def shares_head(config: DraftConfig) -> bool:
    """load_lm_head_from_target: draft_vocab_size is null; the Llama class raises where the key is not written."""
    null = "draft_vocab_size" in (config.absent if config.variant == "mla" else config.nulls)
    return not is_tied(config) and null


def is_tied(config: DraftConfig) -> bool:
    return config.raw.get("tie_word_embeddings", False)


def sglang_parameters(config: DraftConfig, verifier_vocab_size: int, has_map: bool) -> tuple[Parameter, ...]:
    """Every parameter of the class for this config (see `as_sglang_reads`), vocabularies unpadded."""
    rows = [*_shared(config, verifier_vocab_size, has_map)]
    if config.variant == "mla":
        rows += _mla_layer(config)
    else:
        for index in range(config.num_hidden_layers):
            rows += _layer(config, index)
    return tuple(rows)


def _shared(config: DraftConfig, verifier_vocab_size: int, has_map: bool) -> Iterator[Parameter]:
    hidden, fc_in = config.hidden_size, config.target_hidden_size * config.num_aux
    embedding = SHARED if shares_embedding(config) else UNINITIALISED
    yield _one("model.embed_tokens.weight", (config.vocab_size, hidden), VOCABULARY, embedding)
    fc_loader = CUTS_ROWS if config.variant == "mla" else EXACT
    yield _one("model.fc.weight", (hidden, fc_in), fc_loader)
    if config.raw.get("bias"):
        yield _one("model.fc.bias", (hidden,), fc_loader)
    if config.norm_before_fc:
        yield _one("model.input_norm.weight", (fc_in,))
    if config.fc_norm:
        for index in range(config.num_aux):
            yield _one(f"model.fc_norm.{index}.weight", (config.target_hidden_size,))
    yield _one("model.norm.weight", (hidden,))
    if not is_tied(config):
        head = SHARED if shares_head(config) else UNINITIALISED
        yield _one("lm_head.weight", (config.draft_vocab_size, hidden), VOCABULARY, head)
    if has_map or config.draft_vocab_size != verifier_vocab_size:
        yield Parameter(HOT_TOKEN_ID, (Part("d2t", (config.draft_vocab_size,)),), EXACT, ZERO, integer=True)


def _layer(config: DraftConfig, index: int) -> Iterator[Parameter]:
    hidden, head = config.hidden_size, config.head_dim
    width = 2 * hidden if index == 0 else hidden
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    place = f"model.layers.{index}"
    yield _one(f"{place}.hidden_norm.weight", (hidden,))
    yield _one(f"{place}.input_layernorm.weight", (hidden,), absent=UNUSED if index else UNINITIALISED)
    yield _one(f"{place}.post_attention_layernorm.weight", (hidden,))
    qkv = {"q_proj": (q_rows, width), "k_proj": (kv_rows, width), "v_proj": (kv_rows, width)}
    yield _fused(f"{place}.self_attn", "qkv_proj", qkv, CUTS_ROWS)
    yield _one(f"{place}.self_attn.o_proj.weight", (hidden, q_rows), PADS_COLUMNS)
    if config.o_bias:
        yield _one(f"{place}.self_attn.o_proj.bias", (hidden,))
    yield from _mlp(config, place)


def _mla_layer(config: DraftConfig) -> Iterator[Parameter]:
    """Eagle3MLADecoderLayer: always one layer, always q_lora_rank; checkpoint names keep layers.0 (or midlayer)."""
    raw, hidden, heads = config.raw, config.hidden_size, config.num_attention_heads
    nope, rope = raw.get("qk_nope_head_dim", 128), raw.get("qk_rope_head_dim", 64)
    value, kv_rank = raw.get("v_head_dim", 128), raw.get("kv_lora_rank", 512)
    q_rank = raw.get("q_lora_rank", 1536)
    place, attn = "model.midlayer", "model.midlayer.self_attn"
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield _one(f"{place}.{name}.weight", (hidden,))
    latent = {"q_a_proj": (q_rank, 2 * hidden), "kv_a_proj_with_mqa": (kv_rank + rope, 2 * hidden)}
    yield _fused(attn, "fused_qkv_a_proj_with_mqa", latent, EXACT)
    yield _one(f"{attn}.q_a_layernorm.weight", (q_rank,))
    yield _one(f"{attn}.q_b_proj.weight", (heads * (nope + rope), q_rank), CUTS_ROWS)
    yield _one(f"{attn}.kv_a_layernorm.weight", (kv_rank,))
    yield _one(f"{attn}.kv_b_proj.weight", (heads * (nope + value), kv_rank), CUTS_ROWS)
    yield _one(f"{attn}.o_proj.weight", (hidden, heads * value), PADS_COLUMNS)
    yield from _mlp(config, place)


def _mlp(config: DraftConfig, place: str) -> Iterator[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield _fused(f"{place}.mlp", "gate_up_proj", dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)), PADS_ROWS)
    yield _one(f"{place}.mlp.down_proj.weight", (hidden, inner), PADS_COLUMNS)


def _one(name: str, shape: tuple[int, ...], loader: str = EXACT, absent: str = UNINITIALISED) -> Parameter:
    return Parameter(name, (Part(_stored(name), shape),), loader, absent)


def _fused(place: str, name: str, parts: Mapping[str, tuple[int, ...]], loader: str) -> Parameter:
    rows = tuple(Part(_stored(f"{place}.{part}.weight"), shape) for part, shape in parts.items())
    return Parameter(f"{place}.{name}.weight", rows, loader)


def _stored(name: str) -> str:
    """The canonical checkpoint name of a parameter's tensor."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
