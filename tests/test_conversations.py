"""Rows, duplicates, splits and budgets; sources that are absent, unnamed, untracked or of another version."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.params import SampleParams
from eagle3.problems import InvalidInput
from eagle3.sampling.conversation_sources import read_sources
from eagle3.sampling.conversations import (
    Conversation,
    Skipped,
    normalised,
    parse_row,
    read_jsonl,
    split_of,
    within_budget,
    without_duplicates,
    write_skipped,
)
from eagle3.sampling.prompt_selection import select
from tests.tiny import write_conversations

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
CHATTERBOT = {"package": "chatterbot-corpus", "version": "1.3.3"}
CHITCHAT = {"package": "chitchat-dataset", "version": "0.9.0"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]) | json_values})
    | st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}),
    max_size=5,
)


def opening(text: str, source: str = "a.jsonl", key: str = "line 1") -> Conversation:
    row = parse_row({"messages": [{"role": "user", "content": text}]}, source, key)
    assert isinstance(row, Conversation)
    return row


def codes(error: pytest.ExceptionInfo[InvalidInput]) -> list[str]:
    return [problem.code for problem in error.value.problems]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "no_messages"),
        ({"text": "hi"}, "no_messages"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "no_messages"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty"),
        ({"messages": [SYSTEM]}, "role_order"),
        ({"messages": [ANSWER]}, "role_order"),
        ({"messages": [USER, USER]}, "role_order"),
        ({"messages": [USER, SYSTEM]}, "role_order"),
        ({"messages": [{"role": "observation", "content": "42"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "42"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": None}]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not_text"),
        ({"messages": [{"role": "user"}]}, "malformed_message"),
        ({"messages": ["hi"]}, "malformed_message"),
        ({"messages": [USER | {"tool_calls": []}]}, "unknown_field"),
        ({"messages": [USER], "tools": []}, "unknown_field"),
    ],
)
def test_a_row_that_cannot_be_used_is_skipped_with_its_reason(raw: Any, reason: str) -> None:
    row = parse_row(raw, "a.jsonl", "line 3")
    assert isinstance(row, Skipped)
    assert (row.source, row.key, row.reason) == ("a.jsonl", "line 3", reason)


def test_the_prompt_is_the_system_message_and_the_first_user_message() -> None:
    row = parse_row({"messages": [SYSTEM, USER, ANSWER, USER], "id": 7}, "a.jsonl", "line 1")
    assert isinstance(row, Conversation)
    assert row.prompt == [SYSTEM, USER]


@given(json_values | st.fixed_dictionaries({"messages": messages}))
def test_any_json_is_a_conversation_or_a_counted_row(raw: Any) -> None:
    row = parse_row(raw, "a.jsonl", "line 1")
    if isinstance(row, Conversation):
        assert row.prompt[-1]["role"] == "user"
        assert len(row.conversation_id) == 20
    else:
        assert row.reason


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_every_line_of_any_file_gives_one_row(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = [line.replace(b"\n", b" ") for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert len(list(read_jsonl(path))) == len(lines)


def test_faulty_lines_are_counted_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": [USER]}).encode()
    path.write_bytes(b"\n".join([good, b"", b"{", b"\xff\xfe", b"[" * 100_000, good]))
    found = [row.reason if isinstance(row, Skipped) else "kept" for row in read_jsonl(path)]
    assert found == ["kept", "empty", "not_json", "not_utf8", "not_json", "kept"]


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


def test_case_width_and_white_space_do_not_make_another_question() -> None:
    assert normalised("  HELLO\n  there ") == normalised("hello\u3000There") == normalised("\uff48ello there")
    assert normalised("hello there") != normalised("hello, there")


def test_of_equal_openings_the_first_is_kept() -> None:
    rows = [opening("Hello", key="line 1"), opening("bye", key="line 2"), opening("hello ", key="line 3")]
    kept, skipped = without_duplicates(rows)
    assert [row.key for row in kept] == ["line 1", "line 2"]
    assert [(row.key, row.reason, row.detail) for row in skipped] == [("line 3", "duplicate", "of a.jsonl, line 1")]


def test_the_id_hangs_on_source_and_content_alone() -> None:
    assert opening("hi", key="line 1").conversation_id == opening("hi", key="line 9").conversation_id
    assert opening("hi").conversation_id != opening("hi", source="b.jsonl").conversation_id
    assert opening("hi").conversation_id != opening("Hi").conversation_id


@pytest.mark.parametrize(
    ("first_digits", "split"), [("0", "eval"), ("19", "eval"), ("1a", "val"), ("26", "val"), ("27", "train")]
)
def test_the_hash_is_cut_at_eval_then_val(first_digits: str, split: str) -> None:
    assert split_of(first_digits.ljust(64, "0"), val_percent=5, eval_percent=10) == split


def test_a_budget_keeps_the_lowest_hashes_so_that_a_larger_one_only_adds() -> None:
    rows = [opening(f"question {index}") for index in range(20)]
    five, surplus = within_budget(rows, "train", 5)
    ten, _ = within_budget(reversed(rows), "train", 10)
    assert ten[:5] == five
    assert [(entry.reason, entry.count) for entry in surplus] == [("over_budget", 15)]


def sample_params(**changes: Any) -> SampleParams:
    values = {
        **{"sources": [CHATTERBOT], "max_train": 8, "max_val": 2, "max_eval": 4, "min_eval": 1},
        **{"val_percent": 20, "eval_percent": 20, "max_new_tokens": 10, "max_model_len": 50, "temperature": 0.0},
    }
    return SampleParams(**(values | changes))


def words(conversation: list[dict[str, str]]) -> list[int]:
    """A stand-in for the tokenizer: one id a word, so that lengths can be read off the text."""
    return [len(word) for word in conversation[-1]["content"].split()]


def test_every_row_read_is_kept_or_skipped_for_one_reason() -> None:
    rows = [
        *(opening(f"question number {index}") for index in range(60)),
        opening("question number 1"),
        opening("too " * 41),
        opening("a-word-of-more-than-thirty-letters!"),
        Skipped("a.jsonl", "line 9", "empty"),
    ]
    chosen = select(list(rows), sample_params(), vocab_size=30, render=words)
    kept = sum(len(prompts) for prompts in chosen.prompts.values())
    assert {split: len(prompts) for split, prompts in chosen.prompts.items()} == {"train": 8, "val": 2, "eval": 4}
    assert chosen.read == len(rows) == kept + sum(chosen.skipped_by_reason.values())
    assert chosen.skipped_by_reason == {
        "duplicate": 1,
        "empty": 1,
        "over_budget": 60 - 14,
        "token_out_of_vocabulary": 1,
        "too_long": 1,
    }


def test_too_few_eval_prompts_are_refused_with_what_became_of_the_rows() -> None:
    rows = [opening("hi", key=f"line {number}") for number in (1, 2, 3)]
    with pytest.raises(InvalidInput) as error:
        select(list(rows), sample_params(min_eval=3), vocab_size=30, render=words)
    assert codes(error) == ["too-few-prompts"] * len(error.value.problems)
    last = error.value.problems[-1]
    assert last.where == "sample: the eval split"
    assert "of 3 rows (skipped: duplicate 2)" in last.found
    assert "sample.min_eval" in last.fix


def test_a_skipped_row_is_written_as_one_line_of_json(tmp_path: Path) -> None:
    write_skipped(tmp_path / "skipped.jsonl", [Skipped("a.jsonl", "line 2", "unknown_field", "\ud800")])
    [line] = (tmp_path / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "unknown_field"


def test_the_packages_hold_what_the_default_parameters_expect() -> None:
    rows = read_sources([CHATTERBOT, CHITCHAT])
    distinct, _ = without_duplicates(row for row in rows if isinstance(row, Conversation))
    assert len(rows) == 9194
    assert len(distinct) == 5585
    assert [row.reason for row in rows if isinstance(row, Skipped)] == ["not_text", "empty"]


def test_unknown_packages_and_other_versions_are_refused_together(tmp_path: Path) -> None:
    sources = [{"package": "persona-chat", "version": "1.0"}, CHITCHAT | {"version": "0.8.0"}, CHATTERBOT, CHATTERBOT]
    with pytest.raises(InvalidInput) as error:
        read_sources(sources, tmp_path)
    assert codes(error) == ["repeated-source", "unknown-package", "source-version"]
    assert "chatterbot-corpus or chitchat-dataset" in error.value.problems[1].expected
    assert error.value.problems[2].fix == "pip install chitchat-dataset==0.8.0, or declare version 0.9.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    conversations = tmp_path / "data" / "conversations"
    conversations.mkdir(parents=True)
    (conversations / "README.md").write_text("not data")
    return conversations


def git_add(path: Path) -> None:
    subprocess.run(["git", "add", "--force", path.name], cwd=path.parent, check=True)


def test_a_file_that_git_or_dvc_tracks_is_read(folder: Path) -> None:
    git_add(write_conversations(folder / "small.jsonl", ["one", "two"]))
    write_conversations(folder / "large.jsonl", ["three"])
    (folder / "large.jsonl.dvc").write_text("outs: []\n")
    git_add(folder / "large.jsonl.dvc")
    rows = read_sources([{"file": "small.jsonl"}, {"file": "large.jsonl"}], folder)
    assert [(row.source, row.key) for row in rows] == [
        ("small.jsonl", "line 1"),
        ("small.jsonl", "line 2"),
        ("large.jsonl", "line 1"),
    ]


def test_absent_unnamed_and_untracked_files_are_refused_together_with_their_remedies(folder: Path) -> None:
    write_conversations(folder / "untracked.jsonl", ["one"])
    write_conversations(folder / "unnamed.jsonl", ["one"])
    with pytest.raises(InvalidInput) as error:
        read_sources([{"file": "absent.jsonl"}, {"file": "untracked.jsonl"}], folder)
    assert codes(error) == ["source-absent", "source-unnamed", "source-untracked"]
    assert "`- file: unnamed.jsonl`" in error.value.problems[1].fix
    assert "git add" in error.value.problems[2].fix
    assert "dvc add" in error.value.problems[2].fix


def test_a_file_that_dvc_has_not_brought_yet_is_to_be_pulled(folder: Path) -> None:
    (folder / "large.jsonl.dvc").write_text("outs: []\n")
    with pytest.raises(InvalidInput) as error:
        read_sources([{"file": "large.jsonl"}], folder)
    assert error.value.problems[0].fix.startswith("dvc pull ")
