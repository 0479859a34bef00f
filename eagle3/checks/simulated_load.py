"""What vLLM 0.32.0 does with each tensor of a checkpoint and what each parameter holds afterwards, from headers alone.

Follows Eagle3LlamaForCausalLM.load_weights (vllm/model_executor/models/llama_eagle3.py), WeightsMapper and
AutoWeightsLoader (models/utils.py). That load_weights returns None, so the loader's own check for parameters that
nothing filled never runs for a draft: both directions are looked at here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from eagle3.checks.draft_config import DraftConfig
from eagle3.checks.expected_tensors import (
    CUTS_COLUMNS,
    CUTS_ROWS,
    EXACT,
    SHARED,
    UNINITIALISED,
    VOCABULARY,
    Parameter,
    Part,
    expected_parameters,
)
from eagle3.formats.config_formats import canonical
from eagle3.formats.safetensors_headers import TensorHeader

LOADED = "loaded"
FUSED = "fused"
DROPPED_KNOWINGLY = "dropped_knowingly"
DROPPED_SILENTLY = "dropped_silently"
CUT = "cut"
REFUSED = "refused"
FILLED = "filled"
PARTLY = "partly_filled"

# WeightsMapper.orig_to_new_stacked of the three classes: part of a fused parameter -> that parameter.
STACKED = {
    ".q_proj": ".qkv_proj",
    ".k_proj": ".qkv_proj",
    ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj",
    ".up_proj": ".gate_up_proj",
    ".q_a_proj": ".fused_qkv_a_proj",
    ".kv_a_proj_with_mqa": ".fused_qkv_a_proj",
}
ROTARY = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


# Shapes found and wanted, and how the parameter is loaded -> whether the server takes the tensor, and what it does.
OtherShape = Callable[[tuple[int, ...], tuple[int, ...], str], tuple[bool, str]]


@dataclass(frozen=True)
class TensorFate:
    """What becomes of one checkpoint tensor: `fate` is one of the words above, `why` the server's reason.

    unknown: the class has no parameter of that name.
    """

    tensor: TensorHeader
    fate: str
    parameter: str = ""
    expected: tuple[int, ...] = ()
    why: str = ""
    unknown: bool = False


@dataclass(frozen=True)
class ParameterState:
    """What one parameter holds: filled, partly_filled, shared (with the verifier), zero or uninitialised."""

    parameter: Parameter
    state: str
    missing: tuple[Part, ...] = ()


@dataclass(frozen=True)
class SimulatedLoad:
    """The whole load. Where a tensor is refused the server stops there; the other fates are what would follow."""

    tensors: tuple[TensorFate, ...]
    parameters: tuple[ParameterState, ...]

    @property
    def refused(self) -> bool:
        return any(fate.fate == REFUSED for fate in self.tensors)

    def counts(self) -> dict[str, int]:
        """How many tensors and parameters ended in each state; tensors and parameters share no word."""
        counts = Counter(fate.fate for fate in self.tensors)
        counts.update(state.state for state in self.parameters)
        return dict(sorted(counts.items()))


def simulate_load(config: DraftConfig, tensors: Mapping[str, TensorHeader], verifier_vocab_size: int) -> SimulatedLoad:
    """Follow every tensor into the parameters that the class has for `config`."""
    parameters = expected_parameters(config, verifier_vocab_size)
    table = _Table(config, parameters, any("d2t" in name for name in tensors))
    fates = tuple(table.fate(tensor) for tensor in tensors.values())
    filled = filled_parts(fates, canonical, table.whole)
    owned = {part for part in ("embed_tokens", "lm_head") if any(part in fate.tensor.name for fate in fates)}
    states = tuple(_state(parameter, filled, owned) for parameter in parameters)
    return SimulatedLoad(fates, states)


def filled_parts(fates: Iterable[TensorFate], key_of: Callable[[str], str], whole: Mapping[str, Parameter]) -> set[str]:
    """The names of the parts that tensors fill.

    key_of: the name under which the class looks a tensor up; whole: the parameters whose parts may come fused.
    """
    keys = {key_of(fate.tensor.name) for fate in fates if fate.fate in (LOADED, FUSED, CUT)}
    return {part for key in keys for part in ([each.name for each in whole[key].parts] if key in whole else [key])}


def state_of(parameter: Parameter, filled: set[str]) -> ParameterState:
    missing = tuple(part for part in parameter.parts if part.name not in filled)
    if not missing:
        return ParameterState(parameter, FILLED)
    return ParameterState(parameter, PARTLY if len(missing) < len(parameter.parts) else parameter.absent, missing)


def _state(parameter: Parameter, filled: set[str], owned: set[str]) -> ParameterState:
    state = state_of(parameter, filled)
    # process_eagle_weight: any tensor with the word in its name makes the draft keep its own.
    if state.state == SHARED and any(word in parameter.name for word in owned):
        return replace(state, state=UNINITIALISED)
    return state


class _Table:
    """The parameters by the names under which a checkpoint may address them."""

    def __init__(self, config: DraftConfig, parameters: tuple[Parameter, ...], has_d2t: bool) -> None:
        self.parts = {part.name: (parameter, part) for parameter in parameters for part in parameter.parts}
        self.whole = {
            parameter.name.removeprefix("model."): parameter for parameter in parameters if len(parameter.parts) > 1
        }
        self.modules = {parameter.name.rpartition(".")[0].removeprefix("model.") for parameter in parameters}
        self.dropped = [] if has_d2t else ["draft_id_to_target_id"]
        if config.variant != "mla":
            self.dropped += [] if config.use_aux else ["fc."]
            self.dropped += [] if config.norm_before_fc else ["input_norm."]
        self.skips_mask = config.variant != "mla"

    def fate(self, tensor: TensorHeader) -> TensorFate:
        """The rules of load_weights, in its order."""
        name = tensor.name
        if "t2d" in name:
            return TensorFate(tensor, DROPPED_KNOWINGLY, why="the server maps from draft to verifier only")
        if "d2t" not in name and "mask_hidden" in name and self.skips_mask:
            return TensorFate(tensor, DROPPED_SILENTLY, why="only parallel drafting reads it; one log line")
        if any(part in name for part in ROTARY):
            return TensorFate(tensor, DROPPED_KNOWINGLY, why="the server computes rotary tables itself")
        for part in self.dropped:
            if part in name:
                return TensorFate(tensor, DROPPED_SILENTLY, why=f"the config makes load_weights skip {part}*")
        key = canonical(name)
        if key in self.parts and ("lm_head" not in name or key == "lm_head.weight"):
            return into_part(tensor, *self.parts[key], _other_shape)
        if key in self.whole:
            return into_part(tensor, *fused_on_disk(self.whole[key]), _other_shape)
        return self._unknown(tensor, key)

    def _unknown(self, tensor: TensorHeader, key: str) -> TensorFate:
        module, _, last = key.rpartition(".")
        for part, whole in STACKED.items():
            module = module.replace(part, whole, 1) if module.endswith(part) else module
        if last == "bias" and module in self.modules:
            return TensorFate(tensor, DROPPED_SILENTLY, why="AutoWeightsLoader skips every .bias that the class lacks")
        return TensorFate(tensor, REFUSED, why="ValueError, there is no module or parameter of that name", unknown=True)


def into_part(tensor: TensorHeader, parameter: Parameter, part: Part, other_shape: OtherShape) -> TensorFate:
    """A tensor that is a parameter or a part of a fused one."""
    fate = FUSED if len(parameter.parts) > 1 else LOADED
    if tensor.shape == part.shape:
        return TensorFate(tensor, fate, parameter.name, part.shape)
    taken, why = other_shape(tensor.shape, part.shape, parameter.loader)
    return TensorFate(tensor, CUT if taken else REFUSED, parameter.name, part.shape, why)


def fused_on_disk(parameter: Parameter) -> tuple[Parameter, Part]:
    """The parameter as one part, for a tensor that is fused already (linear.py, _load_fused_module_from_checkpoint)."""
    rows = sum(part.shape[0] for part in parameter.parts)
    together = Part(parameter.name, (rows, *parameter.parts[0].shape[1:]))
    return Parameter(parameter.name, (together,), CUTS_ROWS), together


def _other_shape(found: tuple[int, ...], wanted: tuple[int, ...], loader: str) -> tuple[bool, str]:
    """Whether the server takes a tensor of another shape (cut or stretched), and what it does or says."""
    if len(found) != len(wanted):
        return False, "AssertionError: another number of dimensions"
    differing = [axis for axis, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    axis = {CUTS_ROWS: 0, VOCABULARY: 1, CUTS_COLUMNS: len(wanted) - 1}.get(loader, -1)
    if differing != [axis]:
        return False, f"AssertionError {'with both sizes' if loader == EXACT else 'without any text'}"
    if loader == VOCABULARY:
        return found[1] == 1, "copies the one column into all" if found[1] == 1 else "RuntimeError: sizes do not match"
    if found[axis] > wanted[axis]:
        return True, "narrows the tensor without a word: the rest is thrown away, the wrong part may be kept"
    return False, "RuntimeError: start + length exceeds dimension size"


def unfilled(load: SimulatedLoad) -> Iterator[ParameterState]:
    """The parameters that hold what memory happened to hold."""
    return (state for state in load.parameters if state.state in (UNINITIALISED, PARTLY))
