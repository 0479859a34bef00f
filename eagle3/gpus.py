"""The GPUs of this machine that PyTorch sees.

PyTorch is imported when somebody asks: where not even a temporary file can be written that import fails, and a stage
can only say so once it runs inside its guard.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def num_gpus() -> int:
    """0 on a machine without one, and with a CPU build of PyTorch."""
    import torch

    return torch.cuda.device_count()


def device() -> torch.device:
    """The GPU of this process where there is one, else the CPU."""
    import torch

    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
