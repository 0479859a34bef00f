"""Rules about the pair: whether the server can serve this draft beside this verifier, on as many GPUs as it needs."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.checks.config_rules import VLLM, Given, Rule
from eagle3.formats.json_files import printable, spelled
from eagle3.problems import Problem

USUAL = (2, 4, 8)


def verifier_gives_aux_states(given: Given) -> Iterator[Problem]:
    """The verifier's class hands out aux hidden states.

    Source: vllm/v1/worker/gpu_model_runner.py (supports_eagle3); the lists of eagle3/verifiers/eagle3_verifiers.py.
    """
    names = given.verifier.architectures if given.verifier else ()
    if not names:
        return
    from eagle3.verifiers.eagle3_verifiers import WITH_EAGLE3, WITHOUT_EAGLE3

    where, found = "verifier: architectures", printable(names[0])
    expected = "a class with the interface SupportsEagle3"
    if names[0] in WITHOUT_EAGLE3:
        consequence = f"{VLLM} does not start: Model does not support EAGLE3 interface (vllm#31254 and others)"
        fix = "look whether a later vLLM lists the class (SupportsEagle3 in its model file), or serve without a draft"
        yield Problem("verifier-type", where, found, expected, fix, consequence)
    elif names[0] not in WITH_EAGLE3:
        consequence = f"{VLLM} has no such class of its own; its Transformers backend may serve it, more slowly"
        fix = "try it; a later vLLM may have the class"
        yield Problem("verifier-type", where, found, expected, fix, consequence, "warning")


def draft_is_for_this_verifier(given: Given) -> Iterator[Problem]:
    """The class of the verifier that the draft names is this verifier's.

    Source: speculators 0.9.0, `speculators_config.verifier.architectures`, written when the draft was trained.
    """
    named, real = given.config.trained_for, given.verifier.architectures if given.verifier else ()
    if named and real and not set(named) & set(real):
        consequence = "a draft that was trained on the states of another model loads, and nothing is accepted"
        where = "speculators_config.verifier.architectures"
        fix = "give the right verifier; a multimodal model and its text model have two names for one"
        yield Problem("verifier-type", where, spelled(list(named)), spelled(list(real)), fix, consequence, "warning")


def heads_divide_among_the_gpus(given: Given) -> Iterator[Problem]:
    """The draft's heads divide by the tensor-parallel size, wherever the verifier's do.

    Source: vllm/config/model.py, verify_with_parallel_config; vllm/config/speculative.py, _verify_and_get_draft_tp.
    """
    config, size = given.config, given.tensor_parallel_size
    heads, inner = config.num_attention_heads, config.intermediate_size
    legal = [each for each in range(1, 65) if heads % each == 0 and inner % each == 0 and _kv_fit(given, each)]
    if size and size not in legal:
        consequence = f"{VLLM} does not start: heads must be divisible by the tensor-parallel size"
        fix = f"--tensor-parallel-size {' or '.join(map(str, legal))}, or draft_tensor_parallel_size: 1 for the draft"
        expected = f"divisible by the tensor-parallel size {size}; legal sizes: {legal}"
        yield given.problem("tensor-parallel", "num_attention_heads", heads, expected, fix, consequence)
        return
    if config.hidden_size % heads or heads % config.num_key_value_heads:
        return  # heads_divide says it
    theirs = given.verifier.num_attention_heads if given.verifier else None
    barred = [each for each in USUAL if theirs and theirs % each == 0 and each not in legal]
    if barred and not size:
        consequence = f"{VLLM} does not start with --tensor-parallel-size {' or '.join(map(str, barred))}"
        expected = f"heads that divide as the verifier's {theirs} do; legal sizes: {legal}"
        fix = "serve on fewer GPUs, or with draft_tensor_parallel_size: 1 in --speculative-config"
        yield given.warning("tensor-parallel", "num_attention_heads", heads, expected, fix, consequence)


def _kv_fit(given: Given, size: int) -> bool:
    """llama.py, LlamaAttention: kv heads are divided among the GPUs, or each is repeated on several."""
    kv_heads = given.config.num_key_value_heads
    return given.config.variant == "mla" or kv_heads % size == 0 or size % kv_heads == 0


def special_tokens_exist(given: Given) -> Iterator[Problem]:
    """bos_token_id and eos_token_id are tokens of the vocabulary.

    Source: no server reads a draft's; outside the vocabulary they show that the config was copied from another model.
    """
    for key in ("bos_token_id", "eos_token_id"):
        value = given.config.raw.get(key)
        ids = value if isinstance(value, list) else [value]
        outside = [each for each in ids if type(each) is int and not 0 <= each < given.config.vocab_size]
        if outside:
            consequence = "no server reads it in a draft; the config may have been copied from another model's"
            expected = f"0 to {given.config.vocab_size - 1}"
            fix = "compare the other fields with the verifier's config"
            yield given.warning("special-token", key, spelled(value), expected, fix, consequence)


VERIFIER_RULES: tuple[Rule, ...] = (
    verifier_gives_aux_states,
    draft_is_for_this_verifier,
    heads_divide_among_the_gpus,
    special_tokens_exist,
)
