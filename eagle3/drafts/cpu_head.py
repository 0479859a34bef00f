"""The draft's head on a CPU: logits, KL divergence, its gradient and the argmax a few rows at a time.

S unrolled steps, U positions with a target, H hidden, K draft vocabulary. A tensor [U, K] in float32 does not fit the
caches, and softmax, divergence, their gradients and argmax would read and write it a dozen times; a piece of it fits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# Rows of a piece: 128 x 8192 logits in float32 are 4 MB.
ROWS = 128


def head_loss(
    hidden_SUH: torch.Tensor,
    targets_UH: torch.Tensor,
    head_KH: torch.Tensor,
    verifier_head_KH: torch.Tensor,
    weights_SU: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sums of KL(verifier || draft) per step, [S], and whether the two argmaxes agree, bool [S, U].

    Heads in bfloat16 and frozen: gradients reach `hidden_SUH` alone. Logits are bfloat16 products as under autocast,
    softmax and divergence float32: speculators 0.9.0, losses/eager.py `kl_div_loss`.
    """
    with torch.autocast("cpu", enabled=False):  # dtypes are explicit here; autocast would sum the loss in bfloat16
        losses_S, correct_SU = _HeadLoss.apply(hidden_SUH, targets_UH, head_KH, verifier_head_KH, weights_SU)
    return losses_S, correct_SU


def head_argmax(hidden_SUH: torch.Tensor, head_KH: torch.Tensor) -> torch.Tensor:
    """The most likely draft id at every step and position, int64 [S, U]; the head in bfloat16."""
    rows = hidden_SUH.bfloat16().flatten(0, 1).split(ROWS)
    found = [_argmax(F.linear(piece, head_KH).float()) for piece in rows]
    return torch.cat(found or [torch.zeros(0, dtype=torch.int64)]).view(hidden_SUH.shape[:2])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_SUH, targets_UH, head_KH, verifier_head_KH, weights_SU = inputs
        hidden = hidden_SUH.bfloat16()
        losses_S = torch.zeros(len(hidden))
        correct_SU = torch.zeros(hidden.shape[:2], dtype=torch.bool)
        gradient_SUH = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        for begin in range(0, hidden.shape[1], ROWS):
            place = slice(begin, begin + ROWS)
            wanted = _Softmax(F.linear(targets_UH[place].bfloat16(), verifier_head_KH))
            entropy = wanted.dot(wanted.logits) - wanted.log_sum
            for step in range(len(hidden)):
                drafted = _Softmax(F.linear(hidden[step, place], head_KH))
                divergence = entropy - wanted.dot(drafted.logits) + drafted.log_sum
                losses_S[step] += divergence @ weights_SU[step, place]
                correct_SU[step, place] = drafted.argmax == wanted.argmax
                if gradient_SUH is not None:
                    slope = drafted.share.sub_(wanted.share).mul_(weights_SU[step, place].unsqueeze(1))
                    gradient_SUH[step, place] = slope.bfloat16() @ head_KH
        ctx.gradient_SUH = gradient_SUH
        ctx.dtype = hidden_SUH.dtype
        ctx.mark_non_differentiable(correct_SU)
        return losses_S, correct_SU

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.gradient_SUH * upstream[0].view(-1, 1, 1)
        return gradient.to(ctx.dtype), None, None, None, None


class _Softmax:
    """bfloat16 logits [rows, K] in float32, their softmax, log of the sum and argmax."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits.float()
        self.share = self.logits.softmax(-1)
        self.log_sum = self.logits.amax(-1) - self.share.amax(-1).log()
        self.argmax = _argmax(self.logits)

    def dot(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vecdot(self.share, logits)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest; numpy's takes an eighth of the time of torch 2.13 on a CPU."""
    return torch.from_numpy(logits.numpy().argmax(-1))
