"""Files are whole or not there; links where possible, copies where not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.atomic_files import (
    atomic_path,
    bring_beside,
    link_or_copy,
    link_tree,
    remove,
    sha256_of,
    sha256_of_json,
    write_json,
)


@pytest.fixture
def other_disk(tmp_path) -> Iterator[Path]:
    """Linux mounts a file system in memory here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert os.stat(folder).st_dev != tmp_path.stat().st_dev
        yield Path(folder)


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


def test_what_is_on_the_same_disk_is_ready_as_it_is(tmp_path):
    source = tmp_path / "scratch/out"
    source.mkdir(parents=True)
    assert bring_beside(source, tmp_path / "data/out") == source
    assert (tmp_path / "data").is_dir()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_on_another_disk_is_copied_beside_the_target(tmp_path, other_disk, kind):
    source, target = tmp_path / "scratch", other_disk / "data/out"
    (target / "stale").mkdir(parents=True)
    beside = other_disk / "data/.out.partial"
    beside.mkdir()  # of a run that was killed
    if kind == "file":
        source.write_text("new")
    else:
        (source / "epoch_0").mkdir(parents=True)
        (source / "epoch_0/model").write_text("new")
    assert bring_beside(source, target) == beside
    assert (beside if kind == "file" else beside / "epoch_0/model").read_text() == "new"
    assert (target / "stale").is_dir(), "the old output stays until all are ready"


def test_a_copy_that_fails_leaves_nothing_beside_the_target(tmp_path, other_disk):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/dangling").symlink_to("nowhere")
    with pytest.raises(shutil.Error):
        bring_beside(tmp_path / "scratch", other_disk / "out")
    assert not list(other_disk.iterdir())


def test_a_tree_of_links_shares_its_files(tmp_path):
    (tmp_path / "from/epoch_0").mkdir(parents=True)
    (tmp_path / "from/epoch_0/model").write_text("tensor")
    link_tree(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to/epoch_0/model").samefile(tmp_path / "from/epoch_0/model")


def test_what_is_absent_need_not_be_removed_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for name in ("nothing", "link"):
        remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    remove(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "cache").write_text("tensor")
    (tmp_path / "model").symlink_to("cache")
    link_or_copy(tmp_path / "model", tmp_path / "released")
    assert not (tmp_path / "released").is_symlink()
    assert (tmp_path / "released").read_text() == "tensor"


def test_across_file_systems_a_link_becomes_a_copy(tmp_path, other_disk):
    (tmp_path / "model").write_text("tensor")
    link_or_copy(tmp_path / "model", other_disk / "model")
    assert (other_disk / "model").read_text() == "tensor"


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
