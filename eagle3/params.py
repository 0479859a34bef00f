"""params.yaml as frozen records: one dataclass per section, its fields carrying their own cerberus rules.

Strict by design: unknown and missing keys are refused with the nearest known one, integers refuse booleans, floats
refuse NaN and infinity, nothing lossy is coerced (cerberus' own `integer` and `float` allow all of these), and every
problem is reported at once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from cerberus import TypeDefinition, Validator

from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.yaml12 import read_yaml

PARAMS_FILE = Path("params.yaml")


VERSION = r"^\d+(\.\d+)+([.+-]?[A-Za-z0-9.]+)?$"
JSONL = r"^[^/\\.][^/\\]*\.jsonl$"
COMMIT = r"^[0-9a-f]{40}$"
SHA256 = r"^[0-9a-f]{64}$"
# What a text of each pattern is, for people.
PATTERN_WORDS = {
    VERSION: "a version, e.g. 1.2.3, in quotes",
    JSONL: "the name of a file, NAME.jsonl, without its folder",
    COMMIT: "a commit: 40 hex digits",
    SHA256: "a sha256: 64 hex digits",
}
# The kinds of sources: what each must say, and what it may say beside that and weight.
SOURCE_FORMS: tuple[tuple[dict[str, str], set[str]], ...] = (
    ({"package": r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "version": VERSION}, set()),
    ({"package": r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "version": VERSION, "file": r"."}, {"ignore"}),
    ({"file": r"^[^/\\.][^/\\]*\.(jsonl|parquet)$"}, {"ignore"}),
    ({"folder": r"^[^/\\.][^/\\]*$"}, {"ignore"}),
    ({"dataset": r"^[\w.-]+/[\w.-]+$", "revision": COMMIT, "split": r"^[\w.-]+$"}, {"ignore", "config"}),
)


def _has_form(value: dict[Any, Any], required: dict[str, str], optional: set[str]) -> bool:
    return (
        set(required) <= set(value) <= {*required, *optional, "weight"}
        and all(isinstance(value[key], str) and re.match(pattern, value[key]) for key, pattern in required.items())
        and _is_weight(value.get("weight", 1))
        and isinstance(value.get("config", ""), str)
        and isinstance(ignore := value.get("ignore", []), list)
        and all(isinstance(name, str) for name in ignore)
    )


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


class StrictValidator(Validator):
    """cerberus with an `integer` that refuses booleans and a `float` that refuses NaN, infinity and booleans."""

    types_mapping = Validator.types_mapping | {
        "integer": TypeDefinition("integer", (int,), (bool,)),
        "number": TypeDefinition("number", (int, float), (bool,)),
    }

    def _check_with_finite(self, name: str, value: Any) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            self._error(name, f"must be a finite number, not {value}")

    def _check_with_ascending(self, name: str, value: Any) -> None:
        if isinstance(value, list) and all(type(item) is int for item in value) and value != sorted(set(value)):
            self._error(name, f"must ascend without repetition, e.g. {sorted(set(value))}")

    def _check_with_selection(self, name: str, value: Any) -> None:
        if value not in ("best", "last") and not (type(value) is int and value >= 0):
            self._error(name, "must be best, last or the number of an epoch (from 0)")

    def _check_with_source(self, name: str, value: Any) -> None:
        if not isinstance(value, dict) or not any(_has_form(value, *form) for form in SOURCE_FORMS):
            self._error(
                name,
                "must be {package: NAME, version: X.Y.Z}, with file: PATH for a file inside it, {file: NAME.jsonl or "
                "NAME.parquet}, {folder: NAME} or {dataset: OWNER/NAME, revision: 40 hex digits, split: NAME}, with "
                "weight (over 0), and ignore (a list of fields) and config where they apply; see sample.sources",
            )


def integer(minimum: int, maximum: int | None = None, nullable: bool = False) -> Any:
    rule: dict[str, Any] = {"type": "integer", "min": minimum, "nullable": nullable}
    return field(metadata=rule if maximum is None else {**rule, "max": maximum})


def number(minimum: float, maximum: float, nullable: bool = False) -> Any:
    return field(
        metadata={"type": "number", "min": minimum, "max": maximum, "nullable": nullable, "check_with": "finite"}
    )


def text(pattern: str | None = None, nullable: bool = False) -> Any:
    rule: dict[str, Any] = {"type": "string", "nullable": nullable, "empty": False}
    return field(metadata={**rule, "regex": pattern} if pattern else rule)


def choice(*allowed: str) -> Any:
    return field(metadata={"type": "string", "allowed": list(allowed)})


def flag(nullable: bool = False) -> Any:
    return field(metadata={"type": "boolean", "nullable": nullable})


def rule(**metadata: Any) -> Any:
    return field(metadata=metadata)


@dataclass(frozen=True)
class VerifierParams:
    """The model that is accelerated: a directory, a hub id with its commit, or `package:MODULE/FILE.gguf`."""

    source: str = text()
    revision: str | None = text(COMMIT, nullable=True)
    sha256: str | None = text(SHA256, nullable=True)
    trust_remote_code: bool = flag()


@dataclass(frozen=True)
class EnginesParams:
    vllm: str = text(VERSION)
    speculators: str = text(VERSION)


@dataclass(frozen=True)
class SampleParams:
    """Which conversations are taken, how they are split, and how the verifier answers them."""

    sources: list[dict[str, Any]] = rule(type="list", minlength=1, schema={"type": "dict", "check_with": "source"})
    mode: str = choice("regenerate", "keep")
    max_turns: int = integer(1)
    max_train: int = integer(1)
    max_val: int = integer(1)
    max_eval: int = integer(1)
    min_eval: int = integer(1)
    val_percent: int = integer(1, 49)
    eval_percent: int = integer(1, 49)
    max_eval_similarity: float = number(0.0, 1.0)
    max_new_tokens: int = integer(2)
    max_model_len: int = integer(8)
    max_num_seqs: int = integer(1)
    temperature: float = number(0.0, 2.0)
    top_p: float = number(0.001, 1.0)


@dataclass(frozen=True)
class ExtractParams:
    aux_layer_ids: list[int] = rule(
        type="list", minlength=1, schema={"type": "integer", "min": 0}, check_with="ascending"
    )
    samples_per_shard: int = integer(1)
    store_dtype: str = choice("bfloat16", "fp8")
    parity_samples: int = integer(0, 10_000)


@dataclass(frozen=True)
class VocabMapParams:
    draft_vocab_size: int = integer(1)


@dataclass(frozen=True)
class DraftParams:
    """The draft's architecture. `null` takes the verifier's value, and the value taken is recorded."""

    num_hidden_layers: int = integer(1, 16)
    num_attention_heads: int | None = integer(1, nullable=True)
    num_key_value_heads: int | None = integer(1, nullable=True)
    head_dim: int | None = integer(2, nullable=True)
    intermediate_size: int | None = integer(1, nullable=True)
    hidden_act: str = choice("silu")
    rms_norm_eps: float | None = number(0.0, 1.0, nullable=True)
    max_position_embeddings: int | None = integer(1, nullable=True)
    rope_parameters: dict[str, Any] | None = rule(
        type="dict", nullable=True, allow_unknown=True, schema={"rope_type": {"type": "string", "required": True}}
    )
    sliding_window: int | None = integer(1, nullable=True)
    attention_bias: bool = flag()
    mlp_bias: bool = flag()
    norm_before_residual: bool = flag()
    norm_before_fc: bool = flag()
    fc_norm: bool = flag()
    norm_output: bool = flag()


@dataclass(frozen=True)
class TrainParams:
    epochs: int = integer(1, 1000)
    checkpoints_per_epoch: int = integer(1, 1000)
    warm_start: str | None = text(nullable=True)
    warm_start_sha256: str | None = text(SHA256, nullable=True)
    learning_rate: float = number(0.0, 10.0)
    optimizer: str = choice("adamw", "muon")
    weight_decay: float = number(0.0, 1.0)
    muon_learning_rate: float | None = number(0.0, 10.0, nullable=True)
    muon_momentum: float = number(0.0, 1.0)
    muon_weight_decay: float = number(0.0, 1.0)
    scheduler: str = choice("linear", "cosine", "none")
    warmup_ratio: float = number(0.0, 1.0)
    total_seq_len: int = integer(16)
    ttt_steps: int = integer(1, 8)
    ttt_step_loss_decay: float = number(0.0, 10.0)
    loss: str = choice("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")


@dataclass(frozen=True)
class FlattenParams:
    select: str | int = rule(type=["string", "integer"], check_with="selection")
    drop_embed_tokens: bool = flag()


@dataclass(frozen=True)
class SimulateWeightLoadParams:
    engine_level: str = choice("required", "load", "off")
    max_logit_steps: float = number(0.0, 1000.0)


@dataclass(frozen=True)
class ServeTestParams:
    """What is asked of the served draft, and the gates that it must pass."""

    suite: str = choice("greedy", "full")
    num_speculative_tokens: int = integer(1, 8)
    sweep: list[int] = rule(type="list", schema={"type": "integer", "min": 1, "max": 8}, check_with="ascending")
    num_prompts: int = integer(1)
    questions: list[str] = rule(type="list", schema={"type": "string", "regex": JSONL})
    min_rounds: int = integer(1)
    min_acceptance_length: float = number(1.0, 9.0)
    min_position_0_rate: float = number(0.0, 1.0)
    max_gap_to_walk: float = number(0.0, 8.0)
    max_tie_fraction: float = number(0.0, 1.0)


@dataclass(frozen=True)
class Params:
    """Every section; a stage is handed only those that its `params:` in dvc.yaml names (see `eagle3.stage_guard`)."""

    seed: int
    verifier: VerifierParams
    engines: EnginesParams
    sample: SampleParams
    extract: ExtractParams
    vocab_map: VocabMapParams
    draft: DraftParams
    train: TrainParams
    flatten: FlattenParams
    simulate_weight_load: SimulateWeightLoadParams
    serve_test: ServeTestParams


RECORDS: dict[str, type] = {
    "verifier": VerifierParams,
    "engines": EnginesParams,
    "sample": SampleParams,
    "extract": ExtractParams,
    "vocab_map": VocabMapParams,
    "draft": DraftParams,
    "train": TrainParams,
    "flatten": FlattenParams,
    "simulate_weight_load": SimulateWeightLoadParams,
    "serve_test": ServeTestParams,
}


def section_schema(record: type) -> dict[str, Any]:
    """The cerberus schema of a section: the rules its fields carry; every key is required."""
    assert all(item.default is MISSING for item in fields(record)), "a parameter has no hidden default"
    return {item.name: {**item.metadata, "required": True} for item in fields(record)}


@cache
def params_schema() -> dict[str, Any]:
    sections = {
        name: {"type": "dict", "required": True, "schema": section_schema(record)} for name, record in RECORDS.items()
    }
    return {"seed": {"type": "integer", "required": True, "min": 0, "max": 2**31 - 1}, **sections}


def parse_params(raw: Any, where: str = "params.yaml") -> Params:
    """Validated parameters, or `InvalidInput` with every problem of every section."""
    if not isinstance(raw, dict):
        raise invalid("params", where, f"a {type(raw).__name__}", "a mapping of sections", f"edit {where}")
    validator = StrictValidator(params_schema())
    problems = [] if validator.validate(raw) else list(_cerberus_problems(validator.errors, raw, where))
    if not problems:
        problems = [problem for check in CROSS_CHECKS for problem in check(raw, where)]
    if problems:
        raise InvalidInput(*problems)
    sections = {name: record(**raw[name]) for name, record in RECORDS.items()}
    return Params(seed=raw["seed"], **sections)


def read_params(path: Path = PARAMS_FILE) -> Params:
    return parse_params(read_yaml(path), str(path))


def params_as_dict(params: Params) -> dict[str, Any]:
    return asdict(params)


def _cerberus_problems(errors: Any, raw: Any, where: str, prefix: str = "", schema: Any = None) -> Any:
    """Flatten cerberus' nested error lists into problems with dotted paths."""
    schema = params_schema() if schema is None else schema
    for key, messages in errors.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        value = raw.get(key) if isinstance(raw, dict) else (raw[key] if isinstance(raw, list) else None)
        for message in messages:
            if isinstance(message, dict):
                inner = schema.get(key, {}).get("schema") if isinstance(schema, dict) else None
                yield from _cerberus_problems(message, value, where, path, inner or {})
            elif message == "unknown field":
                near = difflib.get_close_matches(str(key), [str(name) for name in schema or ()], 1)
                fix = f"did you mean {near[0]}?" if near else "remove it"
                yield Problem("unknown-parameter", path, repr(value), "no such key", f"{fix} (in {where})")
            elif message == "required field":
                yield Problem("missing-parameter", path, "absent", "a value", f"add {path} to {where}")
            else:
                yield Problem(
                    "parameter", path, repr(value), _expected(message, schema, key), f"correct {path} in {where}"
                )


def _expected(message: str, schema: Any, key: Any) -> str:
    """cerberus names neither the values it allows nor what its patterns are."""
    if message.startswith("unallowed value"):
        return f"one of {', '.join(schema[key]['allowed'])}"
    return next((words for pattern, words in PATTERN_WORDS.items() if f"'{pattern}'" in message), message)


def _hub_source_is_pinned(raw: dict[str, Any], where: str) -> Any:
    verifier = raw["verifier"]
    source = verifier["source"]
    local = source.startswith("package:") or Path(source).expanduser().is_dir()
    if not local and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not verifier["revision"]:
        yield Problem(
            "unpinned-verifier",
            "verifier.revision",
            f"null, and {source} is not a directory here",
            "the 40-hex commit of a hub model",
            f"set verifier.revision in {where}, or give an existing directory as verifier.source",
        )


def _splits_leave_training_data(raw: dict[str, Any], where: str) -> Any:
    sample = raw["sample"]
    if sample["min_eval"] > sample["max_eval"]:
        yield Problem(
            "parameter",
            "sample.min_eval",
            str(sample["min_eval"]),
            f"at most sample.max_eval ({sample['max_eval']})",
            f"lower sample.min_eval in {where}",
        )
    if sample["max_new_tokens"] >= sample["max_model_len"]:
        yield Problem(
            "parameter",
            "sample.max_new_tokens",
            str(sample["max_new_tokens"]),
            f"less than sample.max_model_len ({sample['max_model_len']})",
            f"lower sample.max_new_tokens in {where}",
        )


def _norms_exclude_each_other(raw: dict[str, Any], where: str) -> Any:
    if raw["draft"]["norm_before_fc"] and raw["draft"]["fc_norm"]:
        yield Problem(
            "parameter",
            "draft.fc_norm",
            "true beside draft.norm_before_fc: true",
            "at most one of the two",
            f"set one of them to false in {where}",
            "speculators 0.9.0 refuses the pair (models/eagle3/config.py)",
        )


def _acceptance_length_is_reachable(raw: dict[str, Any], where: str) -> Any:
    wanted, drafted = (raw["serve_test"][name] for name in ("min_acceptance_length", "num_speculative_tokens"))
    if wanted > drafted + 1:
        yield Problem(
            "unreachable-gate",
            "serve_test.min_acceptance_length",
            str(wanted),
            f"at most {drafted + 1}: {drafted} drafted tokens and the verifier's own",
            f"lower it, or raise serve_test.num_speculative_tokens, in {where}",
        )


CROSS_CHECKS: tuple[Callable[[dict[str, Any], str], Any], ...] = (
    _hub_source_is_pinned,
    _splits_leave_training_data,
    _norms_exclude_each_other,
    _acceptance_length_is_reachable,
)
