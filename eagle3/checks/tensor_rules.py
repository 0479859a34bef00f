"""Rules that compare a draft's config with which tensors it has, in which dtype, and name the right value.

The sizes are compared in `eagle3.checks.tensor_size_rules`; `TENSOR_RULES` lists all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from eagle3.checks.config_rules import ARCHITECTURE_OF, MODEL_TYPE_OF, VLLM, Given, Rule, layer_kind
from eagle3.checks.tensor_size_rules import (
    ATTN,
    INTEGERS,
    draft_vocabulary_is_the_heads,
    sizes_are_those_of_the_tensors,
    vocabulary_is_that_of_the_tensors,
)
from eagle3.formats.json_files import printable, spelled
from eagle3.problems import Change, Fix, Problem, repairable

FLOATS = ("BF16", "F16", "F32", "F64")
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


def _flag_place(given: Given, key: str) -> str:
    """norm_before_fc is read from eagle_config first, where it is there."""
    inner = given.config.raw.get("eagle_config", {}).get(key) if key == "norm_before_fc" else None
    return key if inner is None else f"eagle_config.{key}"


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
