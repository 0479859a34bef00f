"""Faults of files in the errors of the libraries that write, each provoked by a device that is always full."""

from __future__ import annotations

import errno
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from eagle3.file_faults import error_number, file_fault, naming

BIG = torch.zeros(1 << 20)


def by_python(full):
    with open(full, "w") as file:
        file.write("x" * 100_000)


def by_arrow(full):
    pq.write_table(pa.table({"a": list(range(100_000))}), full)


def by_torch(full):
    with open(full, "wb") as file:
        torch.save(BIG, file)


@pytest.mark.parametrize("write", [by_python, by_arrow, by_torch])
def test_a_full_device_is_named_whichever_library_wrote(write, tmp_path):
    # by a link: Arrow removes what it could not write, and root may remove a device
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    assert full.is_char_device()
    with pytest.raises(OSError, match="No space left on device: 'the/target'") as caught, naming("the/target"):
        write(full)
    problem = file_fault(caught.value)
    assert (problem.code, problem.where) == ("no-space", "the/target")


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (RuntimeError("Worker failed with error '[Errno 28] No space left on device: '/x''"), errno.ENOSPC),
        (FileNotFoundError(errno.ENOENT, "no such file"), None),
        (RuntimeError("code 28"), None),
        (OSError("torch says nothing"), None),
    ],
)
def test_the_number_of_a_fault(error, number):
    assert error_number(error) == number


def test_an_error_that_names_its_file_and_any_other_error_pass_as_they_are():
    with pytest.raises(PermissionError, match="'theirs'"), naming("ours"):
        raise PermissionError(errno.EACCES, "no", "theirs")
    with pytest.raises(KeyError), naming("ours"):
        raise KeyError("x")
    assert file_fault(KeyError("x")) is None


def test_who_owns_what_may_not_be_written_is_said(tmp_path):
    problem = file_fault(PermissionError(errno.EACCES, "denied", str(tmp_path / "a/b")))
    assert problem.code == "not-permitted"
    assert f"{tmp_path} belongs to user {os.geteuid()}, mode 700; this is user {os.geteuid()}" in problem.found
    assert file_fault(PermissionError(errno.EPERM, "no file: a signal, say")) is None


def test_a_broken_disk_is_said():
    assert file_fault(OSError(errno.EIO, "x"), "data/samples").where == "data/samples"
