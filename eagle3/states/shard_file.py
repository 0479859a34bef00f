"""A shard of hidden states while it is made: its file, filled in place by the engine's worker, and the checks on it.

`eagle3.states.hidden_states` says what a shard holds; A aux layers, H hidden size, T tokens of a sample.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from eagle3.file_faults import naming
from eagle3.formats.safetensors_headers import num_bytes
from eagle3.states.shard_plan import Shard, ids_as_bytes

UNWRITTEN = b"\xff" * 4
MAX_WRITE = 1 << 30


class ShardFile:
    """A context in which `target` is filled: of full length from the start, all but states and ids written.

    The engine's worker, maybe another process, writes a sample's states and then the ids it ran at `place_of(i)` of
    the file `path`; a sample has arrived when its ids stand there, which also shows that the states belong to them.
    `target` appears, whole, when the context ends well. Meanwhile `path` is locked, so that the leftover of a killed
    run can be told from a file in use.
    """

    def __init__(self, target: Path, shard: Shard) -> None:
        self.target = target
        self.shard = shard
        self.path = target.with_name(f".{target.name}.partial-{os.urandom(6).hex()}").absolute()
        self._fd = -1

    def __enter__(self) -> ShardFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _create_locked(self.path)
        try:
            with naming(self.path):
                self._write_known_parts()
        except OSError:
            self._remove()
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        if error:
            self._remove()
            return
        os.fsync(self._fd)
        os.replace(self.path, self.target)
        os.close(self._fd)

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _write_known_parts(self) -> None:
        shard, begins = self.shard, self.shard.begins
        # reserves the space: a full disk shows here, before the engine has worked for it
        os.posix_fallocate(self._fd, 0, shard.num_bytes)
        write_at(self._fd, array("q", shard.offsets).tobytes(), begins["offsets"])
        write_at(self._fd, UNWRITTEN * shard.num_tokens, begins["input_ids"])
        write_at(self._fd, b"".join(bytes(sample.loss_mask) for sample in shard.samples), begins["loss_mask"])
        # last: where it stands, ids are those that have arrived (`tokens_arrived`)
        write_at(self._fd, shard.header, 0)

    def place_of(self, index: int) -> tuple[int, ...]:
        """Byte positions in the file for the states (with fp8, then scales and squares) and for the ids of a sample."""
        begins, rows = self.shard.begins, {"squares": index}
        return tuple(
            begins[name] + rows.get(name, self.shard.offsets[index]) * self._bytes_of_a_row(name)
            for name in ("hidden_states", "scales", "squares", "input_ids")
            if name in begins
        )

    def _bytes_of_a_row(self, name: str) -> int:
        dtype, shape = self.shard.tensors[name]
        return num_bytes(dtype, shape[1:])

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Those of `indices` whose ids do not stand in the file, or not as the sample has them."""
        return [index for index in indices if not self._has_arrived(index)]

    def _has_arrived(self, index: int) -> bool:
        expected = ids_as_bytes(self.shard.samples[index].input_ids)
        return os.pread(self._fd, len(expected), self.place_of(index)[-1]) == expected


def tokens_arrived(folder: Path, shard: Shard) -> int:
    """Tokens whose states stand in the file of a shard that any process is making in `folder`; 0 where none is."""
    arrived = [0]
    for path in folder.glob(f".{shard.name}.partial-*"):
        with suppress(FileNotFoundError), open(path, "rb") as file:
            begun = os.pread(file.fileno(), 8, 0).strip(b"\0")
            ids = array("i", os.pread(file.fileno(), len(UNWRITTEN) * shard.num_tokens, shard.begins["input_ids"]))
            arrived.append(len(ids) - ids.count(-1) if begun else 0)
    return max(arrived)


def _create_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # `remove_leftovers` of another run came between the two calls


def write_at(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of `data` at a position of a file; Linux takes at most 2 GiB a call."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view[:MAX_WRITE], position)
        view, position = view[written:], position + written


def state_faults(hidden_TAH: torch.Tensor, layer_ids: Sequence[int]) -> list[str]:
    """What is wrong with the states of one sample, a line per layer: not finite, or all zero.

    Zeros were reported for hybrid verifiers (vllm#46301, speculators#613); nothing downstream would notice them.
    """
    largest_A = hidden_TAH.abs().amax(dim=(0, 2)).float().tolist()
    words = {True: "all zero", False: "NaN or infinite"}
    return [
        f"layer id {layer_id}: {words[largest == 0]}"
        for layer_id, largest in zip(layer_ids, largest_A, strict=True)
        if not 0 < largest < float("inf")
    ]
