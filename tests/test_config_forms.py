from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.formats.config_forms import FORMS, Verifier, from_flat, tensor_name, to_flat
from eagle3.formats.flat_config import flatten
from eagle3.layer_ids import sglang_captures
from eagle3.problems import InvalidInput
from tests.drafts import LAYER, NESTED

PLAIN = NESTED | {"norm_before_residual": False}
LLAMA = Verifier(("LlamaForCausalLM",), 61, "org/model", 3)
DEEPSEEK = Verifier(("DeepseekV3ForCausalLM",), 61, "org/model", 3)
UNKNOWN = Verifier()
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 50000.0}


def refused(code: str, flat: dict, engine: str, verifier: Verifier = LLAMA, has_head: bool = True) -> str:
    with pytest.raises(InvalidInput) as caught:
        from_flat(flat, engine, verifier, has_head)
    assert [problem.code for problem in caught.value.problems] == [code]
    return str(caught.value)


def test_what_the_pipeline_writes_is_the_form_vllm():
    flat = flatten(NESTED)
    assert to_flat(flat, UNKNOWN) == to_flat(NESTED, UNKNOWN) == from_flat(flat, "vllm", UNKNOWN, True) == flat


def test_the_form_sglang_literally():
    config = from_flat(flatten(PLAIN), "sglang", LLAMA, True)
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
    }
    assert (config["rope_theta"], config["draft_vocab_size"]) == (10000.0, 40)
    gone = {"eagle_aux_hidden_state_layer_ids", "rope_parameters", "rope_scaling"}
    assert not gone & set(config)


FLAGS = st.fixed_dictionaries({key: st.booleans() for key in ("norm_before_fc", "norm_output", "fc_norm")})
IDS = st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True).map(sorted)
ROPES = st.sampled_from([LAYER["rope_parameters"], YARN])


@given(FLAGS, IDS, ROPES, st.sampled_from([LLAMA, DEEPSEEK]), st.sampled_from(["sglang", "speculators"]))
def test_there_and_back_is_the_same_config(flags, ids, rope, verifier, engine):
    noted = {"architectures": list(verifier.architectures), "name_or_path": "org/model"}
    nested = PLAIN | flags | {"eagle_aux_hidden_state_layer_ids": ids}
    nested["transformer_layer_config"] = LAYER | {"rope_parameters": rope}
    nested["speculators_config"] = NESTED["speculators_config"] | {"verifier": noted}
    flat = flatten(nested)
    if engine == "sglang" and verifier is DEEPSEEK and ids[0] == 1:
        refused("aux-layer-sglang", flat, "sglang", verifier)
        return
    config = from_flat(flat, engine, verifier, True)
    assert to_flat(config, verifier) == flat
    if engine == "sglang":
        listed = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert sglang_captures(listed, verifier.architectures, 61) == ids


def test_a_draft_without_a_head_says_null_to_sglang_alone():
    flat = flatten(PLAIN | {"draft_vocab_size": 160})
    config = from_flat(flat, "sglang", LLAMA, has_head=False)
    assert config["draft_vocab_size"] is None
    assert to_flat(config, LLAMA) == flat
    assert from_flat(flat, "vllm", LLAMA, has_head=False) == flat
    assert from_flat(flat, "sglang", LLAMA, has_head=True)["draft_vocab_size"] == 160


def test_a_specforge_config_becomes_explicit():
    """Everything that both servers compute in silence is written."""
    config = {
        key: value
        for key, value in from_flat(flatten(PLAIN), "sglang", LLAMA, True).items()
        if key not in ("norm_before_residual", "norm_output", "fc_norm", "num_aux_hidden_states", "norm_before_fc")
    }
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    flat = to_flat(config | {"rope_scaling": None}, LLAMA)
    assert flat == flatten(PLAIN | {"norm_output": False, "norm_before_fc": False})


def test_sglang_knows_no_norm_before_residual():
    assert "norm_before_residual" in refused("no-such-form", flatten(NESTED), "sglang")


def test_layers_that_sglang_cannot_capture_are_refused():
    refused("aux-layer-embedding", flatten(PLAIN | {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}), "sglang")


@pytest.mark.parametrize("listed", [[2, 30, 58], [5, 6, 7]])
def test_a_list_that_can_mean_two_things_needs_the_verifier(listed):
    flat = from_flat(flatten(PLAIN), "sglang", LLAMA, True)
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": listed}
    with pytest.raises(InvalidInput, match="aux-layer-numbering"):
        to_flat(flat, UNKNOWN)
    top = "eagle_aux_hidden_state_layer_ids"
    assert to_flat(flat, LLAMA)[top] == [each + 1 for each in listed]
    assert to_flat(flat, DEEPSEEK)[top] == listed


def test_layers_at_the_top_level_alone_need_the_verifier_for_sglang():
    flat = to_flat(flatten(PLAIN) | {"eagle_aux_hidden_state_layer_ids": [3, 4, 5], "eagle_config": {}}, UNKNOWN)
    assert "eagle_aux_hidden_state_layer_ids" not in flat["eagle_config"]
    refused("aux-layer-numbering", flat, "sglang", UNKNOWN)


def test_two_lists_that_no_verifier_reconciles_are_not_passed_on():
    flat = flatten(PLAIN)
    flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [5, 6, 7]
    assert "eagle_aux_hidden_state_layer_ids" not in to_flat(flat, UNKNOWN)["eagle_config"]
    assert to_flat(flat, LLAMA)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_type": "deepseek_v2"}, "no-such-form"),
        ({"window_of_mine": 1}, "no-such-form"),
        ({"head_dim": None}, "missing-key"),
        ({"tie_word_embeddings": True}, "tied"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "no-such-form"),
    ],
)
def test_what_the_nested_format_cannot_say_is_refused(changes, code):
    refused(code, flatten(PLAIN) | changes, "speculators")


def test_speculators_needs_what_no_flat_config_has():
    with pytest.raises(InvalidInput) as caught:
        from_flat(flatten(PLAIN), "speculators", UNKNOWN, True)
    assert [problem.fix for problem in caught.value.problems] == ["--verifier-name NAME", "--num-speculative-tokens N"]


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, {"rope_scaling": YARN, "rope_theta": 1.5}],
)
def test_two_ropes_are_refused(rope):
    with pytest.raises(InvalidInput, match="rope"):
        to_flat(flatten(PLAIN) | rope, LLAMA)


@pytest.mark.parametrize("rope", [LAYER["rope_parameters"], YARN], ids=["default", "yarn"])
def test_both_spellings_of_rope_are_one_to_transformers(rope):
    """SGLang 0.5.23 and vLLM 0.32.0 both read the config through transformers 5.19.0."""
    from transformers import LlamaConfig

    nested = PLAIN | {"transformer_layer_config": LAYER | {"rope_parameters": rope}}
    read = [LlamaConfig(**from_flat(flatten(nested), engine, LLAMA, True)) for engine in ("vllm", "sglang")]
    assert read[0].rope_parameters == read[1].rope_parameters
    assert read[0].rope_parameters["rope_theta"] == rope["rope_theta"]


@pytest.mark.parametrize(
    ("name", "plain", "sglang"),
    [
        ("midlayer.norm.weight", "layers.0.norm.weight", "midlayer.norm.weight"),
        ("layers.0.norm.weight", "layers.0.norm.weight", "midlayer.norm.weight"),
        ("layers.1.norm.weight", "layers.1.norm.weight", "layers.1.norm.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight", "fc_norm.1.weight"),
        ("fc.weight", "fc.weight", "fc.weight"),
    ],
)
def test_names_of_tensors(name, plain, sglang):
    assert [tensor_name(name, FORMS[engine]) for engine in FORMS] == [plain, sglang, plain]
