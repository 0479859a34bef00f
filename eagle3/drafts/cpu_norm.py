"""RMSNorm and rotary positions on a CPU with gradients of their own: fewer passes over memory than autograd records."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import rotate_half


def rms_norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """`norm(x)` for a LlamaRMSNorm (transformers 5.19), [.., H] in float32.

    As there, the normed `x` is rounded to its dtype before the weight: without, the loss of a row is a thousandth away.
    """
    out: torch.Tensor = _RmsNorm.apply(x, norm.weight, norm.variance_epsilon)
    return out


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[N, heads, D] turned by cos and sin [N, 1, D], whose halves are equal; computed in float32, bfloat16."""
    out: torch.Tensor = _Rotation.apply(heads, cos, sin)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = scale.div_(wide.shape[-1]).add_(epsilon).rsqrt_()
        unit = (wide * scale).to(x.dtype)
        ctx.save_for_backward(unit, scale, weight)
        ctx.dtype = x.dtype
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        [slope] = upstream
        d_weight = (slope * unit).sum(tuple(range(slope.ndim - 1))) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        d_unit = slope * weight
        along = (d_unit * unit).mean(-1, keepdim=True)
        return d_unit.addcmul_(unit, along, value=-1).mul_(scale).to(ctx.dtype), d_weight, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        wide = heads.float()
        return (wide * cos).addcmul_(rotate_half(wide), sin).bfloat16()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        slope = upstream[0].float()
        return (slope * cos).addcmul_(rotate_half(slope), sin, value=-1).bfloat16(), None, None
