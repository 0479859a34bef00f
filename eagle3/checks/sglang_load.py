"""What SGLang 0.5.23 does with each tensor of a checkpoint and what each parameter holds then, from headers alone.

Follows load_weights of srt/models/llama_eagle3.py and kimi_k25_eagle3.py, the loaders of srt/layers/linear.py and
vocab_parallel_embedding.py on a GPU without tensor parallelism, and init_lm_head of speculative/eagle_worker_v2.py,
which puts the verifier's embedding in place. It refuses no name: what it has no parameter for is dropped, without a
word (Llama) or with one log line (MLA), and what no tensor fills stays as it was initialised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eagle3.checks.draft_config import DraftConfig
from eagle3.checks.expected_tensors import CUTS_COLUMNS, CUTS_ROWS, EXACT, VOCABULARY, Parameter, Part
from eagle3.checks.sglang_tensors import (
    HOT_TOKEN_ID,
    PADS_COLUMNS,
    PADS_ROWS,
    as_sglang_reads,
    sglang_parameters,
    shares_embedding,
    shares_head,
)
from eagle3.checks.simulated_load import (
    CUT,
    DROPPED_KNOWINGLY,
    DROPPED_SILENTLY,
    LOADED,
    REFUSED,
    SimulatedLoad,
    TensorFate,
    filled_parts,
    fused_on_disk,
    into_part,
    state_of,
)
from eagle3.formats.config_formats import canonical
from eagle3.formats.safetensors_headers import TensorHeader

# llama_eagle3.py, legacy_name_map: replaced wherever they stand in a name.
LEGACY = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
PADDED = "fills the tensor up with zeros without a word"
NARROWED = "narrows the tensor without a word: the rest is thrown away"


def simulate_sglang_load(
    config: DraftConfig, tensors: Mapping[str, TensorHeader], verifier_vocab_size: int
) -> SimulatedLoad:
    """Follow every tensor into the parameters that the class has for `config`."""
    config = as_sglang_reads(config)
    has_map = any(_is_map(name, config.variant) for name in tensors)
    parameters = sglang_parameters(config, verifier_vocab_size, has_map)
    parts = {part.name: (parameter, part) for parameter in parameters for part in parameter.parts}
    whole = {
        parameter.name.removeprefix("model."): parameter
        for parameter in parameters
        if len(parameter.parts) > 1 and config.variant != "mla"
    }
    whole |= {name: each for name, each in _mla_whole(parameters).items() if config.variant == "mla"}
    fates = tuple(_fate(tensor, config, parts, whole) for tensor in tensors.values())
    fates = tuple(map(_kept_back, fates)) if _one_latent_half(fates) else fates
    filled = filled_parts(fates, lambda name: _key(name, config.variant), whole)
    return SimulatedLoad(fates, tuple(state_of(parameter, filled) for parameter in parameters))


def takes_prefix(prefix: str, names: Iterable[str]) -> bool:
    """Whether tensors load under `prefix` as without it: llama_eagle3.py looks for `x` as `x` and as `model.x`.

    So `model.fc.weight` is fc; `model.lm_head.weight` is nothing. The MLA class puts another `model.` before each name.
    """
    return prefix == "model." and not any("kv_a_proj" in name for name in names)


def _mla_whole(parameters: tuple[Parameter, ...]) -> dict[str, Parameter]:
    """A fused gate and up; the fused latent projection is mistaken for one of its halves and never loaded."""
    return {
        canonical(parameter.name.removeprefix("model.")): parameter
        for parameter in parameters
        if parameter.name.endswith("gate_up_proj.weight")
    }


LATENT = "fused_qkv_a_proj_with_mqa"


def _one_latent_half(fates: tuple[TensorFate, ...]) -> bool:
    """kimi_k25_eagle3.py keeps q_a and kv_a back until it has both."""
    return sum(LATENT in fate.parameter for fate in fates) == 1


def _kept_back(fate: TensorFate) -> TensorFate:
    why = "kept back until the other half of the fused projection comes"
    return TensorFate(fate.tensor, DROPPED_SILENTLY, why=why) if LATENT in fate.parameter else fate


def _is_map(name: str, variant: str) -> bool:
    return name == "d2t" or name.endswith(".d2t") if variant == "mla" else "d2t" in name


def _key(name: str, variant: str) -> str:
    """The canonical name under which the class looks a tensor up."""
    if _is_map(name, variant):
        return "d2t"
    if variant == "mla":
        return canonical(name) if name.startswith("midlayer.") else name
    for legacy, new in LEGACY.items():
        name = name.replace(legacy, new)
    return name


def _fate(
    tensor: TensorHeader, config: DraftConfig, parts: dict[str, tuple[Parameter, Part]], whole: dict[str, Parameter]
) -> TensorFate:
    """The rules of load_weights, in its order."""
    name, mla = tensor.name, config.variant == "mla"
    key = _key(name, config.variant)
    if key == "d2t":
        return _map_fate(tensor, config)
    if name == "t2d" or name.endswith(".t2d") if mla else "t2d" in name:
        return TensorFate(tensor, DROPPED_KNOWINGLY, why="the server maps from draft to verifier only")
    if key in parts:
        fate = into_part(tensor, *parts[key], _other_shape)
        if fate.fate != REFUSED and key == "embed_tokens.weight" and shares_embedding(config):
            return TensorFate(tensor, DROPPED_KNOWINGLY, why="replaced by the verifier's embedding")
        if fate.fate != REFUSED and key == "lm_head.weight" and shares_head(config):
            return TensorFate(tensor, DROPPED_KNOWINGLY, why="replaced by the verifier's head")
        return fate
    if key in whole:
        return into_part(tensor, *fused_on_disk(whole[key]), _other_shape)
    if "rotary_emb" in name:
        return TensorFate(tensor, DROPPED_KNOWINGLY, why="the server computes rotary tables itself")
    why = "no parameter has that name" + ("; one log line" if mla else "")
    return TensorFate(tensor, DROPPED_SILENTLY, why=why, unknown=True)


def _map_fate(tensor: TensorHeader, config: DraftConfig) -> TensorFate:
    """`loaded_weight + arange(len)`: any length and any number of dimensions is taken."""
    wanted = (config.draft_vocab_size,)
    if tensor.shape == wanted:
        return TensorFate(tensor, LOADED, HOT_TOKEN_ID, wanted)
    why = "takes the map as it is: its ids are not those of the head's rows, or the first look-up is out of range"
    return TensorFate(tensor, CUT, HOT_TOKEN_ID, wanted, why)


def _other_shape(found: tuple[int, ...], wanted: tuple[int, ...], loader: str) -> tuple[bool, str]:
    """Whether the server takes a tensor of another shape (cut, padded or stretched), and what it does or says."""
    if len(found) != len(wanted) or loader == EXACT:
        return False, "AssertionError: another shape"
    differing = [axis for axis, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    axis = 0 if loader in (CUTS_ROWS, PADS_ROWS) else len(wanted) - 1
    if differing != [axis]:
        return False, "AssertionError: another shape"
    if loader == VOCABULARY:
        return found[axis] == 1, "copies the one column into all" if found[axis] == 1 else "RuntimeError: sizes differ"
    if found[axis] > wanted[axis]:
        return True, NARROWED
    if loader in (PADS_ROWS, PADS_COLUMNS):
        return True, PADDED
    assert loader in (CUTS_ROWS, CUTS_COLUMNS)
    return False, "RuntimeError: start + length exceeds dimension size"
