"""The processes of one training run: rank and number from torchrun's environment, speculators' own state set to match.

speculators 0.9.0 sets its state up on an accelerator alone (train/distributed.py); here a CPU does as well, with gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from speculators.train import distributed as library

# The others wait while one process walks over the answers after an epoch.
PATIENCE = timedelta(hours=24)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_processes() -> int:
    """On this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def first_says(word: bool) -> bool:
    """What the first process says; every process must ask."""
    told = [word]
    dist.broadcast_object_list(told, src=0)
    return told[0]


@contextmanager
def process_group() -> Iterator[None]:
    """Joined for the time of the block where torchrun has started this process; nothing otherwise."""
    if "LOCAL_RANK" not in os.environ:
        yield
        return
    local_rank, gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=PATIENCE)
    library._local_rank, library._is_distributed = local_rank, True
    library._rank, library._world_size = dist.get_rank(), dist.get_world_size()
    library._init_sp_process_groups(dist.get_rank(), dist.get_world_size(), 1)
    try:
        yield
    finally:
        library.maybe_destroy_distributed()
