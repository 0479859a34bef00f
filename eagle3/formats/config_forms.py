"""One draft's config in the forms that its readers want: `FORMS` is the table, two functions turn it both ways.

    form         layer 0    layer ids                            rotary embedding          no head of its own
    vllm         layers.0.  top level, SGLang's in eagle_config  rope_parameters           lm_head is not in the files
    sglang       midlayer.  eagle_config alone, SGLang's         rope_theta, rope_scaling  draft_vocab_size is null
    speculators  layers.0.  top level                            rope_parameters           lm_head is not in the files

`vllm` is the form that this project serves, right for SGLang too where the draft allows: any config is turned into it
first (`to_flat`), then into the form asked for (`from_flat`). Pure functions over dictionaries; what a form cannot say
is refused. Sources: flat_config.py for vLLM; sglang 0.5.23, srt/models/llama_eagle3.py and kimi_k25_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.formats.config_formats import ARCHITECTURES, NESTED_MARKS, WITHOUT_EFFECT
from eagle3.formats.flat_config import FLAT_ARCHITECTURES, KEPT, LAYER_KEPT, LAYER_REQUIRED, flatten
from eagle3.formats.json_files import printable, spelled
from eagle3.layer_ids import from_output_of, sglang_captures, sglang_list
from eagle3.problems import InvalidInput, Problem, invalid

IDS = "eagle_aux_hidden_state_layer_ids"
CLASSES = FLAT_ARCHITECTURES | {"mla": "Eagle3DeepseekV2ForCausalLM"}


@dataclass(frozen=True)
class Form:
    """layer_0: the beginning of its tensors' names; unread: fields that the reader does not know.

    Such a field stays, with the one value that it may have: what the reader computes whatever it says.
    """

    layer_0: str
    old_rope: bool
    top_level_ids: bool
    null_head: bool
    nested: bool
    unread: tuple[tuple[str, Any], ...] = ()


FORMS = {
    "vllm": Form("layers.0.", old_rope=False, top_level_ids=True, null_head=False, nested=False),
    "sglang": Form(
        "midlayer.",
        old_rope=True,
        top_level_ids=False,
        null_head=True,
        nested=False,
        unread=(("norm_before_residual", False),),
    ),
    "speculators": Form("layers.0.", old_rope=False, top_level_ids=True, null_head=False, nested=True),
}
# Beginnings of names that SGLang and SpecForge write, and what every reader takes.
NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


@dataclass(frozen=True)
class Verifier:
    """What a form needs to know of the verifier. architectures: None = not known; name and tokens: for speculators."""

    architectures: tuple[str, ...] | None = None
    num_hidden_layers: int | None = None
    name: str | None = None
    num_speculative_tokens: int | None = None


def tensor_name(name: str, form: Form) -> str:
    """The name that a tensor has in `form`.

    >>> tensor_name("midlayer.mlp.up_proj.weight", FORMS["vllm"])
    'layers.0.mlp.up_proj.weight'
    """
    for old, new in NAMES.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return form.layer_0 + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def to_flat(config: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
    """The form `vllm` of a config in any form; what no file says is what both servers compute without it.

    `InvalidInput` where a layer id can mean two layers, or a value contradicts another.
    """
    if any(mark in config for mark in NESTED_MARKS):
        return flatten(config)
    flat = {key: value for key, value in config.items() if value is not None}
    eagle = dict(flat.get("eagle_config", {}))
    vocab, dtype = flat.get("vocab_size"), flat.get("dtype", flat.get("torch_dtype"))
    flat.setdefault("draft_vocab_size", vocab)
    flat |= {key: flat.get(key, False) for key in ("norm_before_residual", "norm_output")}
    flat["fc_norm"] = bool(flat.pop("use_aux_norm", False) or flat.get("fc_norm", False))
    flat["norm_before_fc"] = eagle.get("norm_before_fc", flat.get("norm_before_fc", False))
    flat |= {key: dtype for key in ("dtype", "torch_dtype") if dtype is not None}
    flat |= _named(flat)
    flat |= _ids(flat, eagle, verifier)
    flat["tie_word_embeddings"] = flat.get("tie_word_embeddings", False)
    return _new_rope(flat)


def _named(flat: dict[str, Any]) -> dict[str, Any]:
    """Class names that vLLM takes for the same class, as one."""
    names = [name for name in flat.get("architectures", []) if isinstance(name, str)]
    variant = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    return {"architectures": [CLASSES[variant]]} if variant else {}


def _ids(flat: dict[str, Any], eagle: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
    """The ids at the top level, and SGLang's list; the one that is there tells the other."""
    top: list[int] = flat.get(IDS) or []
    listed: list[int] | None = eagle.get(IDS)
    names = verifier.architectures
    if not top and not listed:
        return {}
    if not top and listed:
        # DeepSeek-type verifiers take a list as it is unless it begins with 1, all others add 1.
        if names is None and listed[0] != 1:
            raise _ambiguous(f"eagle_config.{IDS}", listed, f"{listed} or {from_output_of(listed)}")
        top = sglang_captures(listed, names or (), verifier.num_hidden_layers)
    elif names is not None or not listed:
        listed = _sglang_ids(top, names)
    elif from_output_of(listed) != top and (listed != top or listed[0] == 1):
        listed = None  # no verifier for which SGLang captures these layers
    rest = {key: value for key, value in eagle.items() if key != IDS}
    inner = ({IDS: listed} if listed else {}) | {"use_aux_hidden_state": True} | rest
    inner["norm_before_fc"] = flat["norm_before_fc"]
    return {IDS: top, "num_aux_hidden_states": flat.get("num_aux_hidden_states", len(top)), "eagle_config": inner}


def _sglang_ids(top: Sequence[int], names: tuple[str, ...] | None) -> list[int] | None:
    """None where SGLang has no list for these layers, or where it depends on a verifier that nobody named."""
    if names is None and list(top[:1]) != [2]:
        return None
    try:
        return sglang_list(top, names or ())
    except InvalidInput:
        return None


def _new_rope(flat: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` as `rope_parameters`, as transformers 5.19.0 reads them."""
    old, new = flat.pop("rope_scaling", None), flat.pop("rope_parameters", None)
    theta = flat.pop("rope_theta", None)
    rope = dict(old or new or {})
    if old and new and old != new:
        raise invalid("rope", "rope_scaling", spelled(old), "the same as rope_parameters, or one of them", "keep one")
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise invalid("rope", "rope_theta", spelled(theta), "as in the rope parameters", "keep one")
    if rope:
        flat["rope_parameters"] = {"rope_type": "default"} | rope
    return flat


def from_flat(flat: dict[str, Any], engine: str, verifier: Verifier, has_head: bool) -> dict[str, Any]:
    """The config in the form of `engine` (a key of FORMS); has_head: lm_head is among the tensors."""
    form = FORMS[engine]
    config = dict(flat)
    for key, value in form.unread:
        if config[key] != value:
            raise invalid(
                "no-such-form",
                key,
                spelled(config[key]),
                f"{spelled(value)}: {engine} knows no {key}",
                f"serve the draft with vLLM, or train with {key}: {spelled(value)}",
                f"{engine} would compute as if it were {spelled(value)}, and only acceptance would fall",
            )
    if not form.top_level_ids and config.get(IDS):
        if verifier.architectures is None and config["eagle_config"].get(IDS, (0,))[0] != 1:
            raise _ambiguous(IDS, config[IDS], "one list for verifiers of the DeepSeek type, another for all others")
        sglang_list(config[IDS], verifier.architectures or (), IDS)  # refuses what SGLang cannot capture
        config.pop(IDS)
    if form.null_head and not has_head and config["draft_vocab_size"] == config.get("vocab_size"):
        config["draft_vocab_size"] = None
    if form.old_rope and "rope_parameters" in config:
        rope = dict(config.pop("rope_parameters"))
        config |= {key: rope.pop(key) for key in ("rope_theta",) if key in rope}
        config |= {"rope_scaling": rope} if rope != {"rope_type": "default"} else {}
    return _nest(config, verifier) if form.nested else config


def _nest(flat: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
    """speculators' nested config of a flat one; the inverse of `flatten`."""
    problems = list(_nest_problems(flat, verifier))
    if problems:
        raise InvalidInput(*problems)
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": verifier.num_speculative_tokens,
        "verifier_accept_k": 1,
    }
    return {key: flat[key] for key in KEPT} | {
        "architectures": ["Eagle3DraftModel"],
        "dtype": flat["dtype"],
        IDS: flat[IDS],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": list(verifier.architectures or ()), "name_or_path": verifier.name},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": flat.get("target_hidden_size"),
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in flat.items() if key in LAYER_KEPT},
    }


def _nest_problems(flat: dict[str, Any], verifier: Verifier) -> list[Problem]:
    known = LAYER_KEPT | set(KEPT) | WITHOUT_EFFECT
    known |= {"architectures", "dtype", "torch_dtype", "tie_word_embeddings", "target_hidden_size", IDS, "eagle_config"}
    problems = [
        _problem("no-such-form", key, flat[key], "a field that the nested format has", "remove it, or keep it flat")
        for key in sorted(set(flat) - known)
    ]
    for key in (*LAYER_REQUIRED, "rope_parameters", "dtype", IDS):
        if flat.get(key) is None:
            problems.append(_problem("missing-key", key, None, "a value", "write it into config.json"))
    if flat.get("model_type") is not None and flat["model_type"] not in FLAT_ARCHITECTURES:
        fix = "keep it flat"
        problems.append(_problem("no-such-form", "model_type", flat["model_type"], "llama or qwen3", fix))
    if flat["tie_word_embeddings"] is not False:
        problems.append(
            _problem("tied", "tie_word_embeddings", True, "false", "write false, with lm_head in the files")
        )
    if flat.get("eagle_config", {}).get("use_aux_hidden_state", True) is not True:
        where = "eagle_config.use_aux_hidden_state"
        problems.append(_problem("no-such-form", where, False, "true: speculators has no other draft", "keep it flat"))
    if not verifier.name:
        problems.append(
            _problem("missing-option", "the verifier's name", None, "a hub id or path", "--verifier-name NAME")
        )
    if not verifier.num_speculative_tokens:
        fix = "--num-speculative-tokens N"
        problems.append(_problem("missing-option", "tokens to draft a round", None, "an integer >= 1", fix))
    return problems


def _problem(code: str, where: str, found: Any, expected: str, fix: str) -> Problem:
    return Problem(code, printable(where), "absent" if found is None else spelled(found), expected, fix)


def _ambiguous(where: str, found: Any, meanings: str) -> InvalidInput:
    return invalid(
        "aux-layer-numbering",
        where,
        spelled(found),
        "the verifier's class, which decides what SGLang 0.5.23 makes of them",
        "give the model that the draft is for: --verifier DIR|config.json",
        f"without it they can mean {meanings}",
    )
