"""machine.yaml: absent = everything visible, wrong = refused, found at $DVC_ROOT."""

from __future__ import annotations

import os

import pytest

from eagle3.machine import DEFAULT, cores_by_rank, read_machine
from eagle3.problems import InvalidInput


def test_absent_file_takes_everything_visible_and_says_so(tmp_path, capsys):
    assert read_machine(tmp_path) == DEFAULT
    assert "no machine.yaml" in capsys.readouterr().out


def test_the_file_at_dvc_root_wins_over_the_working_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "machine.yaml").write_text("cpu_threads: 2\n")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    assert read_machine().cpu_threads == 2
    assert "cpu_threads=2" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["cpu_thread: 2", "cpu_threads: true", "cpu_threads: 0", "[1]", "cpu_threads: ["])
def test_a_wrong_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "machine.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=r"machine\.yaml"):
        read_machine(tmp_path)


def test_cores_are_dealt_out_to_ranks_and_shared_where_there_are_too_few():
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    assert cores_by_rank(1) == ",".join(cores)
    assert cores_by_rank(1, num_threads=1) == cores[0]
    assert cores_by_rank(len(cores)) == "|".join(cores)
    assert cores_by_rank(2, num_threads=1) == f"{cores[0]}|{cores[0]}"


def test_a_mistyped_key_is_refused_with_the_nearest_one(tmp_path):
    (tmp_path / "machine.yaml").write_text("tensor_paralel_size: 2\n")
    with pytest.raises(InvalidInput, match=r"did you mean tensor_parallel_size\?"):
        read_machine(tmp_path)
