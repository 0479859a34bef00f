"""Rows, duplicates, splits and budgets; sources that are absent, unnamed, untracked or of another version."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.atomic_files import sha256_of_json
from eagle3.params import SampleParams
from eagle3.problems import InvalidInput
from eagle3.sampling.conversation_sources import Sources
from eagle3.sampling.conversations import (
    Conversation,
    Row,
    Skipped,
    SkippedFile,
    normalised,
    parse_row,
    split_bounds,
    split_of,
    turn_in_line,
)
from eagle3.sampling.near_duplicates import NearDuplicates, shingles
from eagle3.sampling.prompt_selection import Budget, Selection, select
from tests.tiny import write_conversations

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
CHATTERBOT = {"package": "chatterbot-corpus", "version": "1.3.3"}
CHITCHAT = {"package": "chitchat-dataset", "version": "0.9.0"}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


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
        ({"messages": [USER, ANSWER, ANSWER]}, "role_order"),
        ({"messages": [USER, {"role": "tool", "content": "42"}]}, "role_order"),
        ({"messages": [{"role": "observation", "content": "42"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "42"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": None}]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not_text"),
        ({"messages": [{"role": "user"}]}, "malformed_message"),
        ({"messages": ["hi"]}, "malformed_message"),
        ({"messages": [USER | {"tool_calls": []}]}, "unknown_field"),
        ({"messages": [USER | {"reasoning_content": "hm"}]}, "unknown_field"),
        ({"messages": [USER], "score": 1}, "unknown_field"),
        ({"messages": [USER], "tools": {"name": "f"}}, "malformed_tools"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "not_text"),
        ({"messages": [USER, ANSWER | {"tool_calls": [{"function": {}}]}]}, "malformed_tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": [call("{")]}]}, "malformed_tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": [call("[1]")]}]}, "malformed_tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": [call('{"a": NaN}')]}]}, "malformed_tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": [call('{"a": "\\ud800"}')]}]}, "malformed_tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": 5}]}, "malformed_tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": call("{}")}]}, "malformed_tools"),
    ],
)
def test_a_row_that_cannot_be_used_is_skipped_with_its_reason(raw: Any, reason: str) -> None:
    row = parse_row(raw, "a.jsonl", "line 3")
    assert isinstance(row, Skipped)
    assert (row.source, row.key, row.reason) == ("a.jsonl", "line 3", reason)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
CALL = st.fixed_dictionaries({}, optional={"function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})})
ROLE = st.sampled_from(["system", "user", "assistant", "tool"])
# Sound but for one field, which else a fault of another would hide, and anything at all.
SOUND = st.fixed_dictionaries(
    {"role": ROLE, "content": st.text(max_size=3)},
    optional={"tool_calls": JSON | st.lists(CALL | JSON, max_size=2)},
)
MESSAGE = SOUND | st.fixed_dictionaries(
    {"role": ROLE | JSON, "content": JSON}, optional={"reasoning": JSON, "name": JSON}
)
ROW = st.fixed_dictionaries(
    {"messages": st.lists(SOUND, max_size=3) | st.lists(MESSAGE | JSON)}, optional={"tools": JSON}
)


@settings(max_examples=300)
@given(ROW | JSON)
def test_any_row_is_a_conversation_or_skipped_with_a_reason(raw: Any) -> None:
    row = parse_row(raw, "a.jsonl", "line 3")
    assert row.reason if isinstance(row, Skipped) else row.conversation_id


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


def test_messages_are_what_the_server_hands_to_a_template() -> None:
    """vLLM 0.32.0 parses the arguments of calls, drops empty lists of calls, and gives reasoning two names."""
    says = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')], "reasoning": "hm", "name": None}
    result = {"role": "tool", "content": "2", "tool_call_id": "x"}
    row = parse_row({"messages": [USER, says, result, ANSWER | {"tool_calls": []}], "tools": [{"n": 1}]}, "a", "1")
    assert isinstance(row, Conversation), row
    assert row.messages[1] == {
        **{"role": "assistant", "content": "", "reasoning": "hm", "reasoning_content": "hm"},
        "tool_calls": [call({"a": 1})],
    }
    assert row.messages[2:] == (result, ANSWER)
    assert row.tools == ({"n": 1},)
    assert row.answer_places == [1, 3]


def test_tools_are_part_of_the_id_and_their_absence_leaves_it_as_it_was() -> None:
    plain, tooled = (parse_row({"messages": [USER], "tools": tools}, "a", "1") for tools in (None, [{"n": 1}]))
    assert isinstance(plain, Conversation)
    assert isinstance(tooled, Conversation)
    assert plain.conversation_id == sha256_of_json(["a", [USER]])[:20] != tooled.conversation_id


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


def test_case_width_and_white_space_do_not_make_another_question() -> None:
    assert normalised("  HELLO\n  there ") == normalised("hello\u3000There") == normalised("\uff48ello there")
    assert normalised("hello there") != normalised("hello, there")


def test_the_id_hangs_on_source_and_content_alone() -> None:
    assert opening("hi", key="line 1").conversation_id == opening("hi", key="line 9").conversation_id
    assert opening("hi").conversation_id != opening("hi", source="b.jsonl").conversation_id
    assert opening("hi").conversation_id != opening("Hi").conversation_id


@pytest.mark.parametrize(
    ("first_digits", "split"), [("0", "eval"), ("19", "eval"), ("1a", "val"), ("26", "val"), ("27", "train")]
)
def test_the_hash_is_cut_at_eval_then_val(first_digits: str, split: str) -> None:
    assert split_of(first_digits.ljust(64, "0"), val_percent=5, eval_percent=10) == split


def filled(rows: list[Conversation], maximum: int, split: str = "train") -> Budget:
    budget = Budget(split, maximum, (0, 100))
    assert not [skipped for row in rows if (skipped := budget.offer(row, lambda row, split: None))]
    return budget


def test_a_budget_keeps_the_lowest_hashes_so_that_a_larger_one_only_adds() -> None:
    rows = [opening(f"question {index}") for index in range(20)]
    five, ten = filled(rows, 5), filled(rows[::-1], 10)
    assert ten.in_line()[:5] == five.in_line() == sorted(rows, key=lambda row: row.opening_sha256)[:5]
    assert [(entry.reason, entry.count) for entry in five.surplus()] == [("over_budget", 15)]
    assert filled(rows, 20).surplus() == []


def test_of_two_sources_the_weight_says_how_much_likelier_a_conversation_is_taken() -> None:
    rows = [
        Conversation(name, "", ({"role": "user", "content": f"{name} {index}"},), weight=weight)
        for index in range(4000)
        for name, weight in (("light", 1.0), ("heavy", 3.0))
    ]
    taken = [row.source for row in filled(rows, 400).in_line()]
    assert 0.70 < taken.count("heavy") / 400 < 0.80  # 3 of 4, five standard deviations each way


@given(st.lists(st.integers(0, 2**256 - 1), min_size=2, max_size=20, unique=True))
def test_with_equal_weights_the_order_within_a_split_is_that_of_the_hashes(numbers: list[int]) -> None:
    digests = sorted(f"{number:064x}" for number in numbers)
    bounds = split_bounds(5, 10)
    for split in ("train", "val", "eval"):
        members = [digest for digest in digests if split_of(digest, 5, 10) == split]
        places = [turn_in_line(digest, 2.0, bounds[split]) for digest in members]
        assert places == sorted(places)


def test_similarity_is_the_share_of_common_pieces_and_case_does_not_count() -> None:
    held_out = [opening("What is the capital of France?"), opening("Sing!", key="line 2")]
    index = NearDuplicates(held_out)
    assert index.nearest("what is the CAPITAL of france?") == (1.0, held_out[0])
    near, twin = index.nearest("What is the capital of Francs?")
    ours, theirs = shingles("What is the capital of Francs?"), shingles(held_out[0].opening)
    assert (near, twin) == (len(ours & theirs) / len(ours | theirs), held_out[0])
    assert index.nearest("zzz") == (0.0, None)


def sample_params(**changes: Any) -> SampleParams:
    values = {
        **{"sources": [CHATTERBOT], "mode": "regenerate", "max_turns": 1, "max_train": 8, "max_val": 2, "max_eval": 4},
        **{"min_eval": 1, "val_percent": 20, "eval_percent": 20, "max_eval_similarity": 1.0, "max_new_tokens": 10},
        **{"max_model_len": 50, "max_num_seqs": 8, "temperature": 0.0, "top_p": 1.0},
    }
    return SampleParams(**(values | changes))


def selected(path: Path, rows: list[Row], **changes: Any) -> tuple[Selection, SkippedFile]:
    def unusable(row: Conversation, split: str) -> Skipped | None:
        return Skipped(row.source, row.key, "too_long") if len(row.opening) > 40 else None

    with SkippedFile(path / "skipped.jsonl") as skipped:
        return select(iter(rows), sample_params(**changes), unusable, skipped), skipped


def test_every_row_read_is_kept_or_skipped_for_one_reason(tmp_path: Path) -> None:
    rows = [
        *(opening(f"question number {index}") for index in range(60)),
        opening("question number 1 " + "and so on " * 8),
        Skipped("a.jsonl", "line 9", "empty"),
    ]
    chosen, skipped = selected(tmp_path, list(rows), max_train=60, max_val=2, max_eval=4)
    assert {split: len(prompts) for split, prompts in chosen.prompts.items()}["eval"] == 4
    kept = sum(map(len, chosen.prompts.values()))
    assert chosen.read == len(rows) == kept + skipped.by_reason.total()
    assert skipped.by_reason == {"empty": 1, "too_long": 1, "over_budget": 60 - kept}
    again, skipped = selected(tmp_path, [*chosen.prompts["train"], *rows], max_train=60, max_val=2, max_eval=4)
    assert again.prompts == chosen.prompts
    assert skipped.by_reason["duplicate"] == len(chosen.prompts["train"])
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert sum(line["count"] for line in lines) == skipped.by_reason.total()
    assert "of a.jsonl, line 1" in {line["detail"] for line in lines}


def test_train_loses_openings_that_are_nearly_those_of_eval(tmp_path: Path) -> None:
    rows: list[Row] = [opening(f"Tell me about the number {index}") for index in range(60)]
    others: list[Row] = [opening(hashlib.sha256(bytes([index])).hexdigest()[:30]) for index in range(30)]
    every, _ = selected(tmp_path, rows + others, max_train=90)
    apart, skipped = selected(tmp_path, rows + others, max_train=90, max_eval_similarity=0.5)
    kept, alike = apart.prompts["train"], [row for row in every.prompts["train"] if row.opening.startswith("Tell")]
    assert any(row.opening.startswith("Tell") for row in every.prompts["eval"])
    assert len(alike) > 20
    assert kept == [row for row in every.prompts["train"] if row not in alike]
    assert skipped.by_reason["near_duplicate"] == len(alike)


def test_too_few_eval_prompts_are_refused_with_what_became_of_the_rows(tmp_path: Path) -> None:
    rows: list[Row] = [opening("hi", key=f"line {number}") for number in (1, 2, 3)]
    with pytest.raises(InvalidInput) as error:
        selected(tmp_path, rows, min_eval=3)
    assert codes(error) == ["too-few-prompts"] * len(error.value.problems)
    last = error.value.problems[-1]
    assert last.where == "sample: the eval split"
    assert "of 3 rows (skipped: duplicate 2)" in last.found
    assert "sample.min_eval" in last.fix


def test_a_skipped_row_is_written_as_one_line_of_json(tmp_path: Path) -> None:
    with SkippedFile(tmp_path / "skipped.jsonl") as skipped:
        skipped.add(Skipped("a.jsonl", "line 2", "unknown_field", "\ud800", count=2))
    [line] = (tmp_path / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "unknown_field"
    assert skipped.by_reason == {"unknown_field": 2}


def test_the_packages_hold_what_the_default_parameters_expect(tmp_path: Path) -> None:
    sources = Sources([CHATTERBOT, CHITCHAT], tmp_path)
    rows = list(sources)
    assert len(rows) == 9194
    assert len({row.opening_sha256 for row in rows if isinstance(row, Conversation)}) == 5585
    assert [row.reason for row in rows if isinstance(row, Skipped)] == ["not_text", "empty"]
    assert {name: read["rows"] for name, read in sources.read.items()} == {
        "chatterbot-corpus": 2026,
        "chitchat-dataset": 7168,
    }


def test_unknown_packages_and_other_versions_are_refused_together(tmp_path: Path) -> None:
    sources = [{"package": "persona-chat", "version": "1.0"}, CHITCHAT | {"version": "0.8.0"}, CHATTERBOT, CHATTERBOT]
    with pytest.raises(InvalidInput) as error:
        Sources(sources, tmp_path)
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
    rows = list(Sources([{"file": "small.jsonl"}, {"file": "large.jsonl"}], folder))
    assert [(row.source, row.key) for row in rows] == [
        ("small.jsonl", "line 1"),
        ("small.jsonl", "line 2"),
        ("large.jsonl", "line 1"),
    ]


def test_absent_unnamed_and_untracked_files_are_refused_together_with_their_remedies(folder: Path) -> None:
    write_conversations(folder / "untracked.jsonl", ["one"])
    write_conversations(folder / "unnamed.jsonl", ["one"])
    with pytest.raises(InvalidInput) as error:
        Sources([{"file": "absent.jsonl"}, {"file": "untracked.jsonl"}], folder)
    assert codes(error) == ["source-absent", "source-unnamed", "source-untracked"]
    assert "`- file: unnamed.jsonl`" in error.value.problems[1].fix
    assert "git add" in error.value.problems[2].fix
    assert "dvc add" in error.value.problems[2].fix


def test_a_file_that_dvc_has_not_brought_yet_is_to_be_pulled(folder: Path) -> None:
    (folder / "large.jsonl.dvc").write_text("outs: []\n")
    with pytest.raises(InvalidInput) as error:
        Sources([{"file": "large.jsonl"}], folder)
    assert error.value.problems[0].fix.startswith("dvc pull ")
