"""Stored hidden states against an independent forward of transformers: the right layers, the right model, no norm.

n layers, T tokens of a sample, A aux layers, H hidden size. vLLM computed the states in bf16, batched and paged; the
witness computes the same weights in float32, one sample at a time, so what is left between them is bf16's rounding.
Measured on SmolLM2-135M: 0.029 at most; the layer before or after is 0.14 away at least, the normed state 0.95.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.states.hidden_states import SampleStates, map_shard, sample_states
from eagle3.states.shard_plan import Shard
from eagle3.states.store_dtypes import BFLOAT16, FP8
from eagle3.verifiers.reference_model import NoReference, load_reference

# Relative error of a layer's states: the norm of the difference over the norm of the witness, over all tokens of a
# sample but the first, whose state is often a hundred times as large as all others and would hide them.
# Where tokens are routed to experts, rounding decides between two that are nearly as good: such a token is another one
# from there on (0.39 off among others that are 0.04 off, a tiny DeepSeek-V3 shape in bf16 against float32). There the
# median over the tokens is taken, which another layer, norm or model moves as much (0.5).
# Rounding adds up over the layers, and deep models change little from one layer to the next: so a state must also be
# nearer to its own layer than to the neighbours.
# fp8 adds at most 2^-4 / sqrt(3) = 0.036 of its own (rounding of numbers just over a power of two), at a right angle.
BOUNDS = {BFLOAT16: 0.08, FP8: 0.09}
WITNESS = "transformers, float32"


def first_samples(folder: Path, shards: Sequence[Shard], count: int) -> list[SampleStates]:
    """The first samples of the shards in `folder`, in order of id; ids are digests, so this is a random choice."""
    return list(islice((one for shard in shards for one in _samples_of(folder, shard)), count))


def _samples_of(folder: Path, shard: Shard) -> Iterator[SampleStates]:
    tensors = map_shard(folder / shard.name)
    for index, sample in enumerate(shard.samples):
        yield sample_states(tensors, index, sample.sample_id, sample.split, sample.num_prompt)


def check_parity(
    verifier: Path, samples: Sequence[SampleStates], layer_ids: Sequence[int], dtype: str, trust_remote_code: bool
) -> dict[int, float]:
    """layer id -> the largest relative error over `samples`; `InvalidInput` where a state is not that of its layer.

    layer_ids: those of the slices, n last. dtype: that of the stored states.
    """
    model = _witness(verifier, trust_remote_code)
    routed = _routes_tokens(model)
    worst = dict.fromkeys(layer_ids, 0.0)
    problems: list[Problem] = []
    for sample in samples:
        witness = witness_states(model, sample.input_ids_T, _with_neighbours(layer_ids))
        for index, layer_id in enumerate(layer_ids):
            stored_TH = sample.hidden_TAH[:, index]
            near_ids = _near(layer_id, layer_ids[-1])
            errors = {near: relative_error(stored_TH, witness[near], routed) for near in near_ids}
            nearest = min(errors, key=lambda near: (errors[near], near != layer_id))
            worst[layer_id] = max(worst[layer_id], errors[layer_id])
            if nearest != layer_id or not errors[layer_id] <= BOUNDS[dtype]:
                problems.append(_no_parity(sample.sample_id, layer_id, errors[layer_id], nearest, dtype))
    if problems:
        raise InvalidInput(*problems)
    return worst


def _no_parity(sample_id: str, layer_id: int, error: float, nearest: int, dtype: str) -> Problem:
    closer = f"; nearer to layer id {nearest}" if nearest != layer_id else ""
    return Problem(
        "states-without-parity",
        f"extract: sample {sample_id}, layer id {layer_id}",
        f"a relative error of {error:.3f} against a transformers forward of the same verifier{closer}",
        f"at most {BOUNDS[dtype]} (rounding of {dtype}), and no other layer nearer",
        "vLLM and transformers do not compute the same: compare their answers with this verifier; to go on without the "
        "witness, dvc exp run -S extract.parity_samples=0",
        "a draft trained on states of another layer, norm or model is accepted rarely, without an error",
    )


def _near(layer_id: int, num_layers: int) -> list[int]:
    return [near for near in (layer_id - 1, layer_id, layer_id + 1) if 0 <= near <= num_layers]


def _with_neighbours(layer_ids: Sequence[int]) -> list[int]:
    return sorted({near for layer_id in layer_ids for near in _near(layer_id, layer_ids[-1])})


def relative_error(stored_TH: torch.Tensor, witness_TH: torch.Tensor, routed: bool = False) -> float:
    """Norm of the difference over that of the witness; the first token counts only where it is the only one.

    routed: of each token, and their median.
    """
    begin = 1 if len(stored_TH) > 1 else 0
    stored_TH, witness_TH = stored_TH[begin:].float(), witness_TH[begin:].float()
    difference_TH = stored_TH - witness_TH
    if routed:
        return float((difference_TH.norm(dim=1) / witness_TH.norm(dim=1)).median())
    return float(difference_TH.norm() / witness_TH.norm())


def _routes_tokens(model: Any) -> bool:
    """Whether the text config counts experts, by whatever name (`num_experts_per_tok`, `n_routed_experts`, ...)."""
    config = model.config.get_text_config().to_dict()
    return any("experts" in name and type(value) is int and value > 1 for name, value in config.items())


@torch.inference_mode()
def witness_states(model: nn.Module, input_ids_T: torch.Tensor, layer_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """layer id k -> what enters decoder layer k, float32 [T, H]; for n, what enters the final norm."""
    layers, norm = _decoder(model)
    entered: dict[int, torch.Tensor] = {}
    places = {layer_id: norm if layer_id == len(layers) else layers[layer_id] for layer_id in layer_ids}
    with _entering(places, entered):
        model(input_ids=input_ids_T.long()[None], use_cache=False)
    return {layer_id: states_1TH[0] for layer_id, states_1TH in entered.items()}


@contextmanager
def _entering(places: dict[int, nn.Module], entered: dict[int, torch.Tensor]) -> Iterator[None]:
    def keep(layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entered[layer_id] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [module.register_forward_pre_hook(keep(layer_id), with_kwargs=True) for layer_id, module in places.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _decoder(model: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers of the language model and its final norm, which multimodal models nest."""
    found = [
        (module.layers, module.norm)
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and isinstance(getattr(module, "norm", None), nn.Module)
    ]
    if len(found) != 1:
        raise invalid(
            "no-witness",
            "extract.parity_samples",
            f"{len(found)} stacks of layers with a final norm in {type(model).__name__}",
            "one, that of the language model",
            "dvc exp run -S extract.parity_samples=0 (the check of answered tokens still runs)",
        )
    return found[0]


def _witness(verifier: Path, trust_remote_code: bool) -> Any:
    try:
        return load_reference(verifier, trust_remote_code)
    except NoReference as why:
        raise invalid(
            "no-witness",
            "extract.parity_samples",
            why.found,
            why.expected,
            "dvc exp run -S extract.parity_samples=0 (the check of answered tokens still runs)",
        ) from why
