"""The rules that hold for SGLang 0.5.23 and not for vLLM: what its EAGLE-3 classes do not know, or take otherwise.

Read in the wheel on PyPI; paths below are under sglang/srt. Rules that hold for both servers are in config_rules,
size_rules and tensor_rules; `SGLANG_CONFIG_RULES` lists all that are applied to a config.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.checks.config_rules import (
    Given,
    Rule,
    activation_is_silu,
    epsilon_is_given,
    heads_divide,
    keys_are_known,
    norms_agree,
)
from eagle3.checks.sglang_aux_ids import SGLANG_AUX_ID_RULES
from eagle3.checks.sglang_value_rules import (
    SGLANG,
    attention_has_no_window,
    draft_vocabulary_is_said,
    dtype_is_the_verifiers,
    head_is_not_tied,
    positions_reach_the_verifiers,
    vocabulary_is_named_as_the_verifiers,
)
from eagle3.checks.size_rules import (
    rope_is_complete,
    rope_is_given_once,
    sizes_are_given,
    target_width_is_the_verifiers,
)
from eagle3.checks.tensor_size_rules import ATTN
from eagle3.checks.verifier_rules import special_tokens_exist
from eagle3.formats.json_files import printable
from eagle3.problems import Problem

CLASSES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
MODEL_TYPES = {
    "llama": ("llama", "mistral", "phi3", "qwen2", "qwen3"),
    "mla": ("deepseek_v2", "deepseek_v3", "kimi_k2"),
}
EXPORT = "python -m eagle3 export SRC DST --engine sglang"


def format_is_flat(given: Given) -> Iterator[Problem]:
    """The config is flat; SGLang does not read speculators' nested format.

    Source: utils/hf_transformers/config.py, get_config (AutoConfig wants a model_type); models/*.py name no such class.
    """
    if given.config.nested:
        consequence = f"{SGLANG} refuses: transformers finds no model_type, and no class is called Eagle3DraftModel"
        yield Problem(
            "nested-config", "transformer_layer_config", "speculators' format", "a flat config", EXPORT, consequence
        )


def residual_is_not_normed(given: Given) -> Iterator[Problem]:
    """norm_before_residual is false: the residual of SGLang's draft is always the un-normed state.

    Source: models/llama_eagle3.py, LlamaDecoderLayer.forward; the name norm_before_residual occurs nowhere in 0.5.23.
    """
    found, absent = given.config.raw.get("norm_before_residual"), "norm_before_residual" in given.config.absent
    nested = given.config.nested and absent
    if found or nested:
        consequence = f"{SGLANG} does not know the field and computes as if it were false: this draft is for vLLM alone"
        fix = "serve it with vLLM, or train with norm_before_residual: false"
        yield given.problem("norm-flag", "norm_before_residual", found, "false", fix, consequence)
    elif absent:
        consequence = f"{SGLANG} computes as if it were false; a draft trained with true is for vLLM alone"
        fix = "write false, if the draft was trained so (SafeAILab, SpecForge, ModelOpt)"
        yield given.warning("norm-flag", "norm_before_residual", None, "false", fix, consequence)


def fed_back_norm_is_said(given: Given) -> Iterator[Problem]:
    """norm_output is written: no tensor tells it.

    Source: models/llama_eagle3.py and kimi_k25_eagle3.py, norm_output = getattr(config, ..., False).
    """
    if "norm_output" in given.config.absent:
        consequence = f"{SGLANG} takes false; a draft trained with true would lose acceptance from the second token on"
        yield given.warning("norm-flag", "norm_output", None, "true or false", "write it", consequence)


def class_is_sglangs(given: Given) -> Iterator[Problem]:
    """`architectures` names a draft class of SGLang first: LlamaForCausalLMEagle3 or Eagle3DeepseekV2ForCausalLM.

    Source: models/registry.py, resolve_model_cls (first name it knows, else the Transformers backend).
    """
    names = given.config.raw.get("architectures") or []
    if names[:1] and names[0] in CLASSES.values():
        return
    right = CLASSES.get(given.config.variant)
    if right is None:
        consequence = f"{SGLANG} has no Qwen3 draft: it builds another model, or none"
        words = "serve it with vLLM, or train a Llama-type draft"
        expected = " or ".join(CLASSES.values())
        yield given.problem("class-name", "architectures", names or None, expected, words, consequence)
        return
    consequence = f"{SGLANG} builds an ordinary model and drops the draft, or refuses the class"
    fix = given.write("architectures", [right])
    yield given.problem("class-name", "architectures", names or None, f'["{right}"]', fix, consequence)


def model_type_has_a_config(given: Given) -> Iterator[Problem]:
    """`model_type` is one whose config class knows the fields: llama, or a DeepSeek type for MLA.

    Source: utils/hf_transformers (AutoConfig, and its own alias for kimi_k2); configs/model_config.py (MLA by class).
    """
    if given.config.variant not in MODEL_TYPES:
        return  # class_is_sglangs says it
    found, known = given.config.raw.get("model_type"), MODEL_TYPES[given.config.variant]
    right = known[0]
    fix = f'write model_type: "{right}"'
    if found in known:
        if given.config.variant == "llama" and found != "llama":
            consequence = (
                f"{SGLANG} builds the Llama draft, and takes what the config leaves out from {found}'s defaults"
            )
            yield given.warning("model-type", "model_type", found, right, fix, consequence)
        return
    consequence = "transformers 5.19.0 finds no config class, or one without the draft's fields"
    yield given.problem("model-type", "model_type", found, right, fix, consequence)


def attention_has_no_bias(given: Given) -> Iterator[Problem]:
    """q, k and v have no bias: SGLang's draft builds none, whatever attention_bias says; the MLP has none either.

    Source: models/llama_eagle3.py, LlamaDecoderLayer (bias=False); models/llama.py, LlamaMLP.
    """
    raw, tensors = given.config.raw, given.tensors
    for key, part in (("attention_bias", "q_proj"), ("mlp_bias", "gate_proj")):
        place = ATTN if part == "q_proj" else "layers.0.mlp"
        if raw.get(key) and (not tensors or f"{place}.{part}.bias" in tensors) and given.config.variant != "mla":
            consequence = f"{SGLANG} drops these biases without a word: this draft is for vLLM alone"
            fix = "serve it with vLLM, or train without"
            yield given.problem("bias-flag", key, True, "false", fix, consequence)


def later_layers_have_one_norm(given: Given) -> Iterator[Problem]:
    """A layer after the first has hidden_norm and no input_layernorm; an MLA draft has one layer.

    Source: models/llama_eagle3.py, LlamaDecoderLayer.forward (hidden_norm in later layers, where vLLM and speculators
    use input_layernorm); models/kimi_k25_eagle3.py, Eagle3MLAModel (ValueError beyond one layer).
    """
    layers = given.config.num_hidden_layers
    if given.config.variant == "mla" and layers != 1:
        consequence = f"{SGLANG} refuses: ValueError, EAGLE3 currently only supports 1 layer"
        yield given.problem("layers", "num_hidden_layers", layers, "1", "serve it with vLLM", consequence)
    for index in range(1, layers):
        where, used = f"layers.{index}.input_layernorm.weight", f"layers.{index}.hidden_norm.weight"
        if where in given.tensors and given.config.variant != "mla":
            consequence = f"{SGLANG} norms with hidden_norm and ignores it, vLLM and speculators the reverse"
            beside = used in given.tensors
            found = "beside hidden_norm" if beside else "without hidden_norm, as speculators trains"
            fix = "serve it with the server that it was trained for" if beside else f"rename it to {used}"
            severity = "warning" if beside else "error"
            yield Problem("later-norm", where, found, "hidden_norm alone", fix, consequence, severity)


def verifier_is_one_that_sglang_captures(given: Given) -> Iterator[Problem]:
    """The verifier's class hands out aux hidden states.

    Source: model_executor/model_runner_components/attention_backend_setup.py; eagle3/verifiers/sglang_verifiers.py.
    """
    names = given.verifier.architectures if given.verifier else ()
    if not names:
        return
    from eagle3.verifiers.sglang_verifiers import WITH_EAGLE3

    if names[0] not in WITH_EAGLE3:
        consequence = f"{SGLANG} does not start: ValueError, does not implement set_eagle3_layers_to_capture"
        fix = "look whether a later SGLang has the method in its model file, or serve without a draft"
        where, found = "verifier: architectures", printable(names[0])
        yield Problem("verifier-type", where, found, "a class with set_eagle3_layers_to_capture", fix, consequence)


SGLANG_NESTED_RULES: tuple[Rule, ...] = (format_is_flat, residual_is_not_normed)
SGLANG_CONFIG_RULES: tuple[Rule, ...] = (
    class_is_sglangs,
    model_type_has_a_config,
    heads_divide,
    activation_is_silu,
    epsilon_is_given,
    residual_is_not_normed,
    fed_back_norm_is_said,
    norms_agree,
    attention_has_no_bias,
    later_layers_have_one_norm,
    head_is_not_tied,
    dtype_is_the_verifiers,
    keys_are_known,
    sizes_are_given,
    vocabulary_is_named_as_the_verifiers,
    draft_vocabulary_is_said,
    target_width_is_the_verifiers,
    rope_is_given_once,
    rope_is_complete,
    positions_reach_the_verifiers,
    attention_has_no_window,
    *SGLANG_AUX_ID_RULES,
    verifier_is_one_that_sglang_captures,
    special_tokens_exist,
)
