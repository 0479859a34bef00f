"""params.yaml as frozen records: one dataclass per section, its fields carrying their own rules (`eagle3.param_rules`).

Every key is required, nothing unknown is passed over, and every problem is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle3.param_rules import (
    COMMIT,
    JSONL,
    SHA256,
    VERSION,
    choice,
    flag,
    integer,
    number,
    rule,
    rule_problems,
    section_schema,
    text,
)
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.yaml12 import read_yaml

PARAMS_FILE = Path("params.yaml")


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
    problems = rule_problems(raw, params_schema(), where)
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
