"""`eagle3 check` with values over a 5 GB checkpoint in the page cache, against summing the same file with numpy.

By hand: python -m benchmarks.check_values [DIR]   (5 GB of disk; the default is a temporary folder)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kimi_draft import KIMI, draft_weights, write_draft
from benchmarks.processes import medians
from eagle3.formats.safetensors_headers import read_header

TIMES = 3
BLOCK = 16 << 20
SUM = """
import sys
import numpy as np
file = np.memmap(sys.argv[1], np.uint8, "r")
size = len(file)
del file
for begin in range(0, size, 16 << 20):
    count = min(16 << 20, size - begin) // 2
    np.memmap(sys.argv[1], np.uint16, "r", begin, (count,)).sum()
"""


def fill(path: Path) -> int:
    """Ordinary values in every float tensor, an ascending map, its mask; the size of the file."""
    import numpy as np

    ids: Any = np.arange(KIMI["draft_vocab_size"]) * 5
    block = np.random.default_rng(0).standard_normal(BLOCK // 2).astype(np.float32).view(np.uint32) >> 16
    data = block.astype(np.uint16).tobytes()
    with open(path, "r+b") as file:
        for tensor in read_header(path).tensors:
            file.seek(tensor.begin)
            if tensor.name == "d2t":
                file.write((ids - np.arange(len(ids))).astype(np.int64).tobytes())
            elif tensor.name == "t2d":
                file.write(np.isin(np.arange(KIMI["vocab_size"]), ids).tobytes())
            else:
                for begin in range(tensor.begin, tensor.end, BLOCK):
                    file.write(data[: min(BLOCK, tensor.end - begin)])
    return path.stat().st_size


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        draft = write_draft(Path(folder), KIMI)
        size = fill(draft / "model.safetensors")
        commands = {
            "memmap(uint16).sum()": [sys.executable, "-c", SUM, str(draft / "model.safetensors")],
            "check": [sys.executable, "-m", "eagle3", "check", str(draft)],
        }
        medians(commands, 1)  # brings the file into the page cache
        found = medians(commands, TIMES)
        print(f"{size / 1e9:.2f} GB in {len(draft_weights(KIMI))} tensors")
        for name, each in found.items():
            speed = size / each.wall_s / 1e9
            print(f"{name:<21} {each.wall_s:6.2f} s  {speed:5.2f} GB/s  peak {each.peak_bytes / 1e9:.2f} GB")
        print(f"share of its speed    {found['memmap(uint16).sum()'].wall_s / found['check'].wall_s:6.0%}")


if __name__ == "__main__":
    main()
