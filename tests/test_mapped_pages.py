"""Pages of a mapped file leave memory after the copy; what is no mapped file keeps its values."""

from __future__ import annotations

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle3.checks.mapped_pages import ForgottenPages


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssFile"))


def test_copied_tensors_leave_memory_and_can_be_read_again(tmp_path):
    size = 32 << 20
    save_file(
        {name: torch.full((size,), value, dtype=torch.uint8) for name, value in (("a", 1), ("b", 2))}, tmp_path / "x"
    )
    target = torch.zeros(size, dtype=torch.uint8)
    with safe_open(tmp_path / "x", framework="pt") as file, ForgottenPages() as pages:
        mapped = dict(pages.watch((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        before = resident()
        for value, tensor in enumerate(mapped.values(), 1):
            target.copy_(tensor)
            assert bool((target == value).all())
        assert resident() - before < size // 2
    assert [int(tensor[-1]) for tensor in mapped.values()] == [1, 2]


def test_other_tensors_are_left_alone():
    source = torch.arange(1 << 16)
    with ForgottenPages():
        torch.zeros(1 << 16, dtype=torch.long).copy_(source)
    assert torch.equal(source, torch.arange(1 << 16))
