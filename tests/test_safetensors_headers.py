from __future__ import annotations

import json
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.formats.safetensors_headers import BITS, num_bytes, read_header, write_header
from eagle3.problems import InvalidInput


def write(path, header: object, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_positions_are_counted_from_the_start_of_the_file(tmp_path):
    path = write(
        tmp_path / "x.safetensors", {"b": entry(offsets=(8, 16)), "a": entry(), "__metadata__": {"k": "v"}}, bytes(16)
    )
    header = read_header(path)
    start = path.stat().st_size - 16
    assert [(tensor.name, tensor.begin - start, tensor.end - start) for tensor in header.tensors] == [
        ("a", 0, 8),
        ("b", 8, 16),
    ]
    assert header.metadata == {"k": "v"}


HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\x00" * 7,
    "header longer than the file": struct.pack("<Q", 1 << 60) + b"{}",
    "header of 100 MB": struct.pack("<Q", 100_000_000) + b"{" + b" " * 99_999_999,
    "no brace": struct.pack("<Q", 2) + b" {",
    "not UTF-8": struct.pack("<Q", 3) + b"{\xff}",
    "a list": struct.pack("<Q", 3) + b"[1]",
    "deep": struct.pack("<Q", 200_000) + b"{" * 200_000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidInput):
        read_header(path)


BROKEN = {
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20),
    "data left over": ({"a": entry()}, 12),
    "data too short": ({"a": entry()}, 4),
    "size against shape": ({"a": entry(shape=(3,))}, 8),
    "unknown dtype": ({"a": entry(dtype="F7")}, 8),
    "dtype of another type": ({"a": {**entry(), "dtype": ["F32"]}}, 8),
    "negative size": ({"a": entry(shape=(-2,))}, 8),
    "boolean size": ({"a": entry(shape=(True,), offsets=(0, 4))}, 4),
    "fractional size": ({"a": entry(shape=(2.0,))}, 8),
    "huge product": ({"a": entry(shape=(2**62,) * 16)}, 8),
    "too many dimensions": ({"a": entry(shape=(1,) * 17, offsets=(0, 4))}, 4),
    "one offset": ({"a": entry(offsets=(8,))}, 8),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, 8),
    "unknown key": ({"a": {**entry(), "stride": [1]}}, 8),
    "entry is no object": ({"a": 3}, 0),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0),
    "metadata is a list": ({"__metadata__": []}, 0),
    "the same tensor twice": (b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), 8),
}


@pytest.mark.parametrize(("header", "size"), BROKEN.values(), ids=BROKEN)
def test_what_the_format_forbids_is_refused(tmp_path, header, size):
    with pytest.raises(InvalidInput, match="broken-safetensors"):
        read_header(write(tmp_path / "x.safetensors", header, bytes(size)))


def test_all_broken_entries_are_reported_at_once(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": 3, "b\x1b": entry(dtype="F7")}, bytes(8))
    with pytest.raises(InvalidInput) as caught:
        read_header(path)
    assert [problem.where for problem in caught.value.problems] == ["x.safetensors: a", "x.safetensors: b\\x1b"]


def test_no_tensors_at_all_is_a_file_like_any_other(tmp_path):
    assert read_header(write(tmp_path / "x.safetensors", {})).tensors == ()


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(BITS)), SHAPES),
    max_size=5,
)


@settings(deadline=None)
@given(TENSORS, st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_what_is_written_is_read_back(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    size = sum(num_bytes(dtype, shape) for dtype, shape in tensors.values())
    path.write_bytes(write_header(tensors, metadata) + bytes(size))
    header = read_header(path)
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == tensors
    assert header.metadata == metadata


def test_our_headers_are_those_of_the_reference_library(tmp_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    path = tmp_path / "x.safetensors"
    path.write_bytes(write_header({"a": ("BF16", (2, 3)), "b": ("I64", (1,))}, {"format": "pt"}) + bytes(20))
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.get_slice("a").get_shape() == [2, 3]


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_give_a_header_or_invalid_input(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", max(0, len(data) - 10)) + data)
    with suppress(InvalidInput):
        read_header(path)
