from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.formats.flat_config import flatten
from eagle3.problems import InvalidInput
from tests.drafts import LAYER, NESTED

FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "draft_vocab_size": 40,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "norm_before_fc": True,
        "use_aux_hidden_state": True,
    },
    "fc_norm": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["full_attention"],
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "num_attention_heads": 4,
    "num_aux_hidden_states": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 160,
}


def nested(**changes) -> dict:
    return {**copy.deepcopy(NESTED), **changes}


def layer(**changes) -> dict:
    return nested(transformer_layer_config={**LAYER, **changes})


def test_the_whole_flat_config_is_this():
    assert flatten(nested()) == FLAT


def test_a_full_vocabulary_and_a_narrower_draft_keep_their_sizes():
    flat = flatten(nested(draft_vocab_size=160, target_hidden_size=128))
    assert (flat["draft_vocab_size"], flat["target_hidden_size"]) == (160, 128)


def test_embeddings_as_aux_state_have_no_number_in_sglang():
    flat = flatten(nested(eagle_aux_hidden_state_layer_ids=[0, 3, 5]))
    assert "eagle_aux_hidden_state_layer_ids" not in flat["eagle_config"]
    assert flat["num_aux_hidden_states"] == 3


def test_a_window_survives():
    flat = flatten(layer(layer_types=["sliding_attention"], sliding_window=64))
    assert (flat["layer_types"], flat["sliding_window"]) == (["sliding_attention"], 64)


def test_rope_scaling_of_older_checkpoints_survives():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = layer(rope_parameters=None, rope_theta=5e5, rope_scaling=rope)
    flat = flatten(old)
    assert (flat["rope_theta"], flat["rope_scaling"]) == (5e5, rope)
    assert "rope_parameters" not in flat


def test_a_qwen3_draft_gets_its_own_class():
    assert flatten(layer(model_type="qwen3"))["architectures"] == ["Eagle3Qwen3ForCausalLM"]


REFUSED = {
    "an unknown key": (nested(norm_after_fc=True), ["norm_after_fc"]),
    "an unknown key of the layer": (layer(qk_norm=True), ["transformer_layer_config.qk_norm"]),
    "an unknown key that is null": (nested(new=None), ["new"]),
    "a missing flag": ({k: v for k, v in NESTED.items() if k != "norm_output"}, ["norm_output"]),
    "a flag that is null": (nested(norm_before_fc=None), ["norm_before_fc"]),
    "no layer ids": (nested(eagle_aux_hidden_state_layer_ids=None), ["eagle_aux_hidden_state_layer_ids"]),
    "unsorted ids": (nested(eagle_aux_hidden_state_layer_ids=[5, 2]), ["eagle_aux_hidden_state_layer_ids"]),
    "repeated ids": (nested(eagle_aux_hidden_state_layer_ids=[2, 2]), ["eagle_aux_hidden_state_layer_ids"]),
    "ids that are no numbers": (nested(eagle_aux_hidden_state_layer_ids=[True]), ["eagle_aux_hidden_state_layer_ids"]),
    "another width of fc": (layer(num_aux_hidden_states=4), ["transformer_layer_config.num_aux_hidden_states"]),
    "a layer without head_dim": (layer(head_dim=None), ["transformer_layer_config.head_dim"]),
    "a layer without rope": (layer(rope_parameters=None), ["transformer_layer_config.rope_parameters"]),
    "another kind of layer": (layer(model_type="gemma3_text"), ["transformer_layer_config.model_type"]),
    "no layer at all": (nested(transformer_layer_config=None), ["transformer_layer_config"]),
    "another drafter": (nested(speculators_model_type="dflash"), ["speculators_model_type"]),
    "a flat config": (FLAT, ["transformer_layer_config"]),
    "a tied head": (nested(tie_word_embeddings=True), ["tie_word_embeddings"]),
}


@pytest.mark.parametrize(("config", "places"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_said_in_the_flat_form_is_refused(config, places):
    with pytest.raises(InvalidInput) as caught:
        flatten(config)
    assert set(places) <= {problem.where for problem in caught.value.problems}


def test_all_problems_come_at_once():
    with pytest.raises(InvalidInput) as caught:
        flatten(nested(a=1, norm_output=None, draft_vocab_size=None))
    assert [problem.where for problem in caught.value.problems] == ["a", "draft_vocab_size", "norm_output"]


KEYS = st.sampled_from([*NESTED, "other"])
LAYER_KEYS = st.sampled_from([*LAYER, "other"])
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.lists(st.integers(-2, 9), max_size=4)
    | st.dictionaries(st.text(max_size=2), st.none(), max_size=2)
)


@given(st.dictionaries(KEYS, VALUES, max_size=3), st.dictionaries(LAYER_KEYS, VALUES, max_size=3))
def test_any_config_is_flattened_or_refused_and_never_defaulted(changes, layer_changes):
    config = nested(transformer_layer_config={**LAYER, **layer_changes}) | changes
    before = json.dumps(config)
    try:
        flat = flatten(config)
    except InvalidInput:
        pass
    else:
        assert set(flat) <= set(FLAT) | {"target_hidden_size", "pad_token_id"}
        assert None not in flat.values()
    assert json.dumps(config) == before, "the input is not changed"
