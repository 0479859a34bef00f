"""Tensors of a mapped file whose pages leave memory once they have been copied, so that no draft is there twice.

vLLM 0.32.0's draft classes collect every tensor of the file before they copy the first one: all of its pages would stay
beside the parameters, twice 4.7 GB for a draft of Kimi-K2.5's sizes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ForgottenPages(TorchDispatchMode):
    """While it is active, a tensor that `watch` has handed out loses its pages after each copy from it.

    Only for tensors that safetensors has mapped from a file: they are read again should anybody look at them later.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[tuple[int, int]] = []
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._spans.append(_span(tensor))
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._forget(args[1])
        return result

    def _forget(self, source: torch.Tensor) -> None:
        begin, end = _span(source)
        if not any(first <= begin and end <= last for first, last in self._spans):
            return
        page = mmap.PAGESIZE
        begin, end = -(-begin // page) * page, end // page * page
        if begin < end:
            self._madvise(begin, end - begin, mmap.MADV_DONTNEED)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
