"""Hidden states as 8-bit floats: what rounding leaves of them, and what comes back of numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.states.fp8 import dequantise, quantise, relative_errors


@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e20]))
def test_every_number_comes_back_within_a_sixteenth_or_a_tiny_part_of_the_largest(seed, num_tokens, size):
    generator = torch.Generator().manual_seed(seed)
    states_TSH = (torch.randn(num_tokens, 3, 8, generator=generator).pow(9) * size).to(torch.bfloat16)
    stored_TSH, scales_TS, _ = quantise(states_TSH)
    assert (stored_TSH.dtype, stored_TSH.shape) == (torch.float8_e4m3fn, states_TSH.shape)
    read_TSH = dequantise(stored_TSH, scales_TS)
    assert read_TSH.dtype == torch.bfloat16
    largest_TS1 = states_TSH.float().abs().amax(-1, keepdim=True)
    # half a step: 2^-4 of a normal number, and 2^-10 of the scale below them; then bf16's own 2^-9
    allowed_TSH = states_TSH.float().abs() * (2**-4 + 2**-8) + largest_TS1 / 448 * 2**-10 * 1.01
    assert ((read_TSH.float() - states_TSH.float()).abs() <= allowed_TSH).all()


def test_a_token_with_huge_channels_leaves_the_others_alone():
    states_TSH = torch.ones(3, 2, 64, dtype=torch.bfloat16) * 1.3
    states_TSH[0, 1, 7] = 24832.0
    stored_TSH, scales_TS, _ = quantise(states_TSH)
    read_TSH = dequantise(stored_TSH, scales_TS)
    assert read_TSH[0, 1, 7] == 24832.0
    assert read_TSH[1:].equal(states_TSH[1:])
    assert read_TSH[0, 1, 0].item() == pytest.approx(1.3, rel=2**-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_back_as_nan_in_its_state_alone(value):
    states_TSH = torch.ones(2, 2, 8, dtype=torch.bfloat16)
    states_TSH[1, 0, 3] = value
    stored_TSH, scales_TS, _ = quantise(states_TSH)
    read_TSH = dequantise(stored_TSH, scales_TS)
    assert read_TSH[1, 0].isnan().any()
    assert read_TSH[0].isfinite().all()
    assert read_TSH[1, 1].isfinite().all()


def test_zeros_come_back_as_zeros():
    stored_TSH, scales_TS, squares_S2 = quantise(torch.zeros(2, 1, 8, dtype=torch.bfloat16))
    assert not dequantise(stored_TSH, scales_TS).any()
    assert squares_S2.tolist() == [[0, 0]]


def test_the_error_is_that_of_all_samples_together_without_their_first_tokens():
    states_TSH = torch.full((3, 1, 2), 448.0, dtype=torch.bfloat16)
    states_TSH[0], states_TSH[1, 0, 1] = 1e6, 33.0  # 33 lies between 32 and 36
    _, _, squares_S2 = quantise(states_TSH)
    assert squares_S2.tolist() == [[1.0, 3 * 448**2 + 33**2]]
    one_S2 = torch.tensor([[0.0, 100.0]])
    together = math.sqrt(1 / (3 * 448**2 + 33**2 + 100))
    assert relative_errors([torch.stack([squares_S2, one_S2])]) == [pytest.approx(together, abs=1e-5)]
    assert relative_errors([squares_S2[None], one_S2[None]]) == relative_errors([torch.stack([squares_S2, one_S2])])


def test_a_sample_of_one_token_counts_with_it():
    assert quantise(torch.full((1, 1, 2), 2.0, dtype=torch.bfloat16))[2].tolist() == [[0.0, 8.0]]
