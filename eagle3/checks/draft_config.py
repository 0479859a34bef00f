"""The config of an EAGLE-3 draft as one frozen record: what vLLM 0.32.0 would compute from it, defaults included.

Types are those of transformers 5.19.0, which refuses others (models/llama/configuration_llama.py, `@strict`); the
fields of EAGLE-3 have no declared type there, so they are held to the type that every trainer writes. A value of
another type that means one thing alone ("64", 64.0) is reported and read as that, so that the other rules still run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from eagle3.formats.json_files import spelled
from eagle3.formats.light_cerberus import TypeDefinition, Validator
from eagle3.problems import Change, Problem, repairable

MAX_SIZE = 2**31 - 1
MAX_COUNT = 256
VARIANTS = ("llama", "qwen3", "mla")

# What an absent field becomes: transformers 5.19.0, the class that `model_type` names.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
QWEN3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
MLA_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN2_DEFAULTS = {key: value for key, value in QWEN3_DEFAULTS.items() if key != "head_dim"}
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
PHI3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
# model_type -> what transformers fills in, whatever class vLLM builds; of other types as of the variant's own.
DEFAULTS = {
    "llama": LLAMA_DEFAULTS,
    "qwen2": QWEN2_DEFAULTS,
    "qwen3": QWEN3_DEFAULTS,
    "mistral": MISTRAL_DEFAULTS,
    "phi3": PHI3_DEFAULTS,
    "deepseek_v2": MLA_DEFAULTS,
    "mla": MLA_DEFAULTS,
}

_SIZE = {"type": "integer", "min": 1, "max": MAX_SIZE}
# More layers or captured states than any draft has; a bound, so that a hostile config costs nothing.
_COUNT = {"type": "integer", "min": 1, "max": MAX_COUNT}
_FLAG = {"type": "boolean"}
_OPTIONAL = {"nullable": True}
_IDS = {
    "type": "list",
    "nullable": True,
    "maxlength": MAX_COUNT,
    "schema": {"type": "integer", "min": 0, "max": MAX_SIZE},
}
EAGLE_CONFIG_SCHEMA: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": {**_IDS, "schema": {"type": "integer", "min": -1, "max": MAX_SIZE}},
    "use_aux_hidden_state": _FLAG,
    "norm_before_fc": _FLAG,
}
SCHEMA: dict[str, Any] = {
    "architectures": {"type": "list", "schema": {"type": "string"}, "minlength": 1, "nullable": True},
    "model_type": {"type": "string"},
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE | _OPTIONAL,
    "head_dim": _SIZE | _OPTIONAL,
    "hidden_act": {"type": "string"},
    "rms_norm_eps": {"type": "float", "min": 0.0, "max": 1.0},
    "max_position_embeddings": _SIZE,
    "initializer_range": {"type": "float"},
    "use_cache": _FLAG,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "bias": _FLAG | _OPTIONAL,
    "qkv_bias": _FLAG | _OPTIONAL,
    "draft_vocab_size": _SIZE | _OPTIONAL,
    "target_hidden_size": _SIZE,
    "num_aux_hidden_states": _COUNT | _OPTIONAL,
    "num_aux_layers": _COUNT | _OPTIONAL,
    "norm_before_residual": _FLAG | _OPTIONAL,
    "norm_before_fc": _FLAG | _OPTIONAL,
    "fc_norm": _FLAG | _OPTIONAL,
    "norm_output": _FLAG | _OPTIONAL,
    "eagle_aux_hidden_state_layer_ids": _IDS,
    "eagle_config": {"type": "dict", "nullable": True, "allow_unknown": True, "schema": EAGLE_CONFIG_SCHEMA},
    "rope_parameters": {"type": "dict", "nullable": True},
    "rope_scaling": {"type": "dict", "nullable": True},
    "rope_theta": {"type": "number", "nullable": True, "min": 1},
    "layer_types": {"type": "list", "nullable": True, "schema": {"type": "string"}},
    "sliding_window": _SIZE | _OPTIONAL,
    "use_sliding_window": _FLAG | _OPTIONAL,
    "quantization_config": {"type": "dict", "nullable": True},
    "dtype": {"type": "string", "nullable": True},
    "torch_dtype": {"type": "string", "nullable": True},
    "kv_lora_rank": _SIZE,
    "q_lora_rank": _SIZE | _OPTIONAL,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
}
# In the nested format these keys stand at the top level, every other one inside transformer_layer_config.
TOP_LEVEL = {
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids", "tie_word_embeddings", "dtype", "torch_dtype", "architectures",
}  # fmt: skip


@dataclass(frozen=True)
class DraftConfig:
    """What vLLM 0.32.0 builds. `absent` names the fields that a default fills; `raw` is the flat config, coerced.

    nulls: the fields written as null, which are among `absent` too; `raw` has none of them.

    num_aux: capture layers that fc is built for. qkv_bias, o_bias: as the class resolves them. ids: the top-level list
    (input-of numbering); nested_ids: the one in `eagle_config`. trained_for: the verifier's class, where it is named.
    """

    variant: str
    nested: bool
    raw: dict[str, Any]
    absent: frozenset[str]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int
    use_aux: bool
    norm_before_fc: bool
    fc_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    ids: tuple[int, ...]
    nested_ids: tuple[int, ...]
    dtype: str | None
    quantized: bool
    nulls: frozenset[str] = frozenset()
    trained_for: tuple[str, ...] = ()


def place(key: str, nested: bool) -> str:
    """Where a field stands in the file."""
    return f"transformer_layer_config.{key}" if nested and key not in TOP_LEVEL else key


class ConfigValidator(Validator):
    """cerberus whose integers and numbers are no booleans; a `float` is a JSON number with fraction or exponent."""

    types_mapping = Validator.types_mapping | {
        "integer": TypeDefinition("integer", (int,), (bool,)),
        "number": TypeDefinition("number", (int, float), (bool,)),
        "float": TypeDefinition("float", (float,), ()),
    }


def type_problems(
    raw: dict[str, Any], nested: bool, server: str = "vLLM 0.32.0"
) -> tuple[list[Problem], dict[str, Any] | None]:
    """Every field of the wrong type or range, and the config with each value read as what it must mean.

    An optional field without meaning is left out; a required one ("abc" as a size) makes the config None, so that
    nothing further can be said.
    """
    schema = SCHEMA | ({"target_hidden_size": _SIZE | _OPTIONAL} if nested else {})
    # No key is required, and cerberus 1.3.8 takes 0.3 ms to look at the rules of one: only those of this config.
    validator = ConfigValidator({key: schema[key] for key in schema if key in raw}, allow_unknown=True)
    if validator.validate(raw, normalize=False):
        return [], raw
    problems: list[Problem] = []
    coerced: dict[str, Any] | None = dict(raw)
    for key in sorted(validator.errors):
        value, known = lossless(raw[key], schema[key])
        known = known and ConfigValidator({key: schema[key]}).validate({key: value} if value is not None else {})
        value = value if known else None
        where = place(key, nested)
        change = Change("remove", where) if value is None else Change("write", where, value)
        problem = _type_problem(where, raw[key], _messages(validator.errors[key]), server)
        problems.append(repairable(replace(problem, fix=""), change) if known else problem)
        if not known and not schema[key].get("nullable"):
            coerced = None
        elif coerced is not None:
            coerced = {name: each for name, each in coerced.items() if name != key}
            coerced |= {} if value is None else {key: value}
    return problems, coerced


def lossless(value: Any, rule: dict[str, Any]) -> tuple[Any, bool]:
    """The one value of the rule's type that `value` can mean, and whether there is one; None means absent."""
    kind = rule["type"]
    if value is None:
        return None, True
    try:
        if kind == "integer" and not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value)), True
        if kind == "list" and isinstance(value, list) and rule["schema"].get("type") == "integer":
            items = [lossless(each, rule["schema"]) for each in value[:MAX_COUNT]]
            return [each for each, _ in items], all(known and each is not None for each, known in items)
        if kind in ("float", "number") and not isinstance(value, bool):
            return float(value), True
    except (TypeError, ValueError, OverflowError):
        return None, False
    if kind == "boolean" and value in ("true", "false", "True", "False"):
        return value.lower() == "true", True
    if kind == "list" and isinstance(value, str) and rule.get("schema") == {"type": "string"}:
        return [value], True
    return None, False


def parse_draft_config(raw: dict[str, Any], variant: str, nested: bool) -> DraftConfig:
    """The record of a config whose types are right (see `type_problems`)."""
    given = {key: value for key, value in raw.items() if value is not None}
    if "q_lora_rank" in raw and raw["q_lora_rank"] is None:
        given["q_lora_rank"] = 0  # null means no low rank at all; absent means DeepSeek-V2's 1536
    values = DEFAULTS.get(str(given.get("model_type")), DEFAULTS[variant]) | given
    absent = frozenset(key for key in SCHEMA if key not in given)
    eagle = given.get("eagle_config", {})
    heads = values["num_attention_heads"]
    attention_bias = values.get("attention_bias", False)
    return DraftConfig(
        variant=variant,
        nested=nested,
        raw=given,
        absent=absent,
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or max(values["hidden_size"] // heads, 1),
        vocab_size=values["vocab_size"],
        draft_vocab_size=values.get("draft_vocab_size", values["vocab_size"]),
        target_hidden_size=values.get("target_hidden_size", values["hidden_size"]),
        num_aux=_num_aux(given, variant),
        use_aux=variant == "mla" or eagle.get("use_aux_hidden_state", True),
        norm_before_fc=variant != "mla" and eagle.get("norm_before_fc", values.get("norm_before_fc", False)),
        fc_norm=values.get("fc_norm", False),
        qkv_bias=attention_bias,
        o_bias=variant == "llama" and (attention_bias or values.get("bias", False)),
        mlp_bias=variant == "llama" and values.get("mlp_bias", False),
        ids=tuple(given.get("eagle_aux_hidden_state_layer_ids", ())),
        nested_ids=tuple(eagle.get("eagle_aux_hidden_state_layer_ids") or ()),
        dtype=given.get("dtype") or given.get("torch_dtype"),
        quantized=bool(given.get("quantization_config")),
        nulls=frozenset(raw) - set(given),
    )


def _num_aux(given: dict[str, Any], variant: str) -> int:
    """llama_eagle3.py LlamaModel and deepseek_eagle3.py; qwen3_eagle3.py alone looks at the top-level list too."""
    nested_ids = given.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if variant == "qwen3":
        ids = given.get("eagle_aux_hidden_state_layer_ids") or nested_ids
        return int(given.get("num_aux_layers") or given.get("num_aux_hidden_states") or len(ids or (1, 2, 3)))
    return int(given.get("num_aux_hidden_states") or len(nested_ids or (1, 2, 3)))


def _messages(errors: list[Any]) -> str:
    """cerberus' error tree of one field as one line."""
    parts = []
    for each in errors:
        if isinstance(each, dict):
            parts += [f"{key}: {_messages(inner)}" for key, inner in each.items()]
        else:
            parts.append(str(each))
    return "; ".join(parts)


def _type_problem(where: str, found: Any, message: str, server: str) -> Problem:
    return Problem(
        "config-type",
        where,
        spelled(found),
        message,
        "write a valid value",
        f"transformers 5.19.0 and {server} refuse the config, or compute with something else",
    )
