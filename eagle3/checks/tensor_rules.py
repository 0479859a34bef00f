"""Rules that compare a draft's config with the shapes of its tensors and name the value that would be right.

The simulated load (`eagle3.checks.simulated_load`) finds that a tensor does not fit; these say which field is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from eagle3.checks.config_rules import ARCHITECTURE_OF, MODEL_TYPE_OF, VLLM, Given, Rule, layer_kind
from eagle3.checks.draft_config import MLA_DEFAULTS
from eagle3.formats.json_files import printable, spelled
from eagle3.problems import Change, Fix, Problem, repairable

ATTN = "layers.0.self_attn"
FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64")
HIDDEN_AXES = {
    "norm.weight": 0, "fc.weight": 0, "layers.0.hidden_norm.weight": 0, "layers.0.input_layernorm.weight": 0,
    "layers.0.mlp.gate_proj.weight": 1, "layers.0.mlp.down_proj.weight": 0,
}  # fmt: skip
INTERMEDIATE_AXES = {
    "layers.0.mlp.gate_proj.weight": 0, "layers.0.mlp.up_proj.weight": 0, "layers.0.mlp.down_proj.weight": 1,
}  # fmt: skip
LAYER = re.compile(r"^layers\.(\d{1,6})\.")


def layers_are_as_many_as_the_tensors(given: Given) -> Iterator[Problem]:
    """`num_hidden_layers` is the number of layers that have tensors.

    Source: llama_eagle3.py, LlamaModel.layers; the loader leaves a layer without tensors uninitialised.
    """
    found = {int(match[1]) for name in given.tensors if (match := LAYER.match(name))}
    layers = given.config.num_hidden_layers
    if found and found != set(range(layers)):
        count = max(found) + 1 if found == set(range(max(found) + 1)) else len(found)
        consequence = (
            f"{given.server.name} leaves {layers - count} layers uninitialised without a word"
            if layers > count
            else (f"{given.server.name} {given.server.unknown} the tensors of the layers beyond")
        )
        fix: Fix = given.write("num_hidden_layers", count)
        if len(found) == layers == 1:
            yield _misnumbered(given, next(iter(found)))
            return
        if found != set(range(count)):
            fix = f"export the layers between: only {sorted(found)[:8]} have tensors"
        yield given.problem("layers", "num_hidden_layers", layers, f"{count}, as in the tensors", fix, consequence)


def _misnumbered(given: Given, index: int) -> Problem:
    """One layer under another number, as multi-token-prediction layers have it: DeepSeek's layers.61."""
    consequence = f"{given.server.name} {given.server.unknown} the tensors, and layer 0 stays as it was made"
    problem = Problem("layers", f"layers.{index}.*", f"the layer {index}", "the layer 0", "", consequence)
    return repairable(problem, Change("rename", f"layers.{index}.", "layers.0."))


def sizes_are_those_of_the_tensors(given: Given) -> Iterator[Problem]:
    """Every size in the config is the one that the tensors have.

    Source: vllm/model_executor/parameter.py (a larger tensor is narrowed), linear.py, llama_eagle3.py.
    """
    config = given.config
    q, k = given.shape(f"{ATTN}.q_proj.weight"), given.shape(f"{ATTN}.k_proj.weight")
    fc = given.shape("fc.weight")
    wanted: dict[str, int | None] = {
        "hidden_size": _common(given, HIDDEN_AXES),
        "intermediate_size": _common(given, INTERMEDIATE_AXES),
    }
    if config.variant == "mla":
        wanted |= _mla_sizes(given)
    elif len(q) == len(k) == 2 and q[1] == k[1] == 2 * config.hidden_size:
        wanted |= _head_sizes(given, q[0], k[0])
    for key, right in wanted.items():
        taken = getattr(config, key) if hasattr(config, key) else config.raw.get(key, MLA_DEFAULTS.get(key))
        if right and right != taken:  # a tensor without rows names no size
            found = None if key in config.absent else taken
            default = f"takes {taken}, " if found is None else ""
            consequence = f"{given.server.name} {default}{given.server.resized}"
            expected = f"{right}, as in the tensors"
            certain = key != "head_dim" or key in config.absent
            fix: Fix = given.write(key, right) if certain else _or_the_heads(given, right)
            yield given.problem("size", key, found, expected, fix, consequence)
    if len(fc) == 2 and config.use_aux:
        yield from _fc_width(given, fc)


def _common(given: Given, axes: Mapping[str, int]) -> int | None:
    """The size that all these tensors have on their axis; None where they differ: then it is a tensor that is wrong."""
    sizes = {given.shape(name)[axis] for name, axis in axes.items() if len(given.shape(name)) > axis}
    return sizes.pop() if len(sizes) == 1 else None


def _mla_sizes(given: Given) -> dict[str, int | None]:
    """The sizes of latent attention, each from the tensor that has it alone."""
    heads = given.config.num_attention_heads
    kv_rank, kv_a = given.shape(f"{ATTN}.kv_a_layernorm.weight"), given.shape(f"{ATTN}.kv_a_proj_with_mqa.weight")
    q_rank, q_b = given.shape(f"{ATTN}.q_a_layernorm.weight"), given.shape(f"{ATTN}.q_b_proj.weight")
    q_b = q_b or given.shape(f"{ATTN}.q_proj.weight")
    kv_b, o = given.shape(f"{ATTN}.kv_b_proj.weight"), given.shape(f"{ATTN}.o_proj.weight")
    if [len(each) for each in (kv_rank, kv_a, q_b, kv_b, o)] != [1, 2, 2, 2, 2] or len(q_rank) > 1:
        return {}
    rope, q_head, value = kv_a[0] - kv_rank[0], q_b[0] // heads, o[1] // heads
    if rope <= 0 or q_head <= rope or kv_b[0] != heads * (q_head - rope + value):
        return {}
    return {
        "kv_lora_rank": kv_rank[0],
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": q_head - rope,
        "v_head_dim": value,
        "q_lora_rank": q_rank[0] if q_rank else None,
    }


def _or_the_heads(given: Given, head_dim: int) -> str:
    """Rows are heads times head_dim: where both are written, either may be the wrong one."""
    config = given.config
    heads = head_dim * config.num_attention_heads // config.head_dim
    other = f", or num_attention_heads: {heads} if head_dim {config.head_dim} is right" if heads else ""
    return f"write head_dim: {head_dim}{other}"


def _flag_place(given: Given, key: str) -> str:
    """norm_before_fc is read from eagle_config first, where it is there."""
    inner = given.config.raw.get("eagle_config", {}).get(key) if key == "norm_before_fc" else None
    return key if inner is None else f"eagle_config.{key}"


def _head_sizes(given: Given, q_rows: int, k_rows: int) -> dict[str, int | None]:
    """The head sizes that q and k rows allow: with as few fields wrong as possible, head_dim where nothing tells."""
    config = given.config
    dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    if q_rows == heads * dim and k_rows % dim == 0:
        return {"num_key_value_heads": k_rows // dim}
    if "head_dim" not in config.absent and k_rows == kv_heads * dim and q_rows % dim == 0:
        return {"num_attention_heads": q_rows // dim}
    head_dim, rest = divmod(q_rows, heads)
    if rest or not head_dim or not k_rows or k_rows % head_dim:
        return {}
    return {"head_dim": head_dim, "num_key_value_heads": k_rows // head_dim}


def _fc_width(given: Given, fc: tuple[int, ...]) -> Iterator[Problem]:
    config = given.config
    if fc[0] != config.hidden_size or not fc[1] or fc[1] == config.num_aux * config.target_hidden_size:
        return
    ids = config.ids or config.nested_ids
    count = len(ids) or config.num_aux
    wide = given.verifier.hidden_size if given.verifier and given.verifier.hidden_size else config.target_hidden_size
    if fc[1] == count * config.target_hidden_size:
        return  # fc_width_follows_the_ids says it
    if fc[1] % wide == 0 and wide == config.target_hidden_size:
        right = fc[1] // wide
        fix: Fix = f"write {given.place('num_aux_hidden_states')}: {right} and the {right} layer ids"
        expected = f"{right}: fc.weight takes {fc[1]} = {right} x {wide}"
        consequence = f"{given.server.name} builds fc for {config.num_aux} states and refuses the tensor"
        found = config.raw.get("num_aux_hidden_states")
        yield given.problem("fc-width", "num_aux_hidden_states", found, expected, fix, consequence)
    elif fc[1] % count == 0:
        right = fc[1] // count
        found = None if "target_hidden_size" in config.absent else config.target_hidden_size
        known = given.verifier.hidden_size if given.verifier else None
        fix = (
            given.write("target_hidden_size", right) if known == right or ids else f"write target_hidden_size: {right}"
        )
        built = [config.hidden_size, count * config.target_hidden_size]
        consequence = f"{given.server.name} builds fc {built} and refuses the tensor"
        expected = f"{right}: fc.weight takes {fc[1]} = {count} x {right}"
        yield given.problem("width", "target_hidden_size", found, expected, fix, consequence)


def draft_vocabulary_is_the_heads(given: Given) -> Iterator[Problem]:
    """`draft_vocab_size` is the number of rows of lm_head, and the length of d2t.

    Source: llama_eagle3.py, Eagle3LlamaForCausalLM (ParallelLMHead, draft_id_to_target_id).
    """
    config = given.config
    head = given.shape("lm_head.weight")
    absent = "draft_vocab_size" in config.absent
    if len(head) == 2 and head[0] and head[0] != config.draft_vocab_size:
        found = None if absent else config.draft_vocab_size
        took = f"{VLLM} takes vocab_size for it: " if absent else f"{VLLM}: "
        d2t = given.shape("d2t")
        fix = (
            given.write("draft_vocab_size", head[0])
            if d2t in ((), (head[0],))
            else f"cut d2t for {head[0]} rows, or lm_head to {d2t[0]}"
        )
        consequence = f"{took}AssertionError without any text"
        yield given.problem("vocabulary", "draft_vocab_size", found, f"{head[0]}, rows of lm_head", fix, consequence)
    elif absent and head:
        consequence = f"{VLLM} takes vocab_size, which is what lm_head has"
        yield given.warning("vocabulary", "draft_vocab_size", None, str(config.vocab_size), "write it", consequence)


def vocabulary_is_that_of_the_tensors(given: Given) -> Iterator[Problem]:
    """`vocab_size` is the number of rows of embed_tokens and the length of t2d.

    Source: llama_eagle3.py, VocabParallelEmbedding; t2d is skipped by the server and tells the verifier's vocabulary.
    """
    config = given.config
    for name in ("embed_tokens.weight", "t2d"):
        shape = given.shape(name)
        if shape and shape[0] and shape[0] != config.vocab_size:
            known = given.verifier.vocab_size if given.verifier else None
            certain = known in (None, shape[0])
            fix = given.write("vocab_size", shape[0]) if certain else f"rebuild {name} with {known} rows"
            consequence = (
                f"{given.server.name} refuses: AssertionError" if name != "t2d" else "the map is for another vocabulary"
            )
            yield given.problem(
                "vocabulary", "vocab_size", config.vocab_size, f"{shape[0]}, as in {name}", fix, consequence
            )
    t2d = given.tensors.get("t2d")
    if t2d and t2d.dtype not in ("BOOL", "U8", *INTEGERS):
        consequence = "no server reads it, but it is no mask"
        yield Problem("vocabulary", "t2d", t2d.dtype, "BOOL", "export it as bool", consequence, "warning")


def map_is_integers(given: Given) -> Iterator[Problem]:
    """d2t holds 64-bit integers.

    Source: llama_eagle3.py, draft_id_to_target_id (torch.long); copying casts without a word.
    """
    d2t = given.tensors.get("d2t")
    if d2t is None or d2t.dtype == "I64":
        return
    if d2t.dtype in INTEGERS:
        consequence = f"{VLLM} casts it, without loss"
        problem = Problem("map-dtype", "d2t", d2t.dtype, "I64", "", consequence, "warning")
    else:
        consequence = f"{VLLM} rounds it to integers without a word"
        problem = Problem("map-dtype", "d2t", d2t.dtype, "I64", "if its numbers are whole", consequence)
    yield repairable(problem, Change("integers", "d2t"))


def norms_have_their_flags(given: Given) -> Iterator[Problem]:
    """norm_before_fc is true exactly where input_norm exists, fc_norm exactly where fc_norm.N do.

    Source: llama_eagle3.py, load_weights skips input_norm.* without the flag; a flag without its tensor is not noticed.
    """
    config = given.config
    if not given.tensors or config.variant == "mla":
        return
    has = {
        "norm_before_fc": "input_norm.weight" in given.tensors,
        "fc_norm": any(name.startswith("fc_norm.") for name in given.tensors),
    }
    for key, present in has.items():
        flag: bool = getattr(config, key)
        if flag == present:
            continue
        tensor = "input_norm.weight" if key == "norm_before_fc" else "fc_norm.N.weight"
        without = "drops the tensor without a word" if key == "norm_before_fc" else "refuses the tensors"
        consequence = f"{VLLM} leaves the norm uninitialised" if flag else f"{VLLM} {without}"
        found = None if key in config.absent and not flag else flag
        expected = f"{str(present).lower()}: {tensor} is {'there' if present else 'not there'}"
        place = _flag_place(given, key)
        found = found if place == key else flag
        spellings = {place, key} if key in config.raw else {place}
        fix: Fix = tuple(given.write(each, True) for each in sorted(spellings))
        if not present:
            fix = f"export {tensor} again; {place}: false only if trained without"
        yield given.problem("norm-flag", place, found, expected, fix, consequence)


def biases_have_their_flags(given: Given) -> Iterator[Problem]:
    """attention_bias and mlp_bias are true exactly where the bias tensors exist.

    Source: llama_eagle3.py and llama.py; AutoWeightsLoader skips every unexpected .bias without a word.
    """
    if not given.tensors:
        return
    flags = {
        "attention_bias": (given.config.qkv_bias, f"{ATTN}.q_proj.bias"),
        "mlp_bias": (given.config.mlp_bias, "layers.0.mlp.gate_proj.bias"),
    }
    for key, (flag, name) in flags.items():
        present = name in given.tensors
        if flag != present and given.config.variant != "mla":
            right, alone = str(present).lower(), f"{key}: false only if trained without"
            consequence = (
                f"{VLLM} leaves the biases uninitialised" if flag else f"{VLLM} drops the biases without a word"
            )
            found = None if key in given.config.absent else flag
            expected = f"{right}: {name} is {'there' if present else 'not there'}"
            fix: Fix = given.write(key, True) if present else f"export the biases again; {alone}"
            if (
                key == "attention_bias"
                and given.config.variant == "llama"
                and f"{ATTN}.o_proj.bias" not in given.tensors
            ):
                fix = (
                    "write attention_bias: true and add layers.0.self_attn.o_proj.bias, all zero: the class has it too"
                )
            yield given.problem("bias-flag", key, found, expected, fix, consequence)


def class_is_that_of_the_tensors(given: Given) -> Iterator[Problem]:
    """q_norm and k_norm belong to the Qwen3 class, q_a or kv_a projections to the MLA class, neither to Llama.

    Source: vllm/model_executor/models/qwen3_eagle3.py, deepseek_eagle3.py.
    """
    seen = layer_kind(given.tensors)
    if seen and seen != given.config.variant:
        nested = given.config.nested
        where, right = ("model_type", MODEL_TYPE_OF[seen]) if nested else ("architectures", [ARCHITECTURE_OF[seen]])
        found, expected = given.config.raw.get(where), spelled(right)
        fix: Fix = tuple(given.write(*each) for each in {where: right, "model_type": MODEL_TYPE_OF[seen]}.items())
        if nested and seen == "mla":
            fix = "flatten it by hand: the nested format has no MLA layers in vLLM 0.32.0"
        consequence = (
            f"{VLLM} builds the {given.config.variant} draft: tensors are refused or parameters stay uninitialised"
        )
        yield given.problem("class-name", where, found, expected, fix, consequence)


def aux_states_are_used(given: Given) -> Iterator[Problem]:
    """use_aux_hidden_state is true wherever fc exists.

    Source: llama_eagle3.py, load_weights skips fc.* when it is false.
    """
    if not given.config.use_aux and "fc.weight" in given.tensors:
        consequence = f"{VLLM} drops fc without a word and feeds the draft the final state alone"
        fix = given.write("eagle_config.use_aux_hidden_state", True)
        yield given.problem(
            "aux-flag", "eagle_config.use_aux_hidden_state", False, "true: fc.weight is there", fix, consequence
        )


def embedding_is_there_where_it_cannot_be_shared(given: Given) -> Iterator[Problem]:
    """embed_tokens is in the file wherever the draft's width is not the verifier's, or the verifier is rotated.

    Source: vllm/v1/spec_decode/llm_base_proposer.py, _maybe_share_embeddings.
    """
    if not given.tensors or "embed_tokens.weight" in given.tensors:
        return
    config = given.config
    if _verifier_width(given) != config.hidden_size:
        consequence = f"{VLLM} cannot share the verifier's embedding (another width) and leaves it uninitialised"
        expected = f"[{config.vocab_size}, {config.hidden_size}]"
        yield Problem(
            "embedding", "embed_tokens.weight", "absent", expected, "export the draft's embedding", consequence
        )
    elif given.verifier and given.verifier.rotated:
        consequence = "the shared embedding is rotated with the verifier, the draft was trained on another basis"
        fix = "export embed_tokens in the original basis; hidden states are rotated too"
        yield Problem("embedding", "embed_tokens.weight", "absent", "the draft's own", fix, consequence, "warning")


def _verifier_width(given: Given) -> int:
    """The verifier's hidden size: as its config says, else as fc tells, else as the draft's config says."""
    config, fc = given.config, given.shape("fc.weight")
    if given.verifier and given.verifier.hidden_size:
        return given.verifier.hidden_size
    count = len(config.ids or config.nested_ids) or config.num_aux
    return fc[1] // count if len(fc) == 2 and fc[1] % count == 0 else config.target_hidden_size


def dtypes_are_plain(given: Given) -> Iterator[Problem]:
    """Weights are plain floats, in the dtype that the config names.

    Source: vllm/model_executor/models/utils.py, AutoWeightsLoader._load_param: copies across dtypes with a log line.
    """
    if given.config.quantized:
        return
    others: set[str] = set()
    for name, tensor in given.tensors.items():
        if not name.endswith((".weight", ".bias")):
            continue
        if tensor.dtype not in FLOATS:
            consequence = f"{given.server.name} copies the raw numbers into a bfloat16 parameter without a scale"
            fix = "export with a scale and a quantization_config, or dequantise"
            yield Problem("tensor-dtype", printable(name), tensor.dtype, "BF16, F16 or F32", fix, consequence)
        others.add(tensor.dtype)
    named = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(given.config.dtype or "")
    if named and others & set(FLOATS) - {named}:
        consequence = f"{given.server.name} {given.server.cast}"
        found = ", ".join(sorted(others & set(FLOATS)))
        yield Problem(
            "tensor-dtype",
            "dtype",
            found,
            f"{named}, as the config says",
            "export in one dtype",
            consequence,
            "warning",
        )


TENSOR_RULES: tuple[Rule, ...] = (
    class_is_that_of_the_tensors,
    layers_are_as_many_as_the_tensors,
    sizes_are_those_of_the_tensors,
    draft_vocabulary_is_the_heads,
    vocabulary_is_that_of_the_tensors,
    map_is_integers,
    norms_have_their_flags,
    biases_have_their_flags,
    aux_states_are_used,
    embedding_is_there_where_it_cannot_be_shared,
    dtypes_are_plain,
)
