"""Files are whole or not there; links where possible, copies where not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.atomic_files import (
    atomic_path,
    link_or_copy,
    publish_directory,
    publish_file,
    sha256_of,
    sha256_of_json,
    write_json,
)

OTHER_DISK = Path("/dev/shm")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "report.json"
    target.write_text("old")

    def fail_half_way():
        with atomic_path(target) as partial:
            partial.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_equal_values_are_equal_bytes_whatever_the_order_of_keys(tmp_path):
    write_json(tmp_path / "a/one.json", {"b": 1.0, "a": "é"})
    write_json(tmp_path / "a/two.json", {"a": "é", "b": 1.0})
    assert (tmp_path / "a/one.json").read_bytes() == (tmp_path / "a/two.json").read_bytes()
    assert (tmp_path / "a/one.json").read_text() == '{\n  "a": "é",\n  "b": 1.0\n}\n'


def test_nan_is_no_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", float("nan"))
    assert not list(tmp_path.iterdir())


def test_a_published_folder_replaces_the_old_one_by_links(tmp_path):
    source, target = tmp_path / "scratch", tmp_path / "data/out"
    (source / "epoch_0").mkdir(parents=True)
    (source / "epoch_0/model").write_text("new")
    (target / "stale").mkdir(parents=True)
    publish_directory(source, target)
    assert [path.relative_to(target).as_posix() for path in sorted(target.rglob("*"))] == ["epoch_0", "epoch_0/model"]
    assert (target / "epoch_0/model").stat().st_ino == (source / "epoch_0/model").stat().st_ino
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["out"]


def test_a_published_file_is_a_copy_that_people_may_edit(tmp_path):
    source, target = tmp_path / "scratch.json", tmp_path / "reports/x.json"
    source.write_text("{}")
    publish_file(source, target)
    assert target.read_text() == "{}"
    assert target.stat().st_ino != source.stat().st_ino


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "cache").write_text("tensor")
    (tmp_path / "model").symlink_to("cache")
    link_or_copy(tmp_path / "model", tmp_path / "released")
    assert not (tmp_path / "released").is_symlink()
    assert (tmp_path / "released").read_text() == "tensor"


@pytest.mark.skipif(not OTHER_DISK.is_dir(), reason="no second file system here")
def test_across_file_systems_a_link_becomes_a_copy(tmp_path):
    target = OTHER_DISK / f"eagle3-test-{os.getpid()}"
    (tmp_path / "model").write_text("tensor")
    try:
        link_or_copy(tmp_path / "model", target)
        assert target.read_text() == "tensor"
    finally:
        target.unlink(missing_ok=True)


def test_a_target_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        link_or_copy(tmp_path / "a", tmp_path / "b")


def test_the_digest_of_a_file_is_its_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans()))
def test_the_digest_of_a_value_does_not_hang_on_the_order_of_keys(value):
    assert sha256_of_json(value) == sha256_of_json(dict(reversed(value.items())))
