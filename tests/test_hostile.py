"""`eagle3 check` over files that an enemy wrote: a verdict or a problem, never another exception, bounded memory."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.__main__ import main
from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.formats.checkpoint_files import INDEX
from eagle3.formats.flat_config import flatten
from eagle3.formats.safetensors_headers import num_bytes, write_header
from eagle3.problems import InvalidInput
from eagle3.verifiers.verifier_config import parse_verifier_config
from tests.code_deps import ROOT
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, Weights, write_tensors

JUDGE = parse_verifier_config(VERIFIER)
CONFIG = json.dumps(flatten(NESTED)).encode()
HEADER = write_header(FROZEN | TRAINED, {"format": "pt"})
DATA = bytes(sum(num_bytes(dtype, shape) for dtype, shape in (FROZEN | TRAINED).values()))


def judged(folder: Path) -> str:
    try:
        verdict, _ = check_checkpoint(folder, JUDGE, values=True, verifier_folder=folder)
    except InvalidInput as error:
        return error.problems[0].code
    assert "\x1b" not in json.dumps(verdict.as_dict(), ensure_ascii=False)
    return verdict.verdict


def write(folder: Path, config: bytes = CONFIG, tensors: bytes = HEADER + DATA) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(tensors)
    return folder


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_as_config(tmp_path_factory, data):
    assert judged(write(tmp_path_factory.mktemp("any"), data)) in ("unreadable-json", "error")


SPOT = st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=4))


@settings(deadline=None, max_examples=200)
@given(st.lists(SPOT, max_size=4), st.integers(0, len(CONFIG)))
def test_a_config_with_changed_bytes_or_cut_off(tmp_path_factory, changes, length):
    assert judged(write(tmp_path_factory.mktemp("any"), changed(CONFIG, changes)))
    if length < len(CONFIG):
        assert judged(write(tmp_path_factory.mktemp("cut"), CONFIG[:length])) == "unreadable-json"


@settings(deadline=None, max_examples=200)
@given(st.lists(SPOT, max_size=4), st.integers(0, len(HEADER + DATA) - 1))
def test_a_tensor_file_with_changed_bytes_or_cut_off(tmp_path_factory, changes, length):
    folder = tmp_path_factory.mktemp("any")
    assert judged(write(folder, tensors=changed(HEADER, changes) + DATA))
    assert judged(write(folder, tensors=(HEADER + DATA)[:length])) in ("broken-safetensors", "unreadable-json")


def changed(data: bytes, changes) -> bytes:
    array = bytearray(data)
    for place, new in changes:
        array[place % len(data) : place % len(data) + len(new)] = new
    return bytes(array)


def raw(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


NUMBERS = ("-1", "1e400", "9" * 5000, "0.5", "true", "null", str(2**63), str(2**64), '"8"')


@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
@pytest.mark.parametrize("place", ["shape", "begin", "end"])
def test_numbers_that_are_no_sizes(tmp_path, number, place):
    values = {"shape": "2", "begin": "0", "end": "8"} | {place: number}
    entry = '"dtype": "F32", "shape": [SHAPE], "data_offsets": [BEGIN, END]'
    for key, value in values.items():
        entry = entry.replace(key.upper(), value)
    header = '{"fc.weight": {' + entry + "}}"
    assert judged(write(tmp_path / "x", tensors=raw(header.encode(), bytes(8)))) in (
        "broken-safetensors",
        "unreadable-json",
    )


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "\x00", "\x1b[2J", "", "\ud800", "x" * 100_000])
def test_names_that_are_paths_or_escapes_are_only_names(tmp_path, name):
    weights: Weights = FROZEN | TRAINED | {name: ("BF16", (1,))}
    write(tmp_path)
    write_tensors(tmp_path / "model.safetensors", weights)
    assert judged(tmp_path) == "error"
    assert main(["check", str(tmp_path), "--fix", str(tmp_path / "out")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "..", ".", "", "x\x00.safetensors", 3, None]
)
def test_an_index_that_names_other_places(tmp_path, name):
    write(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    assert judged(tmp_path) in ("error", "bad-index", "missing-shard")


def special_files(folder: Path, name: str) -> dict[str, Path]:
    made = {}
    for kind in ("pipe", "folder", "nothing", "itself", "zeros", "full"):
        place = folder / kind
        place.mkdir()
        write(place)
        (place / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(place / name)
        elif kind == "folder":
            (place / name).mkdir()
        else:
            target = {"nothing": "no/such", "itself": name, "zeros": "/dev/zero", "full": "/dev/full"}[kind]
            (place / name).symlink_to(target)
        made[kind] = place
    return made


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_regular_file_is_never_opened(tmp_path, name):
    """Reading a pipe would wait for ever, a device would never end."""
    for place in special_files(tmp_path, name).values():
        assert judged(place) in ("unreadable-json", "error")
        assert main(["check", str(place), "--json", "--verifier", str(place)]) == 1


def test_a_link_to_a_file_is_a_file(tmp_path):
    """The hub's cache is made of links."""
    write(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    assert judged(tmp_path / "snapshot") == judged(tmp_path / "blobs")


LIMIT = 600 << 20


def in_little_memory(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`check` in a process that may not have more than LIMIT bytes of data, and 60 seconds of processor."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    command = [sys.executable, "-m", "eagle3", "check", str(folder), "--json", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, preexec_fn=limit, text=True, capture_output=True, check=False
    )


def sparse(path: Path, weights: Weights) -> None:
    header = write_header(weights, {})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(num_bytes(dtype, shape) for dtype, shape in weights.values()))


HUGE: dict[str, Weights] = {
    "a map of gigabytes": {"d2t": ("I64", (1 << 30,)), "t2d": ("BOOL", (1 << 33,))},
    "one row of gigabytes": {"embed_tokens.weight": ("BF16", (1, 1 << 31)), "lm_head.weight": ("BF16", (1, 1 << 31))},
}


@pytest.mark.parametrize("weights", HUGE.values(), ids=HUGE)
def test_huge_tensors_are_not_read_into_memory(tmp_path, weights):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**flatten(NESTED), "hidden_size": 1 << 31}))
    sparse(tmp_path / "model.safetensors", {**weights, "fc.weight": ("BF16", (8, 8))})
    done = in_little_memory(tmp_path, "--no-values")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "error"), done.stderr[-500:]


def test_a_huge_map_is_not_read_for_its_values(tmp_path):
    write(tmp_path)
    sparse(tmp_path / "model.safetensors", FROZEN | TRAINED | {"d2t": ("I64", (1 << 30,)), "t2d": ("BOOL", (1 << 33,))})
    done = in_little_memory(tmp_path, "--fix", str(tmp_path / "out"))
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "error"), done.stderr[-500:]


HEADERS = {
    "100 MB of spaces": b"{" + b" " * 100_000_000 + b"}",
    "4 MB of names": json.dumps(
        {f"{n:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(60_000)}
    ).encode(),
    "15 MB of nesting": b'{"a":' + b"[" * 7_000_000 + b"]" * 7_000_000 + b"}",
    "one name of 15 MB": b'{"' + b"x" * 15_000_000 + b'": 1}',
    "15 MB of one key": b"{" + b",".join([b'"a":1'] * 2_500_000) + b"}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_large_headers_cost_little_memory(tmp_path, header):
    write(tmp_path, tensors=raw(header))
    done = in_little_memory(tmp_path, "--no-values")
    assert done.returncode == 1, done.stderr[-500:]
    assert len(done.stdout) < 200_000
    json.loads(done.stdout)
