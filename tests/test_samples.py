"""The Parquet file of the samples: round trip, same bytes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.problems import InvalidInput
from eagle3.sampling.answers import Answer, Prompt, as_sample, closed_counts, conversation_seed
from eagle3.sampling.conversations import Skipped, parse_row
from eagle3.sampling.samples import FILE, SCHEMA, Sample, count_samples, read_samples, write_samples

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
    assert write_samples(tmp_path, [ONE, TWO]) == [TWO, ONE]
    assert read_samples(tmp_path) == [TWO, ONE]


@given(st.lists(samples, max_size=6, unique_by=lambda sample: sample.sample_id))
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


def test_counts_are_of_splits_tokens_and_supervised_tokens() -> None:
    assert count_samples([ONE, TWO]) == {"train": 1, "val": 0, "eval": 1, "tokens": 7, "supervised_tokens": 3}


def write_rows(folder: Path, *rows: Sample, schema: pa.Schema = SCHEMA) -> None:
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=schema), folder / FILE)


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


def test_a_missing_file_garbage_and_another_schema_are_refused_with_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        read_samples(tmp_path)
    (tmp_path / FILE).write_bytes(b"PAR1 nothing")
    with pytest.raises(InvalidInput, match="not Parquet"):
        read_samples(tmp_path)
    write_rows(tmp_path, ONE, schema=SCHEMA.set(4, pa.field("input_ids", pa.list_(pa.int64()))))
    with pytest.raises(InvalidInput, match="dvc repro sample"):
        read_samples(tmp_path)


def test_supervised_is_exactly_what_was_generated_end_of_turn_included() -> None:
    row = parse_row({"messages": [{"role": "user", "content": "hi"}]}, "a.jsonl", "line 1")
    assert not isinstance(row, Skipped)
    made = as_sample(row, Prompt("c", [1, 7, 2]), Answer("c", [8, 9, 2], "stop"), "val")
    assert isinstance(made, Sample)
    assert made.input_ids == [1, 7, 2, 8, 9, 2]
    assert made.loss_mask == [False, False, False, True, True, True]
    failed = as_sample(row, Prompt("c", [1]), Answer("c", [8], "abort"), "val")
    assert failed == Skipped("a.jsonl", "line 1", "failed", "finish_reason abort, 1 tokens")


def test_counting_closes_or_the_stage_fails() -> None:
    skipped = [Skipped("s", "k", "too_long", count=3), Skipped("s", "k", "failed"), Skipped("s", "k", "empty")]
    counts, by_reason = closed_counts(7, [ONE, TWO], skipped)
    assert {name: counts[name] for name in ("read", "kept", "skipped", "failed")} == {
        "read": 7,
        "kept": 2,
        "skipped": 4,
        "failed": 1,
    }
    assert by_reason == {"empty": 1, "too_long": 3}
    with pytest.raises(InvalidInput, match="rows-lost"):
        closed_counts(8, [ONE, TWO], skipped)


def test_each_conversation_has_a_seed_of_its_own() -> None:
    seeds = {conversation_seed(seed, f"c{index}") for seed in range(3) for index in range(50)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert conversation_seed(0, "c") == conversation_seed(0, "c")
