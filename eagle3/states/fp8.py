"""Hidden states as 8-bit floats (E4M3, no infinities), with one float32 scale for each state of each token.

T tokens, S = A + 1 states of a token, H hidden size. The scale brings the largest number of a state to 448, the largest
of the type; the smallest normal number lies 28,672 times below. Measured on SmolLM2-135M, whose largest channels are 40
times the median (500 on first tokens): 2.2% relative error; docs/decisions.md has the other granularities.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantise(states_TSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8 [T, S, H], float32 scales [T, S], and float32 squares [S, 2]: of the rounding's error, and of the states.

    The squares leave out the first token, where there is another: its state is often a hundred times as large and
    would hide all others. NaN and infinity come back as NaN.
    """
    stored_TSH = torch.empty_like(states_TSH, dtype=torch.float8_e4m3fn)
    scales_TS = torch.empty(states_TSH.shape[:2], dtype=torch.float32)
    squares_S2 = torch.empty(states_TSH.shape[1], 2, dtype=torch.float32)
    begin = 1 if len(states_TSH) > 1 else 0
    for index in range(states_TSH.shape[1]):  # one at a time: float32 takes twice the memory
        states_TH = states_TSH[:, index].float()
        scales_T = (states_TH.abs().amax(1) / LARGEST).clamp_(min=SMALLEST_SCALE)
        stored_TSH[:, index] = (states_TH / scales_T[:, None]).to(torch.float8_e4m3fn)
        scales_TS[:, index] = scales_T
        read_TH = dequantise(stored_TSH[begin:, index], scales_T[begin:]).float()
        squares_S2[index, 0] = (read_TH - states_TH[begin:]).double().square().sum()
        squares_S2[index, 1] = states_TH[begin:].double().square().sum()
    return stored_TSH, scales_TS, squares_S2


def dequantise(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16, of the shape of `stored` [..., H]; scales [...]."""
    return (stored.float() * scales.unsqueeze(-1)).to(torch.bfloat16)


def relative_errors(squares_of_shards: Iterable[torch.Tensor]) -> list[float]:
    """For each of S states the norm of the rounding's error over that of the states, all samples together.

    squares_of_shards: each [n, S, 2], the squares of `quantise` for the n samples of a shard.
    """
    error_S, whole_S = sum(squares.double().sum(0) for squares in squares_of_shards).unbind(1)
    return [round(error, 5) for error in (error_S / whole_S).sqrt().tolist()]
