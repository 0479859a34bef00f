"""The headers of safetensors files, read and checked as if an enemy had written them; no tensor data is touched.

Format (github.com/huggingface/safetensors, README "Format" and safetensors/src/tensor.rs): 8 bytes little-endian
length N, N bytes of JSON that begin with `{`, then the data. Each tensor names its dtype, shape and [begin, end) in the
data; the tensors cover the data without holes or overlaps; `__metadata__` maps strings to strings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any

from eagle3.formats.json_files import RepeatedKey, parse_json_object, printable, spelled
from eagle3.problems import InvalidInput, Problem, invalid

# The format allows 100 MB. A draft has some twenty tensors and the widest verifier shard a few thousand; this much
# header still parses within some hundred MB of memory.
MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 16
MANY = 40
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file: `begin` and `end` are byte positions in the file, not in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


@dataclass(frozen=True)
class FileHeader:
    """Every tensor of one safetensors file, in the order of its data, and the file's own metadata."""

    path: Path
    tensors: tuple[TensorHeader, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> FileHeader:
    """The header of one file; `InvalidInput` names everything that the format forbids."""
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):
            raise _broken(path, "no regular file")  # to open a pipe may never return
        size = found.st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise _broken(path, f"{size} bytes, header of {length}" if len(prefix) == 8 else f"{size} bytes")
            if length > MAX_HEADER_BYTES:
                raise invalid(
                    "header-too-large",
                    printable(path.name),
                    f"a header of {length} bytes",
                    f"at most {MAX_HEADER_BYTES}, thousands of times what a draft needs",
                    "write the checkpoint again",
                )
            data = file.read(length)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from None
    if not data.startswith(b"{"):
        raise _broken(path, f"a header that begins with {printable(data[:8].decode('latin-1'))}")
    parsed = parse_json_object(data, path)
    if parsed.repeated:
        raise InvalidInput(*(_repeated_tensor(path, repeated) for repeated in parsed.repeated[:MANY]))
    return _checked(path, parsed.value, 8 + length, size)


def write_header(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The bytes in front of the data for tensors {name: (dtype, shape)} stored in this order, padded to 8 bytes.

    `read_header` of what it writes gives the same tensors back.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return (BITS[dtype] * prod(shape) + 7) // 8


def _checked(path: Path, header: dict[str, Any], start: int, size: int) -> FileHeader:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "__metadata__ that is not a map from strings to strings")
    problems: list[Problem] = []
    tensors: list[TensorHeader] = []
    for name, entry in header.items():
        fault = _entry_fault(entry)
        if fault:
            problems.append(_broken_tensor(path, name, fault))
            continue
        begin, end = entry["data_offsets"]
        tensors.append(TensorHeader(name, entry["dtype"], tuple(entry["shape"]), path, start + begin, start + end))
    if problems:
        more = _broken_tensor(path, "more", f"{len(problems) - MANY} more entries of this kind")
        raise InvalidInput(*problems[:MANY], *([more] if len(problems) > MANY else []))
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_cover(path, tensors, start, size)
    return FileHeader(path, tuple(tensors), metadata)


def _entry_fault(entry: Any) -> str:
    """What is wrong with one tensor's entry, or ''."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return f"the entry {spelled(entry)}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"dtype {spelled(dtype)}"
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(each) for each in shape):
        return f"shape {spelled(shape)}"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(each) for each in offsets):
        return f"data_offsets {spelled(offsets)}"
    if offsets[1] - offsets[0] != num_bytes(dtype, tuple(shape)):
        return f"{offsets[1] - offsets[0]} bytes for {dtype} {shape}, which needs {num_bytes(dtype, tuple(shape))}"
    return ""


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_cover(path: Path, tensors: list[TensorHeader], start: int, size: int) -> None:
    """The tensors fill the data section from its first to its last byte (validate() in tensor.rs)."""
    position = start
    for tensor in tensors:
        if tensor.begin != position:
            what = "overlaps the tensor before it" if tensor.begin < position else "follows a hole"
            raise InvalidInput(_broken_tensor(path, tensor.name, f"{what} (byte {tensor.begin}, not {position})"))
        position = tensor.end
    if position != size:
        raise _broken(path, f"tensors up to byte {position} in a file of {size} bytes")


def _broken(path: Path, found: str) -> InvalidInput:
    return invalid(
        "broken-safetensors",
        printable(path.name),
        found,
        "a complete safetensors file",
        "copy or download the file again, or export the checkpoint again",
        "every server refuses the file",
    )


def _broken_tensor(path: Path, name: str, fault: str) -> Problem:
    return Problem(
        "broken-safetensors",
        f"{printable(path.name)}: {printable(name)}",
        printable(fault),
        "an entry that the safetensors format allows",
        "export the checkpoint again",
        "every server refuses the file",
    )


def _repeated_tensor(path: Path, repeated: RepeatedKey) -> Problem:
    return _broken_tensor(path, repeated.where, "the same key twice in one header")
