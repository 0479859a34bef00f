"""The table of parameters that vLLM 0.32.0's EAGLE-3 classes have, and which checkpoint tensors fill each.

One row a parameter, from vllm/model_executor/models/llama_eagle3.py (class Eagle3LlamaForCausalLM), qwen3_eagle3.py and
deepseek_eagle3.py. tests/test_engine_load.py builds the real classes and compares.

    H hidden_size, T target_hidden_size, A captured layers, V vocab_size, K draft_vocab_size, I intermediate_size,
    D head_dim, heads and kv heads; layer 0 reads [embedding; hidden state], 2H wide, every later layer H.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eagle3.checks.draft_config import DraftConfig

# How a loader treats a tensor of another shape (0.32.0): parameter.py and linear.py for linear layers,
# vocab_parallel_embedding.py for vocabularies, weight_utils.py default_weight_loader for the rest.
EXACT = "exact"  # any other shape is refused
CUTS_ROWS = "cuts rows"  # a tensor with more rows is cut without a word, one with fewer is refused
CUTS_COLUMNS = "cuts columns"  # the same for columns
VOCABULARY = "vocabulary"  # rows exact, columns broadcast from 1

UNINITIALISED = "uninitialised"
SHARED = "shared"
ZERO = "zero"
UNUSED = "unused"  # the class has it and never computes with it


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor (canonical name) and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter of the server's class. `absent` says what it holds when no tensor fills it."""

    name: str
    parts: tuple[Part, ...]
    loader: str = EXACT
    absent: str = UNINITIALISED
    integer: bool = False


def expected_parameters(config: DraftConfig, verifier_vocab_size: int) -> tuple[Parameter, ...]:
    """Every parameter of the class for this config, without the padding of vocabularies to multiples of 64."""
    rows = [*_shared(config, verifier_vocab_size)]
    for index in range(config.num_hidden_layers):
        rows += _mla_layer(config, index) if config.variant == "mla" else _layer(config, index)
    return tuple(rows)


def _shared(config: DraftConfig, verifier_vocab_size: int) -> Iterator[Parameter]:
    hidden, fc_in = config.hidden_size, config.target_hidden_size * config.num_aux
    yield _one("model", "embed_tokens.weight", (config.vocab_size, hidden), VOCABULARY, SHARED)
    if config.use_aux:
        if config.norm_before_fc:
            yield _one("model", "input_norm.weight", (fc_in,))
        if config.fc_norm:
            for index in range(config.num_aux):
                yield _one("model", f"fc_norm.{index}.weight", (config.target_hidden_size,))
        yield _one("model", "fc.weight", (hidden, fc_in))
    yield _one("model", "norm.weight", (hidden,))
    yield _one("", "lm_head.weight", (config.draft_vocab_size, hidden), VOCABULARY, SHARED)
    if config.draft_vocab_size != verifier_vocab_size:
        part = Part("d2t", (config.draft_vocab_size,))
        yield Parameter("draft_id_to_target_id", (part,), EXACT, ZERO, integer=True)


def _layer(config: DraftConfig, index: int) -> Iterator[Parameter]:
    """LlamaDecoderLayer and Qwen3Eagle3DecoderLayer: fused q/k/v and gate/up, hidden_norm in every layer."""
    hidden, head = config.hidden_size, config.head_dim
    width = 2 * hidden if index == 0 else hidden
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    place = f"layers.{index}"
    yield from _norms(place, hidden, index)
    qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    yield _fused(f"{place}.self_attn", "qkv_proj", "weight", {name: (rows, width) for name, rows in qkv.items()})
    if config.qkv_bias:
        yield _fused(f"{place}.self_attn", "qkv_proj", "bias", {name: (rows,) for name, rows in qkv.items()})
    yield _one("model", f"{place}.self_attn.o_proj.weight", (hidden, q_rows), CUTS_COLUMNS)
    if config.o_bias:
        yield _one("model", f"{place}.self_attn.o_proj.bias", (hidden,))
    if config.variant == "qwen3":
        yield _one("model", f"{place}.self_attn.q_norm.weight", (head,))
        yield _one("model", f"{place}.self_attn.k_norm.weight", (head,))
    yield from _mlp(config, place)


def _mla_layer(config: DraftConfig, index: int) -> Iterator[Parameter]:
    """DeepseekV2Eagle3DecoderLayer: fused q_a/kv_a where q_lora_rank is set, always a dense MLP."""
    raw, hidden, heads = config.raw, config.hidden_size, config.num_attention_heads
    nope, rope = raw.get("qk_nope_head_dim", 128), raw.get("qk_rope_head_dim", 64)
    value, kv_rank = raw.get("v_head_dim", 128), raw.get("kv_lora_rank", 512)
    q_rank = raw.get("q_lora_rank", 1536)
    width = 2 * hidden if index == 0 else hidden
    place = f"layers.{index}"
    attn = f"{place}.self_attn"
    yield from _norms(place, hidden, index)
    kv_a = (kv_rank + rope, width)
    if q_rank:
        yield _fused(attn, "fused_qkv_a_proj", "weight", {"q_a_proj": (q_rank, width), "kv_a_proj_with_mqa": kv_a})
        yield _one("model", f"{attn}.q_a_layernorm.weight", (q_rank,))
        yield _one("model", f"{attn}.q_b_proj.weight", (heads * (nope + rope), q_rank), CUTS_ROWS)
    else:
        yield _one("model", f"{attn}.q_proj.weight", (heads * (nope + rope), width), CUTS_ROWS)
        yield _one("model", f"{attn}.kv_a_proj_with_mqa.weight", kv_a)
    yield _one("model", f"{attn}.kv_a_layernorm.weight", (kv_rank,))
    yield _one("model", f"{attn}.kv_b_proj.weight", (heads * (nope + value), kv_rank), CUTS_ROWS)
    yield _one("model", f"{attn}.o_proj.weight", (hidden, heads * value), CUTS_COLUMNS)
    yield from _mlp(config, place)


def _norms(place: str, hidden: int, index: int) -> Iterator[Parameter]:
    """Every layer has the three; the forward of a later layer leaves hidden_norm out, and speculators writes none."""
    yield _one("model", f"{place}.hidden_norm.weight", (hidden,), absent=UNUSED if index else UNINITIALISED)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _one("model", f"{place}.{name}.weight", (hidden,))


def _mlp(config: DraftConfig, place: str) -> Iterator[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    pair = ("gate_proj", "up_proj")
    yield _fused(f"{place}.mlp", "gate_up_proj", "weight", dict.fromkeys(pair, (inner, hidden)))
    if config.mlp_bias:
        yield _fused(f"{place}.mlp", "gate_up_proj", "bias", dict.fromkeys(pair, (inner,)))
    yield _one("model", f"{place}.mlp.down_proj.weight", (hidden, inner), CUTS_COLUMNS)
    if config.mlp_bias:
        yield _one("model", f"{place}.mlp.down_proj.bias", (hidden,))


def _one(prefix: str, name: str, shape: tuple[int, ...], loader: str = EXACT, absent: str = UNINITIALISED) -> Parameter:
    return Parameter(f"{prefix}.{name}" if prefix else name, (Part(name, shape),), loader, absent)


def _fused(place: str, name: str, kind: str, parts: dict[str, tuple[int, ...]]) -> Parameter:
    rows = tuple(Part(f"{place}.{part}.{kind}", shape) for part, shape in parts.items())
    return Parameter(f"model.{place}.{name}.{kind}", rows, CUTS_ROWS)
