from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3.drafts.draft_architecture import DraftArchitecture, resolve_architecture, verifier_rope
from eagle3.params import DraftParams, read_params
from eagle3.problems import InvalidInput
from tests.code_deps import ROOT

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
PARAMS = read_params(ROOT / "params.yaml").draft


def resolve(params: DraftParams = PARAMS, config: dict = LLAMA, draft_vocab_size: int = 128) -> DraftArchitecture:
    return resolve_architecture(params, config, draft_vocab_size, [1, 3, 5])


def refused(params: DraftParams = PARAMS, config: dict = LLAMA, draft_vocab_size: int = 128) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        resolve(params, config, draft_vocab_size)
    return [problem.where for problem in caught.value.problems]


def without(*names: str) -> dict:
    return {key: value for key, value in LLAMA.items() if key not in names}


def test_null_takes_the_verifiers_value():
    taken = resolve()
    assert (taken.num_attention_heads, taken.num_key_value_heads, taken.intermediate_size) == (4, 2, 128)
    assert (taken.rms_norm_eps, taken.max_position_embeddings) == (1e-5, 512)
    assert taken.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_given_value_is_kept():
    assert resolve(replace(PARAMS, head_dim=32, intermediate_size=96)).intermediate_size == 96


def test_absent_head_dim_is_hidden_size_over_heads():
    assert resolve().head_dim == 16
    assert resolve(config={**LLAMA, "head_dim": 32}).head_dim == 32
    assert refused(config={**LLAMA, "hidden_size": 66}) == ["draft.head_dim"]


def test_absent_kv_heads_are_as_many_as_heads():
    assert resolve(config=without("num_key_value_heads")).num_key_value_heads == 4


def test_every_missing_number_is_named():
    assert refused(config=without("intermediate_size", "rms_norm_eps", "rope_parameters")) == [
        "draft.intermediate_size",
        "draft.rms_norm_eps",
        "draft.rope_parameters",
    ]


def test_latent_attention_gives_no_heads():
    assert refused(config={**LLAMA, "kv_lora_rank": 512, "head_dim": 64}) == [
        "draft.num_attention_heads",
        "draft.num_key_value_heads",
        "draft.head_dim",
    ]
    explicit = replace(PARAMS, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    assert resolve(explicit, {**LLAMA, "kv_lora_rank": 512}).head_dim == 128


def test_heads_must_divide_and_head_dim_be_even():
    assert refused(replace(PARAMS, num_key_value_heads=3, head_dim=15)) == [
        "draft.num_key_value_heads",
        "draft.head_dim",
    ]


def test_draft_vocabulary_is_at_most_the_verifiers():
    assert refused(draft_vocab_size=321) == ["vocab_map.draft_vocab_size"]


def test_one_plus_w_norms_are_refused_with_the_reason():
    with pytest.raises(InvalidInput, match="x \\* w"):
        resolve(config={**LLAMA, "model_type": "gemma3_text"})


def test_null_window_is_full_attention():
    assert resolve().layer_types == ["full_attention"]
    assert resolve(replace(PARAMS, sliding_window=64)).layer_types == ["sliding_attention"]


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64.0}},
            {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, None),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}, None),
        ({}, None),
    ],
)
def test_rope_is_one_flat_mapping_or_none(config, rope):
    assert verifier_rope(config) == rope
