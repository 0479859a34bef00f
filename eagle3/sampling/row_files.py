"""Rows out of files, one after the other in bounded memory: JSON lines, Parquet, and `datasets` (hub or disk).

Each reader yields (key, raw): the row's number in its file, and its value, or a `Skipped` where it cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.problems import InvalidInput, invalid
from eagle3.sampling.conversations import Skipped

RawRow = tuple[str, Any]
# Rows decoded at once: conversations are some kB each.
BATCH_ROWS = 256
# One line of JSON may not be longer: a file without line breaks would be read whole.
MAX_LINE_BYTES = 64 << 20


def jsonl_rows(path: Path) -> Iterator[RawRow]:
    """One row a line; a line that is blank, too long, not UTF-8 or not JSON is a skipped row with its number."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                yield f"line {number}", Skipped(path.name, f"line {number}", "not_json", f"over {MAX_LINE_BYTES} bytes")
            else:
                yield f"line {number}", _parsed(line, path.name, number)


def _parsed(line: bytes, source: str, number: int) -> Any:
    key = f"line {number}"
    if not line.strip():
        return Skipped(source, key, "empty", "a blank line")
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return Skipped(source, key, "not_utf8", f"byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Skipped(source, key, "not_json", str(error)[:200] or type(error).__name__)


def parquet_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a Parquet file, a batch in memory; text that is not UTF-8 makes its row a skipped one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                for index in range(batch.num_rows):
                    number += 1
                    yield f"row {number}", _parquet_row(batch.slice(index, 1), path.name, number)
    except (pa.ArrowException, OSError) as error:
        found = f"after {number} rows: {' '.join(str(error).split())[:400]}"
        raise invalid("unreadable-source", str(path), found, "a Parquet file", "make the file again") from None


def _parquet_row(row: Any, source: str, number: int) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Skipped(source, f"row {number}", "not_utf8", f"byte {error.start} of a text")
    except (ValueError, OverflowError, LookupError) as error:  # a date that Python has not, an unknown time zone
        return Skipped(source, f"row {number}", "not_json", str(error)[:200])


def dataset_rows(name: str, config: str | None, split: str, revision: str) -> Iterator[RawRow]:
    """A split of a hub dataset at a commit: from the hub, or without a network from the cache, as a stream."""
    from datasets import load_dataset_builder

    def opened() -> Any:
        builder = load_dataset_builder(name, config, revision=revision)
        # without a network datasets 5.1.0 takes the newest version in its cache, whichever revision it is asked for
        if builder.hash != revision:
            raise invalid(
                "other-revision",
                f"dataset {name}",
                f"the hub out of reach, and revision {builder.hash} the newest in the cache",
                f"revision {revision}",
                f"go on with a network, or remove {builder.cache_dir}",
                "another revision may hold other conversations",
            )
        return builder.as_streaming_dataset(split=split)

    return _opened_rows(name, opened)


def saved_dataset_rows(path: Path) -> Iterator[RawRow]:
    """A folder that `Dataset.save_to_disk` wrote, memory-mapped."""
    from datasets import load_from_disk

    return _opened_rows(path.name, lambda: load_from_disk(str(path)))


def _opened_rows(name: str, opened: Any) -> Iterator[RawRow]:
    """`datasets` 5.1.0 raises errors of many libraries (its own, huggingface_hub's, httpx', pyarrow's, fsspec's)."""
    number = 0
    try:
        data = opened()
        if isinstance(data, dict):
            raise invalid(
                "unreadable-source", name, f"splits {sorted(data)}", "one split", "save the split that is meant alone"
            )
        for number, row in enumerate(data, start=1):
            yield f"row {number}", dict(row)
    except InvalidInput:
        raise
    except Exception as error:
        raise invalid(
            "unreadable-source",
            f"dataset {name}",
            f"after {number} rows: {type(error).__name__}: {' '.join(str(error).split())[:600]}",
            "a dataset that `datasets` reads at this revision, from its cache or from the hub",
            "check name, config, split and revision; without a network, bring the cache (HF_HOME), or save the split "
            "with Dataset.save_to_disk into data/conversations/ and name it as {folder: NAME}",
        ) from error
