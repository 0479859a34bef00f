"""The Parquet file of the samples: round trip, same bytes, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.plans.estimate import samples_memory
from eagle3.problems import InvalidInput
from eagle3.sampling import samples as samples_module
from eagle3.sampling.answers import answer_seed
from eagle3.sampling.sample_view import show_sample
from eagle3.sampling.samples import FILE, SCHEMA, Sample, read_samples, write_samples

ONE = Sample("b-0", "b", 0, "train", [1, 2, 3, 9, 9], [False, False, False, True, True], "length")
TWO = Sample("a-0", "a", 0, "eval", [1, 5], [False, True], "stop")

samples = st.builds(
    Sample,
    sample_id=st.text("abcdef0123456789", min_size=4, max_size=8),
    conversation_id=st.just("c"),
    turn=st.integers(0, 5),
    split=st.sampled_from(["train", "val", "eval"]),
    input_ids=st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
    loss_mask=st.sampled_from([[False, True, True, True], [False, False, False, True], [False, True, False, True]]),
    finish_reason=st.sampled_from(["stop", "length"]),
)


def test_rows_come_back_sorted_by_id(tmp_path: Path) -> None:
    counts = write_samples(tmp_path, [ONE, TWO])
    assert counts == {"train": 1, "val": 0, "eval": 1, "tokens": 7, "supervised_tokens": 3}
    assert read_samples(tmp_path) == [TWO, ONE]


@given(st.lists(samples, min_size=1, max_size=6, unique_by=lambda sample: sample.sample_id))
def test_write_then_read_is_identity_and_order_does_not_change_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Sample]
) -> None:
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    write_samples(first, rows)
    write_samples(second, reversed(rows))
    assert sorted(rows, key=lambda row: row.sample_id) == read_samples(first)
    assert (first / FILE).read_bytes() == (second / FILE).read_bytes()


def test_num_prompt_is_the_index_of_the_first_supervised_token() -> None:
    assert (ONE.num_prompt, TWO.num_prompt) == (3, 1)


def test_row_groups_gathered_from_the_disk_are_the_bytes_of_one_sorted_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "ROW_GROUP", 4)
    rows = [replace(ONE, sample_id=f"{index * 7 % 30:02d}", input_ids=[index, 1, 2, 3, 4]) for index in range(30)]
    write_samples(tmp_path / "spilled", iter(rows))
    table = pa.Table.from_pylist(sorted(map(Sample.as_row, rows), key=lambda row: row["sample_id"]), schema=SCHEMA)
    pq.write_table(table, tmp_path / "sorted.parquet", compression="zstd", row_group_size=4)
    assert (tmp_path / "spilled" / FILE).read_bytes() == (tmp_path / "sorted.parquet").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["spilled"]


def test_samples_are_held_in_the_memory_that_estimate_says(tmp_path: Path) -> None:
    """Lists of Python's numbers took 50 bytes a token."""
    mask, ids = [index > 9 for index in range(1000)], range(48_000, 49_000)
    write_samples(tmp_path, (replace(ONE, sample_id=f"{n:066}", input_ids=ids, loss_mask=mask) for n in range(300)))
    tracemalloc.start()
    rows = read_samples(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held == pytest.approx(samples_memory(len(rows), 300_000), rel=0.05)
    assert held < 6 * 300_000


def test_two_samples_with_one_id_or_a_faulty_one_are_our_own_fault(tmp_path: Path) -> None:
    for rows in ([ONE, ONE], [replace(ONE, loss_mask=[False] * 5)], [replace(ONE, loss_mask=[True] * 5)]):
        with pytest.raises(AssertionError):
            write_samples(tmp_path, rows)


def write_rows(folder: Path, *rows: Sample, schema: pa.Schema = SCHEMA) -> None:
    pq.write_table(pa.Table.from_pylist([row.as_row() for row in rows], schema=schema), folder / FILE)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (replace(ONE, loss_mask=[False, True]), "5 input_ids, 2 values of loss_mask"),
        (replace(ONE, loss_mask=[False] * 5), "loss_mask"),
        (replace(ONE, loss_mask=[True] * 5), "loss_mask"),
        (replace(ONE, input_ids=[-1, 2, 3, 9, 9]), "token id -1"),
        (replace(ONE, split="test"), "split 'test'"),
        (replace(ONE, finish_reason="abort"), "finish_reason 'abort'"),
    ],
)
def test_a_faulty_row_is_refused_by_its_id(tmp_path: Path, fault: Sample, said: str) -> None:
    write_rows(tmp_path, TWO, fault)
    with pytest.raises(InvalidInput, match="sample b-0") as error:
        read_samples(tmp_path)
    assert said in error.value.problems[0].found


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"input_ids": [1, None, 3, 9, 9]}, "input_ids"),
        ({"loss_mask": [False, False, None, True, True]}, "loss_mask"),
        *(({name: None}, name) for name in vars(ONE)),
    ],
)
def test_a_null_is_refused_by_its_column(tmp_path: Path, change: dict[str, Any], column: str) -> None:
    pq.write_table(pa.Table.from_pylist([TWO.as_row(), {**ONE.as_row(), **change}], schema=SCHEMA), tmp_path / FILE)
    with pytest.raises(InvalidInput) as error:
        read_samples(tmp_path)
    assert error.value.problems[0].found == f"nulls in {column}"


def test_a_file_without_a_sample_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path)
    with pytest.raises(InvalidInput, match=r"found: +no sample\n"):
        read_samples(tmp_path)


def test_a_file_with_a_sample_twice_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, ONE, TWO, ONE)
    with pytest.raises(InvalidInput, match="two samples b-0"):
        read_samples(tmp_path)


def test_a_missing_file_garbage_and_another_schema_are_refused_with_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        read_samples(tmp_path)
    (tmp_path / FILE).write_bytes(b"PAR1 nothing")
    with pytest.raises(InvalidInput, match="not Parquet"):
        read_samples(tmp_path)
    write_rows(tmp_path, ONE, schema=SCHEMA.set(4, pa.field("input_ids", pa.list_(pa.int64()))))
    with pytest.raises(InvalidInput, match="dvc repro sample"):
        read_samples(tmp_path)


def test_each_turn_of_each_conversation_has_a_seed_of_its_own() -> None:
    seeds = {answer_seed(seed, f"c{index}-{turn}") for seed in range(3) for index in range(50) for turn in range(2)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert answer_seed(0, "c-0") == answer_seed(0, "c-0")


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(96 + token) if token < 27 else "\x1b[31m" for token in ids)


@pytest.mark.parametrize("wanted", ["1", "b-0"])
def test_a_sample_is_shown_with_its_supervised_tokens_marked(tmp_path: Path, wanted: str) -> None:
    spans = replace(ONE, input_ids=[1, 2, 3, 4, 99], loss_mask=[False, True, False, True, True])
    write_samples(tmp_path, [spans, TWO])
    head, text = show_sample(tmp_path, wanted, letters, colour=False).splitlines()
    assert head == "sample 1: b-0, split train, from turn 0, finish_reason length; 5 tokens, 3 supervised"
    assert text == "a{+b+}c{+d\\x1b[31m+}", "escape sequences of a conversation do not reach the terminal"
    coloured = show_sample(tmp_path, wanted, letters, colour=True).splitlines()[1]
    assert coloured == "a\x1b[1;32mb\x1b[0mc\x1b[1;32md\\x1b[31m\x1b[0m"


def test_a_sample_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path, [ONE, TWO])
    for wanted in ("2", "-1", "c-0"):
        with pytest.raises(InvalidInput, match="no-such-sample"):
            show_sample(tmp_path, wanted, letters, colour=False)
