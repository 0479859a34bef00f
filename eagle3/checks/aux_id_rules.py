"""Rules about aux layer ids: which states the server captures, in whose numbering, and how many fc takes.

    top-level list    vLLM's numbering (id k enters layer k); both of vLLM's runners use it whenever it is there
    eagle_config list vLLM 0.32.0's V1 runner reads it unshifted when the top level has none, its V2 runner never;
                      SGLang reads it alone and adds 1 (id k leaves layer k)
    neither           (2, n // 2, n - 3) in both servers, n layers of the verifier

Sources: vllm/v1/worker/gpu_model_runner.py, vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py
(get_eagle3_aux_layers_from_config), vllm/model_executor/models/interfaces.py, llama_eagle3.py (LlamaModel).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from eagle3.checks.config_rules import FOREIGN_IDS, VLLM, Given, Rule
from eagle3.formats.json_files import spelled
from eagle3.layer_ids import sglang_captures
from eagle3.problems import Fix, Problem

TOP = "eagle_aux_hidden_state_layer_ids"
INNER = f"eagle_config.{TOP}"


def default_ids(num_layers: int) -> tuple[int, int, int]:
    """interfaces.py, get_eagle3_default_aux_hidden_state_layers; vLLM's numbering."""
    return (2, num_layers // 2, num_layers - 3)


def ids_are_in_one_numbering(given: Given) -> Iterator[Problem]:
    """Both lists of layer ids mean the same states: `eagle_config` holds the top-level ids less one.

    On verifiers of the DeepSeek type SGLang may take the list as it is. Source: see the module; sglang 0.5.23,
    models/llama.py and deepseek_v2.py (set_eagle3_layers_to_capture).
    """
    top, inner = given.config.ids, given.config.nested_ids
    if not top or not inner:
        return
    classes = given.verifier.architectures if given.verifier else ()
    captured = sglang_captures(inner, classes, given.verifier.num_hidden_layers if given.verifier else None)
    shifted = tuple(each - 1 for each in top)
    if captured == list(top):
        return
    if len(top) != len(inner) or inner not in (top, shifted):
        consequence = f"{VLLM} captures {list(top)}, SGLang {captured}"
        fix = f"write {INNER}: {list(shifted)}"
        yield given.problem("aux-ids", INNER, list(inner), spelled(list(shifted)), fix, consequence)
    else:
        added = "adds 1 and captures" if inner == top else "captures"
        consequence = f"{VLLM} uses the top level; SGLang {added} {captured}"
        right = list(shifted) if inner == top else list(top)
        fix = f"for SGLang write {right} inside eagle_config"
        yield given.warning("aux-ids", INNER, list(inner), spelled(right), fix, consequence)


def ids_stand_at_the_top_level(given: Given) -> Iterator[Problem]:
    """`eagle_aux_hidden_state_layer_ids` stands at the top level, in vLLM's numbering.

    Source: see the module. Without it the two runners of vLLM 0.32.0 may capture different layers.
    """
    top, inner = given.config.ids, given.config.nested_ids
    if top:
        return
    layers = given.verifier.num_hidden_layers if given.verifier else None
    if not inner:
        taken = spelled(list(default_ids(layers))) if layers else "(2, n // 2, n - 3) of the verifier's n layers"
        yield given.warning("aux-ids", TOP, None, "the captured layers", f"write {TOP}", f"{VLLM} captures {taken}")
        return
    # Without a verifier: the depth for which the last id would be the default's.
    if inner == default_ids(layers or inner[-1] + 3):
        consequence = f"both runners of {VLLM} capture {list(inner)}; SGLang adds 1, except on DeepSeek-type verifiers"
        fix = f"write {TOP}: {list(inner)} at the top level, if the draft was trained on the inputs of these layers"
        yield given.warning("aux-ids", TOP, None, spelled(list(inner)), fix, consequence)
        return
    right = [each + 1 for each in inner]
    consequence = f"{VLLM}: runner V1 captures {list(inner)}, runner V2 ignores the list and takes the default"
    fix = f"write {TOP}: {right} at the top level if the list counts outputs of layers, as SpecForge and ModelOpt do"
    yield given.problem(
        "aux-ids", INNER, list(inner), f"the same layers at the top level, e.g. {right}", fix, consequence
    )


def ids_ascend(given: Given) -> Iterator[Problem]:
    """Layer ids ascend without repetition.

    Source: vllm/model_executor/models/interfaces.py, _set_aux_hidden_state_layers (sorted set).
    """
    for key, ids in ((TOP, given.config.ids), (INNER, given.config.nested_ids)):
        if list(ids) != sorted(set(ids)):
            consequence = f"{VLLM} sorts them and drops repetitions: fc meets other states, or too few"
            expected = spelled(sorted(set(ids)))
            yield given.problem("aux-ids", key, list(ids), expected, "give distinct ids in order", consequence)


def ids_exist_in_the_verifier(given: Given) -> Iterator[Problem]:
    """Layer ids are layers of the verifier: 0 to n, where n is the state after the last layer.

    Source: vllm/model_executor/models/llama.py, LlamaModel.forward.
    """
    layers = given.verifier.num_hidden_layers if given.verifier else None
    if not layers:
        return
    ids = given.config.ids or given.config.nested_ids
    key = TOP if given.config.ids else INNER
    wrong = [each for each in ids if not 0 <= each <= layers]
    if wrong:
        consequence = f"{VLLM} never captures them, and fc fails on the first step"
        yield given.problem("aux-ids", key, wrong, f"0 to {layers}", "give ids of existing layers", consequence)
    if not ids and len({each for each in default_ids(layers) if each >= 0}) < 3:
        consequence = f"{VLLM} captures {sorted(set(default_ids(layers)))}, fewer states than fc takes"
        yield given.problem("aux-ids", TOP, None, f"distinct ids from 0 to {layers}", f"write {TOP}", consequence)
    types = given.verifier.layer_types if given.verifier else ()
    linear = [each for each in ids if 0 < each <= len(types) and types[each - 1] == "linear_attention"]
    if linear:
        full = [index + 1 for index, kind in enumerate(types) if kind == "full_attention"]
        consequence = "not every server can capture them; the training decides which are right"
        expected = f"outputs of full-attention layers: {full}"
        yield given.warning("aux-ids", key, linear, expected, "keep what the draft was trained on", consequence)


def fc_width_follows_the_ids(given: Given) -> Iterator[Problem]:
    """`num_aux_hidden_states` is the number of layer ids: it alone sets the width of fc.

    Source: llama_eagle3.py, LlamaModel (num_aux_hidden_states, else the list in eagle_config, else 3).
    """
    config = given.config
    wanted = len(config.ids or config.nested_ids)
    if wanted and config.use_aux and config.num_aux != wanted:
        found = config.raw.get("num_aux_hidden_states")
        consequence = f"{VLLM} builds fc for {config.num_aux} states and refuses the tensor (vllm#54526)"
        fc = given.shape("fc.weight")
        fits = len(fc) != 2 or fc[1] == wanted * config.target_hidden_size
        fix: Fix = given.write("num_aux_hidden_states", wanted)
        if not fits:
            fix = f"write as many ids as fc takes: {fc[1]} columns are no {wanted} x {config.target_hidden_size}"
        yield given.problem("fc-width", "num_aux_hidden_states", found, f"{wanted}, as many as ids", fix, consequence)


def ids_have_their_own_key(given: Given) -> Iterator[Problem]:
    """Layer ids are not written under a key of another drafter.

    Source: eagle3_utils.py (V2 reads target_layer_ids and adds 1), gpu_model_runner.py (V1 does not).
    """
    for key in sorted(FOREIGN_IDS & set(given.config.raw)):
        value = given.config.raw[key]
        ids = [each + 1 for each in value] if _is_ids(value) and not given.config.ids else None
        fc, width = given.shape("fc.weight"), given.config.target_hidden_size
        fix: Fix = f"write {TOP}; remove {key}"
        if ids and (len(fc) != 2 or fc[1] == len(ids) * width):
            writes = (given.write(TOP, ids), given.write("num_aux_hidden_states", len(ids)))
            fix = (*writes, given.remove(key))
        consequence = f"a key of DFlash or DSpark, output-of numbering: {VLLM}'s runner V1 ignores it, V2 adds 1"
        yield given.problem("aux-ids", key, spelled(value), TOP, fix, consequence)


def _is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and 0 < len(value) <= 256 and all(type(each) is int for each in value)


AUX_ID_RULES: tuple[Rule, ...] = (
    ids_are_in_one_numbering,
    ids_stand_at_the_top_level,
    ids_ascend,
    ids_exist_in_the_verifier,
    fc_width_follows_the_ids,
    ids_have_their_own_key,
)
