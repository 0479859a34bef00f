"""The rules of SGLang 0.5.23 about vocabulary, dtype and positions: what its draft takes from elsewhere, or guesses.

Read in the wheel on PyPI; paths below are under sglang/srt. `eagle3.checks.sglang_rules` lists all rules.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.checks.config_rules import DTYPES, Given
from eagle3.checks.draft_config import DraftConfig
from eagle3.checks.servers import SERVERS
from eagle3.checks.sglang_tensors import is_tied
from eagle3.problems import Fix, Problem

SGLANG = SERVERS["sglang"].name


def head_is_not_tied(given: Given) -> Iterator[Problem]:
    """`tie_word_embeddings` is false: else the verifier's embedding is the head.

    Source: models/llama_eagle3.py, LlamaForCausalLMEagle3.__init__; speculative/eagle_worker_v2.py, init_lm_head.
    """
    config = given.config
    if not is_tied(config):
        return
    consequence = f"{SGLANG} uses the verifier's embedding as the head"
    if config.draft_vocab_size != config.vocab_size:
        consequence += f", and its first {config.draft_vocab_size} rows for the draft's vocabulary"
    lost = config.draft_vocab_size != config.vocab_size or "lm_head.weight" in given.tensors
    report = given.problem if lost else given.warning
    fix = given.write("tie_word_embeddings", False)
    yield report("tied-head", "tie_word_embeddings", True, "false", fix, consequence)


def vocabulary_is_named_as_the_verifiers(given: Given) -> Iterator[Problem]:
    """`vocab_size` is the verifier's: it is the width of the logits where the draft's vocabulary is not reduced.

    Source: models/llama_eagle3.py, __init__ (VocabParallelEmbedding, which is replaced; LogitsProcessor).
    """
    config, wanted = given.config, given.verifier.vocab_size if given.verifier else None
    if wanted is None or config.vocab_size == wanted:
        return
    reduced = config.draft_vocab_size < config.vocab_size
    consequence = f"{SGLANG} builds an embedding of {config.vocab_size} rows and puts the verifier's in its place"
    if not reduced:
        consequence = f"{SGLANG} computes {config.vocab_size} logits for a verifier of another width"
    report = given.warning if reduced else given.problem
    fix = given.write("vocab_size", wanted)
    yield report("vocabulary", "vocab_size", config.vocab_size, f"{wanted}, the verifier's", fix, consequence)


def draft_vocabulary_is_said(given: Given) -> Iterator[Problem]:
    """`draft_vocab_size` is written: the rows of lm_head, or null where the draft has no head of its own.

    Source: models/llama_eagle3.py, __init__ (config.draft_vocab_size; None borrows the verifier's head).
    """
    config, head = given.config, given.shape("lm_head.weight")
    rows = str(head[0]) if head else "the rows of lm_head" if not given.tensors else "null"
    key = "draft_vocab_size"
    fix: Fix = given.write(key, head[0]) if len(head) == 2 else f"write {key}: {rows}"
    if key not in config.absent:
        if config.draft_vocab_size > config.vocab_size:
            consequence = f"{SGLANG} proposes tokens that do not exist"
            expected = f"at most vocab_size {config.vocab_size}"
            yield given.problem("vocabulary", key, config.draft_vocab_size, expected, "correct it", consequence)
        elif len(head) == 2 and head[0] != config.draft_vocab_size:
            consequence = f"{SGLANG} refuses: AssertionError"
            expected = f"{rows}, rows of lm_head"
            yield given.problem("vocabulary", key, config.draft_vocab_size, expected, fix, consequence)
    elif key in config.nulls or config.variant == "mla":
        if head or "d2t" in given.tensors:
            consequence = f"{SGLANG} puts the verifier's head in place of the draft's"
            found = "null" if key in config.nulls else None
            yield given.problem("vocabulary", key, found, f"{rows}, rows of lm_head", fix, consequence)
    else:
        consequence = f"{SGLANG} refuses: AttributeError, no attribute draft_vocab_size"
        yield given.problem("vocabulary", key, None, rows, fix, consequence)


def dtype_is_the_verifiers(given: Given) -> Iterator[Problem]:
    """`dtype` is written and is the verifier's: the draft is computed in its own.

    Source: configs/model_config.py, _get_and_verify_dtype (auto: the config's own; float32 or none becomes float16).
    """
    raw, verifier = given.config.raw, given.verifier.dtype if given.verifier else None
    key = "dtype" if "dtype" in raw else "torch_dtype"
    found = raw.get(key)
    fix = f'write dtype: "{verifier or "bfloat16"}", or start the server with --dtype {verifier or "bfloat16"}'
    if found is not None and found not in DTYPES:
        consequence = "AttributeError: torch has no such attribute"
        yield given.problem("dtype", key, found, f'"{verifier or "bfloat16"}"', fix, consequence)
        return
    taken = dtype_of_the_draft(given.config)
    if verifier and taken != _with_auto(verifier):
        consequence = f"{SGLANG} computes the draft in {taken} on states in {_with_auto(verifier)} (sglang#25894)"
        yield given.problem("dtype", key, found, f'"{verifier}", the verifier\'s', fix, consequence)
    elif found is None:
        consequence = f"{SGLANG} computes the draft in float16, whatever the verifier is in"
        yield given.warning("dtype", key, None, "the verifier's dtype", fix, consequence)


def dtype_of_the_draft(config: DraftConfig) -> str:
    """The dtype that SGLang computes a draft in without --dtype; the verifier's follows the same rule."""
    return _with_auto(config.dtype or "float32")


def _with_auto(dtype: str) -> str:
    return "float16" if dtype in ("float32", "float") else dtype


def positions_reach_the_verifiers(given: Given) -> Iterator[Problem]:
    """`max_position_embeddings` reaches as far as the verifier's.

    Source: configs/model_config.py, _derive_context_length; utils/hf_transformers/common.py, get_context_length.
    """
    raw, verifier = given.config.raw, given.verifier
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    factor = rope.get("factor", 1)
    if not isinstance(factor, (int, float)) or "original_max_position_embeddings" in rope:
        factor = 1
    key = "max_position_embeddings"
    found = raw.get(key)
    length = int(factor * (found or 2048))
    wanted = verifier.max_position_embeddings if verifier else None
    if wanted and length < wanted:
        consequence = (
            f"{SGLANG} refuses: ValueError, the target's context length is greater, unless --context-length is at most "
            f"{length} or SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
        fix = given.write(key, wanted)  # rotary embedding has no weights
        yield given.problem("positions", key, found, f"{wanted}, the verifier's", fix, consequence)
    elif found is None:
        consequence = f"{SGLANG} takes the default of the config class, and refuses if the verifier's is greater"
        yield given.warning("positions", key, None, "the verifier's length", "write it", consequence)


def attention_has_no_window(given: Given) -> Iterator[Problem]:
    """No layer slides: a window comes from the server's command line alone.

    Source: models/llama_eagle3.py, __init__ (speculative_draft_window_size); layer_types is not read.
    """
    raw, layers = given.config.raw, given.config.num_hidden_layers
    types = raw.get("layer_types")
    if types is not None and len(types) != layers:
        consequence = "transformers 5.19.0 refuses: as many entries as layers"
        yield given.problem("window", "layer_types", types, f"{layers} entries", "correct it", consequence)
    slides = "sliding_attention" in types if types is not None else raw.get("use_sliding_window")
    if slides and raw.get("sliding_window"):
        consequence = f"{SGLANG} computes full attention unless it is started with --speculative-draft-window-size"
        fix = f"start the server with --speculative-draft-window-size {raw['sliding_window']}, or serve with vLLM"
        key = "layer_types" if types is not None else "use_sliding_window"
        yield given.problem("window", key, raw[key], "full_attention", fix, consequence)
