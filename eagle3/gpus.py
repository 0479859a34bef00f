"""The GPUs of this machine that PyTorch sees."""

from __future__ import annotations

import os

import torch


def num_gpus() -> int:
    """0 on a machine without one, and with a CPU build of PyTorch."""
    return torch.cuda.device_count()


def device() -> torch.device:
    """The GPU of this process where there is one, else the CPU."""
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
