"""The draft's architecture with every number explicit: from `params.draft`, else from the verifier's config.

Nothing is guessed. A number that neither names, or that means something else in the verifier (the head size of latent
attention, a rope that differs from layer to layer), is a problem that names the parameter to set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle3.params import DraftParams
from eagle3.problems import InvalidInput, Problem

# Verifiers whose final RMSNorm multiplies by 1 + w (transformers 5.19, the modeling files of these types).
# speculators 0.9.0 resolves that for other drafts only: its EAGLE-3 model multiplies by w (models/eagle3/core.py).
ONE_PLUS_W_NORMS = frozenset(
    {
        *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "t5gemma", "t5gemma2", "vaultgemma"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
        *("minimax_m3_vl", "minimax_m3_vl_text", "muse_glimmer", "muse_glimmer_text", "step3p5", "step3p7"),
    }
)
# A verifier's value -> the parameter of the draft that takes it.
TAKEN = ("num_attention_heads", "intermediate_size", "rms_norm_eps", "max_position_embeddings")
# Means of its own in latent attention, where it says nothing about a draft with plain heads.
LATENT = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class DraftArchitecture:
    """What the checkpoint's config will say. `aux_layer_ids`: id k = state entering decoder layer k of the verifier."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    sliding_window: int | None
    attention_bias: bool
    mlp_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    bos_token_id: int | None
    eos_token_id: int | list[int] | None

    @property
    def layer_types(self) -> list[str]:
        """One entry per layer; `sliding_window: null` is full attention (speculators' own default is a window)."""
        return ["full_attention" if self.sliding_window is None else "sliding_attention"] * self.num_hidden_layers

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids), "layer_types": self.layer_types}


def resolve_architecture(
    params: DraftParams, text_config: dict[str, Any], draft_vocab_size: int, aux_layer_ids: list[int]
) -> DraftArchitecture:
    """The architecture that `params` asks for beside a verifier with `text_config`.

    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, ...}
    >>> resolve_architecture(params, config, 128, [1, 3, 5]).head_dim      # params.head_dim is null, config has none
    16

    Raises `InvalidInput` with every problem: norms that training would compute wrongly, numbers that nobody gives,
    heads that do not divide.
    """
    filled = _fill(params, text_config)
    problems = [*_norm_problems(text_config), *_missing_problems(filled, text_config)]
    if not problems:
        problems += _geometry_problems(filled, text_config, draft_vocab_size)
    if problems:
        raise InvalidInput(*problems)
    taken = {name: text_config[name] for name in ("hidden_size", "vocab_size")}
    taken |= {name: text_config.get(name) for name in ("bos_token_id", "eos_token_id")}
    return DraftArchitecture(
        **taken, draft_vocab_size=draft_vocab_size, aux_layer_ids=tuple(aux_layer_ids), **asdict(filled)
    )


def verifier_rope(text_config: dict[str, Any]) -> dict[str, Any] | None:
    """The verifier's rope as one flat mapping with `rope_type` and `rope_theta`, or None where it has no such thing.

    transformers 5 writes `rope_parameters`; older configs `rope_theta` beside `rope_scaling` (whose `type` is an older
    spelling of `rope_type`). Rope that differs between layers, covers a part of the head or has sections is not flat.
    """
    rope = text_config.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": text_config.get("rope_theta"), **(text_config.get("rope_scaling") or {"type": "default"})}
    if not isinstance(rope, dict):
        return None
    flat = {key: value for key, value in rope.items() if key != "type"}
    flat.setdefault("rope_type", rope.get("type"))
    partial = flat.pop("partial_rotary_factor", text_config.get("partial_rotary_factor"))
    usable = flat["rope_type"] is not None and flat.get("rope_theta") is not None and partial in (None, 1, 1.0)
    return flat if usable and not any(isinstance(value, (dict, list)) for value in flat.values()) else None


def _fill(params: DraftParams, text_config: dict[str, Any]) -> DraftParams:
    """`params` with each null replaced by the verifier's value where it has one that means the same."""
    known: dict[str, Any] = {name: text_config.get(name) for name in TAKEN}
    known["rope_parameters"] = verifier_rope(text_config)
    known["num_key_value_heads"] = text_config.get("num_key_value_heads", known["num_attention_heads"])
    heads, hidden = known["num_attention_heads"], text_config.get("hidden_size")
    known["head_dim"] = text_config.get("head_dim")
    if known["head_dim"] is None and heads and hidden and hidden % heads == 0:
        known["head_dim"] = hidden // heads
    if text_config.get("kv_lora_rank"):
        known.update(dict.fromkeys(LATENT))
    return replace(params, **{name: value for name, value in known.items() if getattr(params, name) is None})


def _norm_problems(text_config: dict[str, Any]) -> Iterator[Problem]:
    model_type = text_config.get("model_type")
    if model_type in ONE_PLUS_W_NORMS:
        yield Problem(
            "verifier-norm",
            "verifier.source",
            f"model_type {model_type}, whose final norm multiplies by 1 + w",
            "a verifier whose final norm multiplies by w",
            "choose another verifier",
            "speculators 0.9.0 would compute its EAGLE-3 targets with x * w and train towards wrong logits",
        )


def _missing_problems(filled: DraftParams, text_config: dict[str, Any]) -> Iterator[Problem]:
    latent = bool(text_config.get("kv_lora_rank"))
    for name in (*TAKEN, "num_key_value_heads", "head_dim", "rope_parameters"):
        if getattr(filled, name) is None:
            reason = "which has latent attention" if latent and name in LATENT else "which has no such single value"
            yield Problem(
                "draft-architecture",
                f"draft.{name}",
                f"null, to be taken from the verifier ({text_config.get('model_type')}), {reason}",
                "a value",
                f"set draft.{name} in params.yaml",
            )


def _geometry_problems(filled: DraftParams, text_config: dict[str, Any], draft_vocab_size: int) -> Iterator[Problem]:
    heads, kv_heads, head_dim = filled.num_attention_heads, filled.num_key_value_heads, filled.head_dim
    assert heads is not None
    assert kv_heads is not None
    assert head_dim is not None
    if heads % kv_heads:
        yield Problem(
            "draft-architecture",
            "draft.num_key_value_heads",
            f"{kv_heads}, with {heads} attention heads",
            "a divisor of the number of attention heads",
            "set draft.num_attention_heads and draft.num_key_value_heads so that they divide",
        )
    if head_dim % 2:
        yield Problem(
            "draft-architecture",
            "draft.head_dim",
            str(head_dim),
            "an even number, as rope turns pairs",
            "set draft.head_dim in params.yaml",
        )
    if draft_vocab_size > text_config["vocab_size"]:
        yield Problem(
            "draft-architecture",
            "vocab_map.draft_vocab_size",
            str(draft_vocab_size),
            f"at most the verifier's vocabulary, {text_config['vocab_size']}",
            "lower vocab_map.draft_vocab_size",
        )
