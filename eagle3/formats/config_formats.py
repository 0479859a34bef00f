"""Which kind of checkpoint this is, told from the content of its config and its tensor names, never from file names.

EAGLE-3 drafts come flat (SafeAILab, SpecForge, ModelOpt, TorchSpec) or nested (speculators). Their neighbours share
field names with them and are named and refused, because the rules of EAGLE-3 would misjudge them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle3.formats.flat_config import DROPPED, HANDLED, KEPT
from eagle3.formats.json_files import printable, spelled
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import Change, Problem, repairable

# vllm/model_executor/models/registry.py (0.32.0): class name in `architectures` -> the draft class that is built.
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
# vllm/transformers_utils/configs/speculators/algos.py, update_eagle3
NESTED_LAYER_TYPES = {"llama": "llama", "qwen3": "qwen3"}
OTHER_DRAFTERS = {
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dflash2": "DFlash",
    "dspark": "DSpark",
    "eagle": "EAGLE-1/2",
    "mtp": "MTP",
}
VLLM = "vLLM 0.32.0"
MANY = 40
NESTED_MARKS = ("speculators_config", "speculators_model_type", "transformer_layer_config")
# Read from a nested config by speculators or vLLM, beside what flatten keeps.
NESTED_KNOWN = DROPPED | HANDLED | set(KEPT) | {"model_type", "use_cache", "_name_or_path", "return_dict"}

# Read by no server when it computes a draft's logits; anything else is reported.
WITHOUT_EFFECT = {
    "_attn_implementation", "_name_or_path", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id",
    "decoder_start_token_id", "eos_token_id", "first_k_dense_replace", "has_no_defaults_at_init", "max_window_layers",
    "moe_layer_freq", "n_routed_experts", "name_or_path", "pad_token_id", "pretraining_tp", "target_model_type",
    "target_model_name_or_path", "torchspec_version", "transformers_version", "unk_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class RecognisedConfig:
    """`raw` is the flat config that vLLM derives; for a flat file that is the file itself.

    trained_for: the classes of the verifier that a nested config names.
    """

    variant: str
    nested: bool
    raw: dict[str, Any]
    trained_for: tuple[str, ...] = ()


def canonical(name: str) -> str:
    """`midlayer.` and `layers.0.` name the same layer in vLLM 0.32.0 (llama_eagle3.py, hf_to_vllm_mapper)."""
    return name.replace("midlayer.", "layers.0.", 1)


def recognise(
    config: dict[str, Any], tensors: Mapping[str, TensorHeader], server: str = VLLM
) -> tuple[RecognisedConfig | None, list[Problem]]:
    """The format, or None with the problem that names what the checkpoint is instead.

    What is wrong within the nested format is said for vLLM, the one server that reads it.
    """
    nested = any(mark in config for mark in NESTED_MARKS)
    other = other_drafter(config, tensors)
    if other:
        return None, [_other(*other, server)]
    if not nested:
        return _flat(config, tensors)
    recognised, problems = _nested(config)
    return recognised, problems if server == VLLM or recognised is None else []


def other_drafter(config: dict[str, Any], tensors: Mapping[str, TensorHeader]) -> tuple[str, str, str] | None:
    """(kind, where it shows, what was found) of a drafter that is not EAGLE-3."""
    names = [str(name) for name in _list(config.get("architectures"))]
    model_type = config.get("model_type")
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in OTHER_DRAFTERS:
        return OTHER_DRAFTERS[kind], "speculators_model_type", spelled(kind)
    for name in names:
        found = _kind_of_class(name)
        if found:
            return found, "architectures", printable(name)
    if model_type == "medusa" or any(key.startswith("medusa_") for key in config):
        return "Medusa", "model_type", spelled(model_type)
    if isinstance(model_type, str) and (model_type == "mlp_speculator" or model_type.endswith("mtp")):
        return "MTP" if model_type.endswith("mtp") else "MLP speculator", "model_type", spelled(model_type)
    if isinstance(config.get("model"), dict) and model_type == "eagle":
        return "EAGLE-1/2", "model", "a wrapped config"
    if isinstance(config.get("dflash_config"), dict):
        return "DFlash", "dflash_config", "present"
    return _kind_of_tensors(tensors)


def _kind_of_class(name: str) -> str | None:
    if name in ARCHITECTURES:
        return None
    if name.lower().startswith("peagle"):
        return "P-EAGLE"
    if "dflash" in name.lower():
        return "DFlash"
    if "dspark" in name.lower():
        return "DSpark"
    if "medusa" in name.lower():
        return "Medusa"
    if "mtp" in name.lower():
        return "MTP"
    if name.lower().startswith("eagle") and not name.lower().startswith("eagle3"):
        return "EAGLE-1/2"
    return None


def _kind_of_tensors(tensors: Mapping[str, TensorHeader]) -> tuple[str, str, str] | None:
    names = {canonical(name) for name in tensors}
    fc = tensors.get("fc.weight")
    if any(name.startswith("medusa") or name.endswith(".0.linear.weight") for name in names):
        return "Medusa", "tensors", "heads of residual blocks"
    if any(part in name for name in names for part in ("eh_proj", "enorm.weight", "mtp.")):
        return "MTP", "tensors", "projections of a multi-token-prediction layer"
    if "mask_hidden" in names:
        return "P-EAGLE", "mask_hidden", "a mask state for parallel drafting"
    if "hidden_norm.weight" in names and not any("layers.0.hidden_norm" in name for name in names):
        return "DFlash", "hidden_norm.weight", "a norm outside the layers"
    if (
        fc
        and len(fc.shape) == 2
        and fc.shape[1] == 2 * fc.shape[0]
        and not any("hidden_norm" in name for name in names)
    ):
        return "EAGLE-1/2", "fc.weight", f"{list(fc.shape)}: one embedding and one hidden state, and no hidden_norm"
    return None


def _other(kind: str, where: str, found: str, server: str) -> Problem:
    servers = {
        "EAGLE-1/2": "vLLM: method eagle; SGLang: --speculative-algorithm EAGLE",
        "P-EAGLE": "vLLM: serve the speculators format, it sets parallel_drafting itself",
        "DFlash": "vLLM: method dflash",
        "DSpark": "vLLM: method dspark",
        "MTP": "vLLM: method mtp",
        "Medusa": "vLLM: method medusa",
    }
    return Problem(
        "other-drafter",
        where,
        found,
        "an EAGLE-3 draft",
        servers.get(kind, "serve it with the method of its own"),
        f"this is {kind}; under method eagle3 {server} refuses it or builds the wrong layers",
    )


def _flat(config: dict[str, Any], tensors: Mapping[str, TensorHeader]) -> tuple[RecognisedConfig | None, list[Problem]]:
    names = [str(name) for name in _list(config.get("architectures"))]
    own = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    # A class of the verifier's kind: vLLM puts Eagle3 in front, whatever the folder holds.
    taken = [ARCHITECTURES[f"Eagle3{name}"] for name in names if f"Eagle3{name}" in ARCHITECTURES]
    if not own and not _looks_like_eagle3(config, tensors):
        return None, [_not_eagle3(names)]
    return RecognisedConfig((*own, *taken, "llama")[0], False, config), []


def _looks_like_eagle3(config: dict[str, Any], tensors: Mapping[str, TensorHeader]) -> bool:
    """Any sign at all; a sign that contradicts the rest is for the rules to report."""
    marks = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    parts = ("fc.weight", "d2t", "midlayer.", "hidden_norm")
    return any(mark in config for mark in marks) or any(part in name for name in tensors for part in parts)


def _not_eagle3(names: list[str]) -> Problem:
    return Problem(
        "not-eagle3",
        "architectures",
        spelled(names),
        "an EAGLE-3 draft: its class name, its fields or its tensors",
        "give the folder of the draft, not of the verifier",
        "nothing in the files says that this is an EAGLE-3 draft",
    )


def _nested(config: dict[str, Any]) -> tuple[RecognisedConfig | None, list[Problem]]:
    problems = list(_nested_problems(config))
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return None, problems
    variant = NESTED_LAYER_TYPES.get(str(layer.get("model_type", "llama")))
    if variant is None:
        return None, problems
    raw = {key: value for key, value in layer.items() if key != "tie_word_embeddings"}
    raw |= {key: config[key] for key in (*KEPT, "tie_word_embeddings", "dtype", "torch_dtype") if key in config}
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if config.get(key):
            raw[key] = config[key]
    raw["architectures"] = ["Eagle3Qwen3ForCausalLM" if variant == "qwen3" else "Eagle3LlamaForCausalLM"]
    raw.setdefault("model_type", "llama")
    spec = config.get("speculators_config")
    verifier = spec.get("verifier") if isinstance(spec, dict) else None
    named = verifier.get("architectures") if isinstance(verifier, dict) else None
    return RecognisedConfig(variant, True, raw, tuple(map(str, _list(named)))), problems


def _nested_problems(config: dict[str, Any]) -> Iterator[Problem]:
    """vllm/transformers_utils/configs/speculators/base.py, validate_speculators_config; algos.py, update_eagle3."""
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        consequence = "ValueError: not a supported speculators type"
        problem = _nested_problem("speculators_model_type", kind, '"eagle3"', consequence)
        yield repairable(replace(problem, fix=""), Change("write", "speculators_model_type", "eagle3"))
    if "model_type" in config:
        consequence = "the config counts as flat: architecture Eagle3DraftModel, which vLLM 0.32.0 has not"
        problem = _nested_problem("model_type", config["model_type"], "no such key at the top level", consequence)
        yield repairable(replace(problem, fix=""), Change("remove", "model_type"))
    spec = config.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    tokens = first.get("speculative_tokens")
    if type(tokens) is not int or tokens < 1:
        yield _nested_problem(
            "speculators_config.proposal_methods[0].speculative_tokens", tokens, "an integer >= 1", "ValueError"
        )
    verifier = spec.get("verifier") if isinstance(spec, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        yield _nested_problem(
            "speculators_config.verifier.name_or_path", name, "the verifier's name or path", "ValueError"
        )
    yield from _layer_problems(config.get("transformer_layer_config"))
    yield from unknown_keys(set(config) - NESTED_KNOWN, NESTED_KNOWN)


def _layer_problems(layer: Any) -> Iterator[Problem]:
    where = "transformer_layer_config"
    if not isinstance(layer, dict):
        yield _nested_problem(where, layer, "the config of the draft's layers", "ValueError or AttributeError")
    elif "model_type" not in layer:
        problem = _nested_problem(f"{where}.model_type", None, "llama or qwen3", "taken as llama", "warning")
        yield repairable(replace(problem, fix=""), Change("write", f"{where}.model_type", "llama"))
    elif layer["model_type"] not in tuple(NESTED_LAYER_TYPES):
        consequence = "ValueError: unsupported model_type for an EAGLE-3 speculator"
        yield _nested_problem(f"{where}.model_type", layer["model_type"], '"llama" or "qwen3"', consequence)


def unknown_keys(unknown: Iterable[str], known: Iterable[str], server: str = VLLM) -> Iterator[Problem]:
    """A warning for each key that no server reads, with the known key that it resembles; one for all beyond a few."""
    keys = sorted(unknown)
    if not keys:
        return
    import difflib

    names = sorted(known)
    for key in keys[:MANY]:
        near = difflib.get_close_matches(key[:MANY], names, 1, 0.8)
        yield _unknown(printable(key), f"did you mean {near[0]}?" if near else "remove it, or ignore this", server)
    if len(keys) > MANY:
        yield _unknown(f"{len(keys) - MANY} more keys", "give the config of a draft", server)


def _unknown(where: str, fix: str, server: str) -> Problem:
    found, consequence = "a key without known effect", f"{server} ignores it"
    return Problem("unknown-key", where, found, "keys that a server reads", fix, consequence, "warning")


def _nested_problem(where: str, found: Any, expected: str, consequence: str, severity: str = "error") -> Problem:
    value = "absent" if found is None else spelled(found)
    fix = f"correct {where} in config.json"
    return Problem("nested-config", where, value, expected, fix, f"vLLM 0.32.0: {consequence}", severity)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []
