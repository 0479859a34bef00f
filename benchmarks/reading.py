"""Random samples a second, from shards and from one file a sample. python -m benchmarks.reading [SAMPLES] [TOKENS]

Both sides hold the same hidden states and are read in the same random order from a warm page cache: mapped, as the
trainer's reader has them, and copied, as a batch needs them in the end. Blocks alternate; medians are printed.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3.manifests import Manifest, write_manifest
from eagle3.states.hidden_states import HiddenStates
from eagle3.states.shard_file import ShardFile, write_at
from eagle3.states.shard_plan import ids_as_bytes, plan_shards

NUM_STATES, HIDDEN_SIZE, BLOCKS = 4, 576, 10  # SmolLM2-135M
AT_LEAST = 5.0


@dataclass(frozen=True)
class Stored:
    sample_id: str
    split: str
    num_prompt: int
    input_ids: list[int]
    loss_mask: list[bool]


def main(num_samples: int = 1000, num_tokens: int = 128) -> int:
    with tempfile.TemporaryDirectory() as folder:
        names = write_both(Path(folder), num_samples, num_tokens)
        states = HiddenStates(Path(folder) / "shards")
        readers: dict[str, Callable[[str], torch.Tensor]] = {
            "shards": lambda name: states.get(name).hidden_TAH,
            "files": lambda name: load_file(Path(folder) / "files" / f"{name}.safetensors")["hidden_states"],
        }
        print(f"{num_samples:,} samples of {num_tokens * NUM_STATES * HIDDEN_SIZE * 2:,} bytes, {BLOCKS} blocks")
        mapped = compare(names, readers, "mapped", lambda states_TAH: states_TAH)
        compare(names, readers, "copied", lambda states_TAH: states_TAH.clone())
    return 0 if mapped >= AT_LEAST else 1


def compare(
    names: list[str],
    readers: dict[str, Callable[[str], torch.Tensor]],
    what: str,
    use: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """The median over blocks of how many times as many samples a second the shards give."""
    rates: dict[str, list[float]] = {which: [] for which in readers}
    for block in range(BLOCKS):
        random.Random(block).shuffle(names)
        for which, read in readers.items():
            start = time.perf_counter()
            for name in names:
                use(read(name))
            rates[which].append(len(names) / (time.perf_counter() - start))
    ratios = sorted(one / other for one, other in zip(rates["shards"], rates["files"], strict=True))
    shards, files = (statistics.median(rates[which]) for which in ("shards", "files"))
    print(
        f"{what}: {shards:,.0f} samples/s from shards, {files:,.0f} from one file a sample: "
        f"{statistics.median(ratios):.1f} times ({ratios[0]:.1f} to {ratios[-1]:.1f})"
    )
    return statistics.median(ratios)


def write_both(folder: Path, num_samples: int, num_tokens: int) -> list[str]:
    mask = [index >= num_tokens // 2 for index in range(num_tokens)]
    rows = [Stored(f"{n:08d}", "train", num_tokens // 2, [n % 1000] * num_tokens, mask) for n in range(num_samples)]
    states_TAH = torch.randn(num_tokens, NUM_STATES, HIDDEN_SIZE).to(torch.bfloat16)
    data = states_TAH.view(torch.uint8).numpy().tobytes()
    (folder / "files").mkdir()
    for shard in plan_shards(rows, {}, 256, NUM_STATES, HIDDEN_SIZE):
        with ShardFile(folder / "shards" / shard.name, shard) as file:
            fd = os.open(file.path, os.O_WRONLY)
            for index, row in enumerate(shard.samples):
                states_at, ids_at = file.place_of(index)
                write_at(fd, data, states_at)
                write_at(fd, ids_as_bytes(row.input_ids), ids_at)
            os.close(fd)
    for row in rows:
        tensors = {
            "hidden_states": states_TAH,
            "input_ids": torch.tensor(row.input_ids),
            "loss_mask": torch.tensor(mask),
        }
        save_file(tensors, folder / "files" / f"{row.sample_id}.safetensors")
    write_manifest(folder / "shards", Manifest("extract"))
    return [row.sample_id for row in rows]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
