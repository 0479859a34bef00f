"""What a change of each parameter reruns: one row for every leaf of params.yaml; the README's table is made of it."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from eagle3.params import RECORDS

FROM_TRAIN = ["train", "flatten", "validate-config", "simulate-weight-load", "serve-test"]
WEIGHTS = ["train", "flatten", "simulate-weight-load", "serve-test"]  # other weights under the same config
ALL_STAGES = ["sample", "extract", "vocab-map", *FROM_TRAIN]
DATA = ["sample", "extract", "vocab-map", *WEIGHTS]

# A whole section, unless one of its leaves has a row of its own.
SECTIONS: dict[str, list[str]] = {
    "seed": DATA,
    "verifier": DATA,
    "engines.vllm": DATA,
    "engines.speculators": WEIGHTS,
    "sample": DATA,
    "extract": ["extract", *WEIGHTS],
    "extract.aux_layer_ids": ["extract", *FROM_TRAIN],
    "vocab_map": ["vocab-map", *FROM_TRAIN],
    "draft": FROM_TRAIN,
    "train": WEIGHTS,
    "train.epochs": FROM_TRAIN,  # another number of checkpoints is another number of configs
    "train.checkpoints_per_epoch": FROM_TRAIN,
    "flatten.select": ["flatten", "serve-test"],
    "flatten.drop_embed_tokens": ["flatten", "simulate-weight-load", "serve-test"],
    "simulate_weight_load": ["simulate-weight-load", "serve-test"],
    "simulate_weight_load.max_logit_steps": ["simulate-weight-load"],
    "serve_test": ["serve-test"],
}
# Another valid value, where a rule of its field does not give one.
VALUES: dict[str, Any] = {
    "draft.rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "engines.speculators": "0.9.1",
    "engines.vllm": "0.32.1",
    "extract.aux_layer_ids": [1, 15, 27],
    "flatten.select": 1,
    "sample.min_eval": 2,
    "sample.sources": [{"file": "tiny.jsonl"}, {"package": "chatterbot-corpus", "version": "1.3.3"}],
    "serve_test.questions": ["some.jsonl"],
    "serve_test.sweep": [1, 2],
    "train.warm_start": "drafts/other",
    "train.warm_start_sha256": "c" * 64,
    "verifier.revision": "1" * 40,
    "verifier.sha256": "b" * 64,
    "verifier.source": "models/org/other",
}
# The other value needs the real engine: tests/test_rerun_table.py.
WITH_ENGINE = {"simulate_weight_load.engine_level"}
# Only one value is allowed so far.
FIXED = {"draft.hidden_act"}


def leaves() -> list[str]:
    return ["seed", *(f"{section}.{item.name}" for section, record in RECORDS.items() for item in fields(record))]


def stages_of(leaf: str) -> list[str]:
    return SECTIONS.get(leaf) or SECTIONS[leaf.partition(".")[0]]


def changes(leaf: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Dotted leaf -> another valid value; two where a rule ties two of them together."""
    if leaf == "draft.fc_norm":
        return {"draft.norm_before_fc": False, "draft.fc_norm": True}
    return {leaf: VALUES[leaf] if leaf in VALUES else _another(leaf, raw)}


def _another(leaf: str, raw: dict[str, Any]) -> Any:
    section, _, name = leaf.partition(".")
    value = raw[section][name] if name else raw[section]
    rule = next((item.metadata for item in fields(RECORDS[section]) if item.name == name), {}) if name else {}
    if isinstance(value, bool):
        return not value
    if "allowed" in rule:
        return next(word for word in rule["allowed"] if word != value)
    if rule.get("type") == "number":
        return 0.5 if value is None else value / 2 if value and value / 2 >= rule["min"] else value + 0.25
    return 64 if value is None else value + 1


def changed(raw: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(raw)
    for leaf, value in setting.items():
        section, _, name = leaf.partition(".")
        if name:
            found[section][name] = value
        else:
            found[section] = value
    return found
