"""Counting answered tokens from Parquet: tokens a second and core, and memory. python -m benchmarks.vocab_map [TOKENS]

Writes a samples file of made-up tokens (1 billion: 1.3 GB on disk) with the stage's schema, then counts it as the stage
vocab-map does. The figure is tokens over the CPU time of all threads, so that it is per core on any machine.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3.drafts.vocab_map import count_answered
from eagle3.sampling.conversations import SPLITS
from eagle3.sampling.samples import FILE, ROW_GROUP, SCHEMA, token_columns

VOCAB_SIZE = 163_840  # Kimi-K2.5
AT_LEAST = 20e6


def main(num_tokens: int = 100_000_000) -> int:
    with tempfile.TemporaryDirectory() as folder:
        made = write_made_up(Path(folder), num_tokens)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, cpu = time.perf_counter(), time.process_time()
        counts_SV = count_answered(token_columns(Path(folder)), len(SPLITS), VOCAB_SIZE)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        size = (Path(folder) / FILE).stat().st_size / 1e9
    print(
        f"{made:,} tokens ({size:.2f} GB of Parquet), {int(counts_SV.sum()):,} of them answered: {wall:.1f} s, "
        f"{made / cpu / 1e6:.1f} M tokens/s per core, peak memory grew by {grown:.0f} MiB"
    )
    return 0 if made / cpu >= AT_LEAST else 1


def write_made_up(folder: Path, num_tokens: int) -> int:
    """Samples of 200 to 1,800 tokens whose ids are Zipf's, a third of each asked; returns the tokens written."""
    written = 0
    with pq.ParquetWriter(folder / FILE, SCHEMA, compression="zstd") as writer:
        for group in made_up_groups():
            writer.write_table(group)
            written += len(group["input_ids"].combine_chunks().values)
            if written >= num_tokens:
                return written
    raise AssertionError("there is always another group")


def made_up_groups() -> Iterator[pa.Table]:
    rng = np.random.default_rng(0)
    number = 0
    while True:
        lengths = rng.integers(200, 1801, ROW_GROUP)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = np.minimum(rng.zipf(1.3, offsets[-1]) - 1, VOCAB_SIZE - 1).astype(np.int32)
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        names = pa.array([f"{number + index:012d}-0" for index in range(ROW_GROUP)])
        number += ROW_GROUP
        columns = {
            **{"sample_id": names, "conversation_id": names, "turn": pa.array(np.zeros(ROW_GROUP, np.int32))},
            "split": pa.array(rng.choice(["train", "val", "eval"], ROW_GROUP, p=[0.85, 0.05, 0.1]).tolist()),
            "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
            "loss_mask": pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(position >= np.repeat(lengths // 3, lengths))
            ),
            "finish_reason": pa.array(["stop"] * ROW_GROUP),
        }
        yield pa.table(columns).cast(SCHEMA)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
