"""Rules of SGLang 0.5.23 that compare a draft's config with its tensors; those of the config are in sglang_rules.

Paths are under sglang/srt; `SGLANG_TENSOR_RULES` lists all that are applied, those that hold for both servers too.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.checks.config_rules import Given, Rule
from eagle3.checks.sglang_rules import CLASSES, SGLANG
from eagle3.checks.sglang_tensors import shares_embedding
from eagle3.checks.tensor_rules import (
    ATTN,
    INTEGERS,
    dtypes_are_plain,
    layers_are_as_many_as_the_tensors,
    sizes_are_those_of_the_tensors,
    vocabulary_is_that_of_the_tensors,
)
from eagle3.problems import Problem


def class_has_a_place_for_the_tensors(given: Given) -> Iterator[Problem]:
    """q_norm and k_norm have no place in any class, kv_a projections in Eagle3DeepseekV2ForCausalLM alone.

    Source: models/llama_eagle3.py and kimi_k25_eagle3.py.
    """
    mla = f"{ATTN}.kv_a_proj_with_mqa.weight" in given.tensors
    plain = f"{ATTN}.q_proj.weight" in given.tensors
    names = given.config.raw.get("architectures")
    if f"{ATTN}.q_norm.weight" in given.tensors and given.config.variant != "qwen3":
        consequence = f"{SGLANG} drops both norms without a word: this draft is for vLLM alone"
        yield given.problem("class-name", "architectures", names, "a class with q_norm", "serve with vLLM", consequence)
    elif (mla and given.config.variant == "llama") or (plain and not mla and given.config.variant == "mla"):
        right = CLASSES["mla" if mla else "llama"]
        consequence = f"{SGLANG} builds the {given.config.variant} draft and drops its attention without a word"
        fix = f'write architectures: ["{right}"]'
        yield given.problem("class-name", "architectures", names, f'["{right}"]', fix, consequence)


def map_holds_integers(given: Given) -> Iterator[Problem]:
    """d2t holds integers.

    Source: models/llama_eagle3.py, load_weights (hot_token_id = d2t + arange), speculative/eagle_worker_v2.py.
    """
    d2t = given.tensors.get("d2t")
    if d2t is not None and d2t.dtype not in INTEGERS:
        consequence = f"{SGLANG} looks token ids up in it: they become {d2t.dtype}"
        yield Problem("map-dtype", "d2t", d2t.dtype, "I64", "export d2t as int64", consequence)


def norm_flags_have_their_tensors(given: Given) -> Iterator[Problem]:
    """norm_before_fc is true exactly where input_norm exists, fc_norm exactly where fc_norm.N do.

    Source: models/llama_eagle3.py, LlamaModel; kimi_k25_eagle3.py knows fc_norm alone.
    """
    config = given.config
    if not given.tensors:
        return
    legacy = any("aux_norm_" in name for name in given.tensors)
    has = {"fc_norm": legacy or any(name.startswith("fc_norm.") for name in given.tensors)}
    if config.variant != "mla":
        has["norm_before_fc"] = "input_norm.weight" in given.tensors
    for key, present in has.items():
        flag: bool = getattr(config, key)
        if flag != present:
            tensor = "input_norm.weight" if key == "norm_before_fc" else "fc_norm.N.weight"
            consequence = f"{SGLANG} {'norms with ones' if flag else 'drops the tensor without a word'}"
            found = None if key in config.absent and not flag else flag
            expected = f"{str(present).lower()}: {tensor} is {'there' if present else 'not there'}"
            yield given.problem("norm-flag", key, found, expected, given.write(key, present), consequence)


def captured_states_reach_fc(given: Given) -> Iterator[Problem]:
    """use_aux_hidden_state is true wherever fc exists.

    Source: speculative/eagle_utils.py, get_draft_input_from_target_hidden_dim; models/llama_eagle3.py, forward.
    """
    if not given.config.use_aux and "fc.weight" in given.tensors:
        consequence = f"{SGLANG} feeds the draft the final state alone, past fc"
        where = "eagle_config.use_aux_hidden_state"
        fix = given.write(where, True)
        yield given.problem("aux-flag", where, False, "true: fc.weight is there", fix, consequence)


def embedding_is_the_verifiers(given: Given) -> Iterator[Problem]:
    """The draft's embedding is the verifier's, in its basis: SGLang replaces it wherever the widths agree.

    Source: models/llama.py, set_embed; speculative/eagle_worker_v2.py, init_lm_head.
    """
    if given.verifier and given.verifier.rotated and shares_embedding(given.config):
        consequence = f"{SGLANG} puts the rotated verifier's embedding in place of any other"
        fix = "serve it with vLLM, with embed_tokens in the original basis"
        yield Problem("embedding", "embed_tokens.weight", "shared", "the draft's own", fix, consequence, "warning")


SGLANG_TENSOR_RULES: tuple[Rule, ...] = (
    class_has_a_place_for_the_tensors,
    layers_are_as_many_as_the_tensors,
    sizes_are_those_of_the_tensors,
    vocabulary_is_that_of_the_tensors,
    map_holds_integers,
    norm_flags_have_their_tensors,
    captured_states_reach_fc,
    embedding_is_the_verifiers,
    dtypes_are_plain,
)
