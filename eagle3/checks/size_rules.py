"""Rules about what a draft's config says of vocabularies, widths, positions, rotary embedding and attention windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eagle3.checks.config_rules import VLLM, Given, Rule
from eagle3.checks.servers import SERVERS
from eagle3.formats.json_files import spelled
from eagle3.problems import Fix, Problem, repairable

ORIGINAL = "original_max_position_embeddings"
# Types whose table depends on the length that positions were first trained on.
SCALED_FROM = ("yarn", "longrope", "dynamic", "deepseek_yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
# rope_type -> the parameters that it needs (transformers 5.19.0, modeling_rope_utils.py, _validate_*_rope_parameters)
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "ntk": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "deepseek_yarn": ("factor",),
}


def sizes_are_given(given: Given) -> Iterator[Problem]:
    """Every size is written, not left to a default of the config class.

    Source: transformers 5.19.0, LlamaConfig (hidden_size 4096, 32 layers, 32 heads, ...).
    """
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if key in given.config.absent:
            default = getattr(given.config, key)
            yield given.problem("size", key, None, "a size", f"write {key}", f"{given.server.name} takes {default}")
    if "head_dim" in given.config.absent and not given.tensors and given.config.variant != "mla":
        consequence = f"{given.server.name} takes {given.config.head_dim}, and no tensors were given to compare with"
        yield given.warning("size", "head_dim", None, "a size", "write head_dim", consequence)


def vocabulary_is_the_verifiers(given: Given) -> Iterator[Problem]:
    """`vocab_size` is the verifier's config's, not the tokenizer's length and not the draft's.

    Source: llama_eagle3.py, compute_logits (width of the scatter) and VocabParallelEmbedding.
    """
    config, verifier = given.config, given.verifier
    if verifier and verifier.vocab_size and config.vocab_size != verifier.vocab_size:
        consequence = (
            f"{VLLM} scatters the draft's logits into {config.vocab_size} columns for a verifier of another width"
        )
        rows = {given.shape(name)[0] for name in ("embed_tokens.weight", "t2d") if given.shape(name)}
        change = given.write("vocab_size", verifier.vocab_size)
        fix: Fix = change
        if rows - {verifier.vocab_size}:
            fix = f"rebuild embed_tokens and t2d with {verifier.vocab_size} rows, then {change.told()}"
        found, expected = config.vocab_size, f"{verifier.vocab_size}, the verifier's"
        yield given.problem("vocabulary", "vocab_size", found, expected, fix, consequence)


def draft_vocabulary_fits(given: Given) -> Iterator[Problem]:
    """`draft_vocab_size` is at most the verifier's vocabulary.

    Source: llama_eagle3.py, Eagle3LlamaForCausalLM.__init__ and compute_logits.
    """
    config = given.config
    if config.draft_vocab_size > config.vocab_size:
        consequence = f"{VLLM} writes logits to columns that do not exist"
        expected = f"at most vocab_size {config.vocab_size}"
        yield given.problem(
            "vocabulary", "draft_vocab_size", config.draft_vocab_size, expected, "correct it", consequence
        )
    if "draft_vocab_size" in config.absent and not given.tensors:
        consequence = f"{VLLM} takes vocab_size, {config.vocab_size}, and no tensors were given to compare with"
        yield given.warning("vocabulary", "draft_vocab_size", None, "rows of lm_head", "write it", consequence)


def target_width_is_the_verifiers(given: Given) -> Iterator[Problem]:
    """`target_hidden_size` is the verifier's hidden size wherever the draft is narrower or wider.

    Source: llama_eagle3.py, LlamaModel.fc_input_size; llm_base_proposer.py, _maybe_share_embeddings.
    """
    config, verifier = given.config, given.verifier
    if not verifier or not verifier.hidden_size or config.target_hidden_size == verifier.hidden_size:
        return
    given_key = "target_hidden_size" if "target_hidden_size" not in config.absent else "hidden_size"
    found = None if given_key == "hidden_size" else config.target_hidden_size
    width = config.target_hidden_size
    consequence = f"{given.server.name} builds fc for states of width {width}: AssertionError, or a wrong product"
    fix: Fix = given.write("target_hidden_size", verifier.hidden_size)
    fc = given.shape("fc.weight")
    if len(fc) == 2 and fc[1] % verifier.hidden_size:
        fix = f"train for this verifier: fc.weight takes {fc[1]}, no multiple of {verifier.hidden_size}"
    expected = f"{verifier.hidden_size}, the verifier's hidden_size"
    yield given.problem("width", "target_hidden_size", found, expected, fix, consequence)


def rope_is_given_once(given: Given) -> Iterator[Problem]:
    """The rotary embedding is written once: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Source: transformers 5.19.0, modeling_rope_utils.py, convert_rope_params_to_dict: rope_scaling replaces
    rope_parameters whole, a theta inside wins over the one outside, and neither gives theta 10000.
    """
    raw = given.config.raw
    new, old, theta = raw.get("rope_parameters"), raw.get("rope_scaling"), raw.get("rope_theta")
    if new and old:
        consequence = "transformers 5.19.0 takes rope_scaling and throws rope_parameters away"
        if new == old:
            fix = given.remove("rope_scaling")
            yield given.warning("rope", "rope_scaling", spelled(old), "only one of the two", fix, consequence)
        else:
            words = "keep the one that the draft was trained with, remove the other"
            yield given.problem("rope", "rope_scaling", spelled(old), "only one of the two", words, consequence)
    rope = old or new or {}
    inner = rope.get("rope_theta")
    if theta is not None and inner is not None and theta != inner:
        consequence = f"the theta inside wins: {inner}"
        words = f"write the theta of the training in both places; {inner} keeps what is served now"
        yield given.problem("rope", "rope_theta", theta, f"{inner}, as in the rope parameters", words, consequence)
    if theta is None and inner is None:
        consequence = f"{given.server.name} takes theta 10000"
        yield given.warning("rope", "rope_theta", None, "the theta of the training", "write it", consequence)


def rope_is_complete(given: Given) -> Iterator[Problem]:
    """The rope type is known and has the parameters that it needs; M-RoPE is not meant for text.

    Source: transformers 5.19.0, modeling_rope_utils.py; vllm/transformers_utils/config.py, patch_legacy_rope_type.
    """
    key = "rope_scaling" if given.config.raw.get("rope_scaling") else "rope_parameters"
    rope: dict[str, Any] = given.config.raw.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if {"rope_type", "type"} <= set(rope) and rope["rope_type"] != rope["type"]:
        pair = f"rope_type {spelled(rope['rope_type'])}, type {spelled(rope['type'])}"
        yield given.problem(
            "rope", key, pair, "one of them", "remove type", f"{given.server.name} refuses the contradiction"
        )
    elif "mrope_section" in rope or kind == "mrope":
        consequence = f"{given.server.name} builds a multimodal rotary embedding in the draft"
        fix = "keep it only if the draft was trained with 3-D positions; for text remove it"
        yield given.warning("rope", key, "M-RoPE", "rope of a text model", fix, consequence)
    elif kind == "su":
        taken = given.server is SERVERS["vllm"]
        consequence = f"{VLLM} takes it as longrope; other readers do not know it"
        if not taken:
            consequence = f"{given.server.name} refuses: ValueError, Unknown RoPE scaling type su"
        where = f"{key}.{'rope_type' if 'rope_type' in rope else 'type'}"
        report = given.warning if taken else given.problem
        yield report("rope", where, "su", '"longrope"', given.write(where, "longrope"), consequence)
    elif not isinstance(kind, str) or kind not in ROPE_TYPES:
        expected = ", ".join(ROPE_TYPES)
        yield given.problem(
            "rope", f"{key}.rope_type", spelled(kind), expected, "correct it", f"{given.server.name} refuses it"
        )
    else:
        for name in ROPE_TYPES[kind]:
            if name not in rope:
                consequence = (
                    f"transformers 5.19.0 requires it for {kind}, or takes the config's max_position_embeddings"
                )
                yield given.problem("rope", f"{key}.{name}", None, "a value", "write it", consequence)
        yield from _rope_numbers(given, key, rope)
        if kind in SCALED_FROM and ORIGINAL not in rope:
            consequence = "transformers 5.19.0 takes max_position_embeddings for it: right only where the training did"
            fix = "write the length that the verifier was first trained on"
            yield given.warning("rope", f"{key}.{ORIGINAL}", None, "a length", fix, consequence)


def _rope_numbers(given: Given, key: str, rope: dict[str, Any]) -> Iterator[Problem]:
    """What the server computes with: numbers, the factor at least 1, the original length an integer."""
    for name in ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL, "rope_theta", "attention_factor"):
        value = rope.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or value <= 0 or (name == ORIGINAL and type(value) is not int):
            expected = "a positive integer" if name == ORIGINAL else "a positive number"
            consequence = f"{given.server.name} computes with it: a TypeError, or a wrong table"
            yield given.problem(
                "rope", f"{key}.{name}", value, expected, "write the value of the training", consequence
            )
        elif name == "factor" and value < 1:
            consequence = "transformers 5.19.0 warns: the positions would be stretched, not compressed"
            yield given.warning("rope", f"{key}.{name}", value, "1 or more", "compare with the verifier's", consequence)


def positions_cover_the_verifier(given: Given) -> Iterator[Problem]:
    """`max_position_embeddings` reaches as far as the verifier's.

    Source: vllm/config/speculative.py, _maybe_override_draft_max_position_embeddings (vllm#48894).
    """
    config, verifier = given.config, given.verifier
    found = config.raw.get("max_position_embeddings")
    if found is None and config.nested:
        consequence = f"{VLLM} has no default in this format: tables of 8192 positions, or an AttributeError"
        yield given.problem("positions", "max_position_embeddings", None, "a length", _length(given), consequence)
    elif found is None:
        consequence = f"{VLLM} takes 2048, and raises it to the verifier's length"
        yield given.warning(
            "positions", "max_position_embeddings", None, "the verifier's length", _length(given), consequence
        )
    elif verifier and verifier.max_position_embeddings and found < verifier.max_position_embeddings:
        right = verifier.max_position_embeddings
        consequence = f"{VLLM} raises it by itself; older versions and SGLang crash or slow down beyond {found} tokens"
        warning = given.warning(
            "positions", "max_position_embeddings", found, f"{right}, the verifier's", "", consequence
        )
        change = given.write("max_position_embeddings", right)
        if _positions_scale_the_rope(given):
            fix = f"{change.told()} together with {ORIGINAL} of the rope: without that the table would change too"
            yield replace(warning, fix=fix)
        else:
            yield repairable(replace(warning, fix="rotary embedding has no weights"), change)


def _positions_scale_the_rope(given: Given) -> bool:
    """Whether max_position_embeddings stands in for the rope's own length."""
    rope = given.config.raw.get("rope_scaling") or given.config.raw.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type")) in SCALED_FROM and ORIGINAL not in rope


def _length(given: Given) -> Fix:
    if _positions_scale_the_rope(given):
        return "write it, with the rope's original_max_position_embeddings"
    right = given.verifier.max_position_embeddings if given.verifier else None
    return given.write("max_position_embeddings", right) if right else "write it"


def layer_types_fit(given: Given) -> Iterator[Problem]:
    """`layer_types` has one entry a layer, full_attention or sliding_attention, and a window where one slides.

    Source: transformers 5.19.0, validate_layer_type; vllm/model_executor/models/llama.py, LlamaAttention.
    """
    raw, layers = given.config.raw, given.config.num_hidden_layers
    types, window = raw.get("layer_types"), raw.get("sliding_window")
    if types is None:
        if raw.get("use_sliding_window") and window:
            consequence = f"{VLLM} builds full attention: a window applies only where layer_types says so"
            fix = f"write layer_types: {['sliding_attention'] * min(layers, 4)}"
            yield given.problem("window", "layer_types", None, "sliding_attention for each layer", fix, consequence)
        return
    if len(types) != layers:
        consequence = "transformers 5.19.0 refuses: as many entries as layers"
        yield given.problem("window", "layer_types", types, f"{layers} entries", "correct it", consequence)
    unknown = [name for name in types if name not in LAYER_TYPES]
    if unknown:
        consequence = f"{VLLM} builds full attention, or transformers 5.19.0 refuses the name"
        yield given.problem("window", "layer_types", unknown, " or ".join(LAYER_TYPES), "correct it", consequence)
    if "sliding_attention" in types and not window:
        consequence = f"{VLLM}: AttributeError, sliding_window"
        yield given.problem("window", "sliding_window", None, "tokens of the window", "write it", consequence)
    if raw.get("use_sliding_window") is False and "sliding_attention" in types and given.config.variant == "qwen3":
        consequence = "transformers 5.19.0 sets sliding_window to null: the layer gets full attention"
        yield given.problem("window", "use_sliding_window", False, "true", "write true", consequence)


SIZE_RULES: tuple[Rule, ...] = (
    sizes_are_given,
    vocabulary_is_the_verifiers,
    draft_vocabulary_fits,
    target_width_is_the_verifiers,
    rope_is_given_once,
    rope_is_complete,
    positions_cover_the_verifier,
    layer_types_fit,
)
