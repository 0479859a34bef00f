"""Aux layer ids: what an id means here, which ids a verifier has, and the numbering of other systems.

n layers, hidden states h0..hn; in this project, as in vLLM and speculators, **id k is hk, the state entering layer k**:

    tokens -> embedding -> h0 -> layer 0 -> h1 -> layer 1 -> h2 ... -> layer n-1 -> hn -> final norm -> head
    id (vLLM, speculators)  0               1               2                      n
    id (SGLang, SpecForge,  -               0               1                      n-1
       ModelOpt, TRT-LLM)                                                  "output of layer k"

hn is stored with every sample, last, since the verifier's head needs it; it is never an aux layer. Nothing but the
numbers tells the two numberings apart and a wrong one raises no error anywhere: only acceptance falls (vllm#50170:
from 58.9% to 1.2%). So foreign ids are turned here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3.problems import InvalidInput, Problem

PARAMETER = "extract.aux_layer_ids"

# sglang 0.5.23, set_eagle3_layers_to_capture in srt/models/*.py, by the class of the verifier. Every other class adds 1
# to each id of the list in `eagle_config`. deepseek_v2.py (with its subclasses, and kimi_k25.py, which asks it) and
# glm4_moe_lite.py add 1 only where the first id is 1; gpt_oss.py adds nothing where the last is the number of layers.
SGLANG_AS_THEY_ARE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
SGLANG_GPT_OSS = "GptOssForCausalLM"
# minimax_m3_vl.py adds 1 to its defaults too.
SGLANG_LATE_DEFAULT = "MiniMaxM3SparseForConditionalGeneration"


def aux_layer_id_problems(ids: Sequence[int], num_hidden_layers: int, where: str = PARAMETER) -> Iterator[Problem]:
    """What is wrong with aux layer ids (this project's numbering) of a verifier with `num_hidden_layers` layers.

    Allowed are distinct ids from 0 to n - 1, ascending: vLLM 0.32.0 sorts them and drops repetitions without a word
    (model_executor/models/interfaces.py), so any other spelling would describe states that do not exist.
    """
    last = num_hidden_layers - 1
    if not ids:
        yield Problem("aux-layers", where, "no id", "at least one aux layer", f"give ids from 0 to {last} in {where}")
    for index, layer_id in enumerate(ids):
        if layer_id == num_hidden_layers:
            yield Problem(
                "aux-layer-final",
                f"{where}[{index}]",
                f"{layer_id}, the state after the last layer",
                f"ids from 0 to {last}; that state is always stored last, on top of them",
                f"remove {layer_id} from {where}",
                "trained as an aux layer it widens fc beyond what the server builds, which then refuses to load "
                "(speculators#1065, vllm#54526)",
            )
        elif not 0 <= layer_id <= last:
            yield Problem(
                "aux-layer-range",
                f"{where}[{index}]",
                str(layer_id),
                f"ids from 0 to {last}: the verifier has {num_hidden_layers} layers",
                f"choose other layers in {where}, e.g. {_default_ids(num_hidden_layers)}",
            )
    if list(ids) != sorted(set(ids)):
        yield Problem(
            "aux-layer-order",
            where,
            str(list(ids)),
            f"ascending without repetition: {sorted(set(ids))}",
            f"correct {where}",
            "vLLM 0.32.0 sorts the ids and removes repetitions: fc would meet other states than it was trained on",
        )


def stored_layer_ids(aux_layer_ids: Sequence[int], num_hidden_layers: int) -> list[int]:
    """The id of each stored slice: the aux layers, then n, the state before the final norm.

    >>> stored_layer_ids([2, 15, 27], 30)
    [2, 15, 27, 30]
    """
    return [*aux_layer_ids, num_hidden_layers]


def to_output_of(ids: Sequence[int], where: str = PARAMETER) -> list[int]:
    """This project's ids in the numbering of SGLang and SpecForge: id k is the output of layer k - 1.

    The embeddings (id 0) are no layer's output: `InvalidInput`.

    >>> to_output_of([2, 30, 58])
    [1, 29, 57]
    """
    if 0 in ids:
        raise InvalidInput(
            Problem(
                "aux-layer-embedding",
                where,
                "0, the embeddings",
                "layers that have a number in SGLang and SpecForge, which count outputs of layers",
                f"serve with vLLM, or train without id 0 in {where}",
            )
        )
    return [layer_id - 1 for layer_id in ids]


def from_output_of(ids: Sequence[int]) -> list[int]:
    """Ids of SGLang and SpecForge in this project's numbering; the inverse of `to_output_of`.

    >>> from_output_of([1, 29, 57])
    [2, 30, 58]
    """
    return [layer_id + 1 for layer_id in ids]


def sglang_captures(listed: Sequence[int], architectures: Sequence[str], num_hidden_layers: int | None) -> list[int]:
    """The states, in this project's ids, that SGLang 0.5.23 captures for the list in `eagle_config`.

    `architectures` are the verifier's.

    >>> sglang_captures([1, 29, 57], ["LlamaForCausalLM"], 61), sglang_captures([2, 30, 58], ["LlamaForCausalLM"], 61)
    ([2, 30, 58], [3, 31, 59])
    >>> sglang_captures([1, 29, 57], ["DeepseekV3ForCausalLM"], 61)
    [2, 30, 58]
    >>> sglang_captures([2, 30, 58], ["DeepseekV3ForCausalLM"], 61)
    [2, 30, 58]
    """
    as_they_are = bool(SGLANG_AS_THEY_ARE & set(architectures)) and list(listed[:1]) != [1]
    last = SGLANG_GPT_OSS in architectures and listed and max(listed) == num_hidden_layers
    return list(listed) if as_they_are or last else from_output_of(listed)


def sglang_list(ids: Sequence[int], architectures: Sequence[str], where: str = PARAMETER) -> list[int]:
    """The list in `eagle_config` with which SGLang 0.5.23 captures `ids`; `InvalidInput` where no list does.

    The inverse of `sglang_captures`.

    >>> sglang_list([3, 30, 58], ["DeepseekV3ForCausalLM"]), sglang_list([3, 30, 58], ["LlamaForCausalLM"])
    ([3, 30, 58], [2, 29, 57])
    """
    if not SGLANG_AS_THEY_ARE & set(architectures) or list(ids[:1]) == [2]:
        return to_output_of(ids, where)
    if list(ids[:1]) == [1]:
        raise InvalidInput(
            Problem(
                "aux-layer-sglang",
                where,
                f"{list(ids)} of a {architectures[0]}",
                "a first layer other than 1",
                f"serve with vLLM, or train without id 1 in {where}",
                "SGLang 0.5.23 adds 1 to a list that begins with 1, on this class of verifier alone",
            )
        )
    return list(ids)


def sglang_default(architectures: Sequence[str], num_hidden_layers: int) -> list[int]:
    """What SGLang 0.5.23 captures where `eagle_config` has no list, unsorted and unchecked as the server leaves it."""
    n, shift = num_hidden_layers, int(SGLANG_LATE_DEFAULT in architectures)
    return [layer_id + shift for layer_id in (2, n // 2, n - 3)]


def _default_ids(num_hidden_layers: int) -> list[int]:
    """What vLLM and speculators take where nobody says: an early, a middle and a late layer."""
    n = num_hidden_layers
    return sorted({layer_id for layer_id in (2, n // 2, n - 3) if 0 <= layer_id < n})
