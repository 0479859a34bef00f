"""Rules about aux layer ids as SGLang 0.5.23 takes them: from the list in `eagle_config` alone, in its own numbering.

Source: srt/model_executor/model_runner_components/spec_aux_hidden_state.py (any failure means the default, in silence)
and set_eagle3_layers_to_capture of the verifier's class; `eagle3.layer_ids.sglang_captures` holds the numberings.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.checks.aux_id_rules import INNER, TOP
from eagle3.checks.config_rules import FOREIGN_IDS, Given, Rule
from eagle3.checks.servers import SERVERS
from eagle3.formats.json_files import spelled
from eagle3.layer_ids import SGLANG_GPT_OSS, sglang_captures, sglang_default, sglang_list
from eagle3.problems import InvalidInput, Problem

SGLANG = SERVERS["sglang"].name


def _architectures(given: Given) -> tuple[str, ...]:
    return given.verifier.architectures if given.verifier else ()


def _layers(given: Given) -> int | None:
    return given.verifier.num_hidden_layers if given.verifier else None


def _captured(given: Given) -> list[int]:
    """The states that SGLang captures, in vLLM's numbering; [] where only the verifier's depth would tell."""
    layers = _layers(given)
    if given.config.nested_ids:
        return sglang_captures(given.config.nested_ids, _architectures(given), layers)
    return sglang_default(_architectures(given), layers) if layers else []


def ids_stand_in_eagle_config(given: Given) -> Iterator[Problem]:
    """`eagle_config.eagle_aux_hidden_state_layer_ids` holds the captured layers, as SGLang numbers them.

    Source: spec_aux_hidden_state.py, _resolve_eagle_aux_hidden_state; the list at the top level is not read.
    """
    top, inner, captured = given.config.ids, given.config.nested_ids, _captured(given)
    taken = spelled(captured) if captured else "(2, n // 2, n - 3) of the verifier's n layers"
    if not top and not inner:
        consequence = f"{SGLANG} captures {taken} (each the input of a layer)"
        yield given.warning("aux-ids", INNER, None, "the captured layers", f"write {INNER}", consequence)
    if not top or (inner and captured == list(top)):
        return
    try:
        right = sglang_list(top, _architectures(given))
    except InvalidInput as error:
        consequence = f"{SGLANG} captures {taken}, and no list makes it capture these: {error.problems[0].expected}"
        expected = "layers that SGLang can capture"
        yield given.problem("aux-ids", TOP, list(top), expected, "serve with vLLM", consequence)
        return
    instead = "the same" if captured == list(top) else f"{taken} instead of {list(top)}"
    consequence = f"{SGLANG} reads {INNER} alone and captures {instead}"
    report = given.warning if captured == list(top) else given.problem
    yield report("aux-ids", INNER, list(inner) or None, spelled(right), given.write(INNER, right), consequence)


def list_is_not_the_other_numbering(given: Given) -> Iterator[Problem]:
    """A list alone in `eagle_config` is not the default of the other numbering, which SGLang would shift by one.

    Source: models/llama.py, set_eagle3_layers_to_capture (output of layer k); vLLM and speculators: input of layer k.
    """
    layers, inner = _layers(given), given.config.nested_ids
    if given.config.ids or not inner or not layers:
        return
    default = (2, layers // 2, layers - 3)
    if inner == default and _captured(given) != list(default):
        consequence = (
            f"{SGLANG} adds 1 and captures {_captured(given)}; as vLLM's numbers they would mean {list(inner)}"
        )
        fix = f"write {[each - 1 for each in inner]} if the draft was trained on the inputs of these layers"
        yield given.warning("aux-ids", INNER, list(inner), "outputs of layers", fix, consequence)


def captured_layers_exist(given: Given) -> Iterator[Problem]:
    """The captured states are inputs of layers 0 to n - 1 of the verifier, distinct and ascending.

    Source: models/llama.py, LlamaModel.forward (`i in layers_to_capture` for each layer i); gpt_oss.py has n too.
    """
    layers, captured = _layers(given), _captured(given)
    key = INNER if given.config.nested_ids else TOP
    if captured != sorted(set(captured)):
        consequence = f"{SGLANG} captures each once, in the order of the layers: fc meets other states, or too few"
        yield given.problem("aux-ids", key, captured, "distinct, ascending", "give distinct ids in order", consequence)
    last = (layers or 0) - (0 if SGLANG_GPT_OSS in _architectures(given) else 1)
    wrong = [each for each in captured if layers and not 0 <= each <= last]
    if wrong:
        consequence = f"{SGLANG} never captures them, and fc fails on the first step"
        expected = f"inputs of layers 0 to {last}"
        yield given.problem("aux-ids", key, wrong, expected, "give ids of existing layers", consequence)


def fc_takes_the_captured_states(given: Given) -> Iterator[Problem]:
    """fc is built for as many states as are captured.

    Source: models/llama_eagle3.py, LlamaModel (num_aux_hidden_states, else the list in eagle_config, else 3).
    """
    config = given.config
    count = len(config.nested_ids) or 3
    if not config.use_aux or config.num_aux == count:
        return
    if config.variant == "mla":
        yield given.problem(
            "fc-width", INNER, None, f"{config.num_aux} ids", f"write {INNER}", f"{SGLANG} captures {count} states"
        )
        return
    consequence = f"{SGLANG} captures {count} states and builds fc for {config.num_aux}: the first step fails"
    fix = f"write num_aux_hidden_states: {count}, or {config.num_aux} ids"
    found = config.raw.get("num_aux_hidden_states")
    yield given.problem("fc-width", "num_aux_hidden_states", found, f"{count}, as many as captured", fix, consequence)


def ids_have_sglangs_key(given: Given) -> Iterator[Problem]:
    """Layer ids are not written under a key of another drafter.

    Source: spec_aux_hidden_state.py (EAGLE3 reads eagle_config alone; target_layer_ids belongs to DFlash).
    """
    for key in sorted(FOREIGN_IDS & set(given.config.raw)):
        consequence = f"a key of DFlash or DSpark: {SGLANG} ignores it for EAGLE3"
        fix = f"write {INNER}; remove {key}"
        yield given.problem("aux-ids", key, spelled(given.config.raw[key]), INNER, fix, consequence)


SGLANG_AUX_ID_RULES: tuple[Rule, ...] = (
    ids_stand_in_eagle_config,
    list_is_not_the_other_numbering,
    captured_layers_exist,
    fc_takes_the_captured_states,
    ids_have_sglangs_key,
)
