"""Training state that is dealt out to several processes by FSDP, gathered into the first and dealt out again.

speculators 0.9.0 wraps the model itself (train/distributed.py, apply_fully_sharded): weights in bfloat16 for forward
and backward, in float32 for the optimizer, gradients summed in float32. Its checkpoints would be bfloat16 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
Tensors = dict[str, torch.Tensor]


def gathered_weights(model: torch.nn.Module) -> Tensors:
    """Every tensor, whole and on the CPU, in the first process; nothing in the others, which must call it too."""
    return dict(get_model_state_dict(model, options=GATHERED))


def gathered_state(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[Tensors, dict[str, Any]]:
    """Trained weights and the optimizers' state by names of weights, as `gathered_weights` gathers."""
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    weights, state = get_state_dict(model, optimizers, options=GATHERED)
    return {name: tensor for name, tensor in weights.items() if name in trained}, dict(state)


def deal_out(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], weights: Tensors, state: dict[str, Any]
) -> None:
    """Put back what `gathered_state` gave, which every process has read."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state, options=options)
