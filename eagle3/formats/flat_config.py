"""speculators' nested config -> the flat `LlamaForCausalLMEagle3` config that vLLM and SGLang read.

A pure function over dictionaries. Every key of the nested config is either kept, or dropped by name, or refused; a
value that is not there is refused too, since each server would fill it with a default of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eagle3.formats.json_files import printable, spelled
from eagle3.layer_ids import sglang_list
from eagle3.problems import InvalidInput, Problem

# vLLM 0.32.0 builds the same class from a flat config of these names (vllm/model_executor/models/registry.py).
FLAT_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
NESTED_ARCHITECTURES = ("Eagle3DraftModel", "Eagle3Speculator")

# Kept as they are, from the top level of the nested config. Each changes what the server computes.
KEPT = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Dropped: the library's own bookkeeping, without meaning for a server.
DROPPED = frozenset(
    {
        "auto_map",  # names config.py, which a server would have to trust and run
        "embed_requires_grad",
        "has_no_defaults_at_init",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "transformers_version",
    }
)
HANDLED = frozenset(
    {
        "architectures",
        "dtype",
        "eagle_aux_hidden_state_layer_ids",
        "target_hidden_size",
        "tie_word_embeddings",
        "torch_dtype",
        "transformer_layer_config",
    }
)
# transformer_layer_config is a LlamaConfig or Qwen3Config as transformers writes it.
LAYER_REQUIRED = (
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
LAYER_KEPT = frozenset(LAYER_REQUIRED) | {
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "num_aux_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_cache",
    "use_sliding_window",
}
LAYER_DROPPED = frozenset({"architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version"})
SILENT = "vLLM 0.32.0 would load the draft with another value, and only acceptance would fall"


def flatten(nested: dict[str, Any]) -> dict[str, Any]:
    """The flat config of a nested one; `InvalidInput` with everything that is unknown, absent or contradictory.

    Layer ids: the top-level list keeps vLLM's numbering, which both of its runners use whenever the list is there
    (vllm/v1/worker/gpu_model_runner.py, _get_eagle3_aux_layers_from_config; vllm/v1/worker/gpu/spec_decode/eagle/
    eagle3_utils.py, get_eagle3_aux_layers_from_config). `num_aux_hidden_states` sets the width of fc, which the
    top-level list does not (llama_eagle3.py, LlamaModel). The list in `eagle_config` is read by SGLang alone, in its
    own numbering (sglang 0.5.23, spec_aux_hidden_state.py and models/llama.py): output of layer k - 1 = input of k.

    >>> flatten({..., "eagle_aux_hidden_state_layer_ids": [2, 30, 58]})["eagle_config"]
    {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True, "norm_before_fc": True}
    """
    problems = list(_nested_problems(nested))
    if problems:
        raise InvalidInput(*problems)
    layer = nested["transformer_layer_config"]
    ids = nested["eagle_aux_hidden_state_layer_ids"]
    dtype = _dtype(nested)
    flat = {key: layer[key] for key in layer if key in LAYER_KEPT and layer[key] is not None}
    flat |= {key: nested[key] for key in KEPT}
    if nested.get("target_hidden_size") is not None:
        flat["target_hidden_size"] = nested["target_hidden_size"]
    return flat | {
        "architectures": [FLAT_ARCHITECTURES[layer["model_type"]]],
        "model_type": layer["model_type"],
        "dtype": dtype,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "num_aux_hidden_states": len(ids),
        "eagle_config": {
            **_sglang_ids(ids, nested),
            "use_aux_hidden_state": True,
            "norm_before_fc": nested["norm_before_fc"],
        },
    }


def _sglang_ids(ids: list[int], nested: dict[str, Any]) -> dict[str, list[int]]:
    """The list for SGLang, which depends on the verifier's class; left out where SGLang has none for these layers."""
    try:
        return {"eagle_aux_hidden_state_layer_ids": sglang_list(ids, verifier_architectures(nested))}
    except InvalidInput:
        return {}


def verifier_architectures(nested: dict[str, Any]) -> list[str]:
    """The class names that speculators notes of the verifier; none where it noted none."""
    config = nested.get("speculators_config")
    verifier = config.get("verifier") if isinstance(config, dict) else None
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _dtype(nested: dict[str, Any]) -> Any:
    """transformers 5 writes `dtype`, older versions `torch_dtype`; `dtype` wins."""
    return nested["dtype"] if nested.get("dtype") is not None else nested.get("torch_dtype")


def _nested_problems(nested: dict[str, Any]) -> Iterable[Problem]:
    known = DROPPED | HANDLED | set(KEPT)
    for key in sorted(set(nested) - known):
        yield _problem("unknown-key", key, nested[key], "a key of speculators' Eagle3DraftModel")
    for key in (*KEPT, "eagle_aux_hidden_state_layer_ids"):
        if nested.get(key) is None:
            yield _problem("missing-key", key, nested.get(key), "a value", SILENT)
    if not isinstance(_dtype(nested), str):
        yield _problem("missing-key", "dtype", _dtype(nested), "the name of the tensors' dtype")
    if nested.get("speculators_model_type") != "eagle3":
        yield _problem("other-drafter", "speculators_model_type", nested.get("speculators_model_type"), '"eagle3"')
    if nested.get("architectures") not in [[name] for name in NESTED_ARCHITECTURES]:
        expected = " or ".join(f'["{name}"]' for name in NESTED_ARCHITECTURES)
        yield _problem("other-drafter", "architectures", nested.get("architectures"), expected)
    if nested.get("tie_word_embeddings", False) is not False:
        yield _problem(
            "tied", "tie_word_embeddings", nested["tie_word_embeddings"], "false: the draft has its own head"
        )
    layer = nested.get("transformer_layer_config")
    if isinstance(layer, dict):
        yield from _layer_problems(layer)
    else:
        yield _problem("missing-key", "transformer_layer_config", layer, "the config of the draft's layers")
    yield from _ids_problems(nested, layer if isinstance(layer, dict) else {})


def _layer_problems(layer: dict[str, Any]) -> Iterable[Problem]:
    prefix = "transformer_layer_config"
    for key in sorted(set(layer) - LAYER_KEPT - LAYER_DROPPED):
        yield _problem("unknown-key", f"{prefix}.{key}", layer[key], "a key of a Llama or Qwen3 config")
    for key in LAYER_REQUIRED:
        if layer.get(key) is None:
            yield _problem("missing-key", f"{prefix}.{key}", layer.get(key), "a value", SILENT)
    if layer.get("model_type") is not None and layer["model_type"] not in tuple(FLAT_ARCHITECTURES):
        yield _problem("other-layer", f"{prefix}.model_type", layer["model_type"], "llama or qwen3")
    if layer.get("rope_parameters") is None and layer.get("rope_theta") is None:
        yield _problem("missing-key", f"{prefix}.rope_parameters", None, "rope_parameters or rope_theta", SILENT)


def _ids_problems(nested: dict[str, Any], layer: dict[str, Any]) -> Iterable[Problem]:
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return
    key = "eagle_aux_hidden_state_layer_ids"
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        yield _problem("layer-ids", key, ids, "a list of layer numbers")
    elif ids != sorted(set(ids)):
        yield _problem("layer-ids", key, ids, f"{sorted(set(ids))}: vLLM sorts and drops repetitions")
    elif layer.get("num_aux_hidden_states") not in (None, len(ids)):
        found = layer["num_aux_hidden_states"]
        yield _problem(
            "layer-ids", "transformer_layer_config.num_aux_hidden_states", found, f"{len(ids)}, as many as {key}"
        )


def _problem(code: str, where: str, found: Any, expected: str, consequence: str = "") -> Problem:
    value = "absent or null" if found is None else spelled(found)
    return Problem(code, printable(where), value, expected, f"correct {printable(where)} in config.json", consequence)
