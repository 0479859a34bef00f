"""Sources of every layout and kind: JSON lines, Parquet, saved datasets; what is unknown is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.problems import InvalidInput
from eagle3.sampling import row_files
from eagle3.sampling.conversation_sources import Sources
from eagle3.sampling.conversations import Conversation, Row, Skipped
from eagle3.sampling.row_files import jsonl_rows
from eagle3.sampling.row_layouts import layout_of

SYSTEM, ASK, SAY = (
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
)
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "messages": ({"messages": [ASK, SAY], "id": 3}, [ASK, SAY]),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
            **{"system": "be kind", "id": "x"},
        },
        [SYSTEM, ASK, SAY],
    ),
    "alpaca": (
        {"instruction": "Add", "input": "1, 2", "output": "3"},
        [{"role": "user", "content": "Add\n\n1, 2"}, {"role": "assistant", "content": "3"}],
    ),
    "questions": (
        {"question_id": 81, "category": "writing", "turns": ["hi", "again"], "reference": ["no"]},
        [ASK, {"role": "assistant", "content": ""}, {"role": "user", "content": "again"}],
    ),
    "prompt": ({"prompt": "hi"}, [ASK]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "conversations").mkdir()
    return tmp_path / "conversations"


def track(path: Path) -> None:
    subprocess.run(["git", "add", "--force", path.name], cwd=path.parent, check=True)


def written(path: Path, rows: list[Any]) -> dict[str, Any]:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    track(path)
    return {"file": path.name}


def messages_of(row: Row) -> list[dict[str, str]]:
    assert isinstance(row, Conversation), row
    return list(row.messages)


def refused(sources: list[dict[str, Any]], folder: Path) -> InvalidInput:
    with pytest.raises(InvalidInput) as error:
        list(Sources(sources, folder))
    return error.value


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_told_by_its_mark_and_named(folder: Path, name: str, suffix: str) -> None:
    raw, expected = LAYOUTS[name]
    sources = Sources([written(folder / f"a.{suffix}", [raw, raw, raw])], folder)
    assert [messages_of(row) for row in sources] == [expected] * 3
    assert sources.read == {f"a.{suffix}": {"layout": name, "rows": 3}}


@pytest.mark.parametrize("raw", [{"question": "hi", "answer": "x"}, {"text": "hi"}, {"messages": None}, [1], "hi", {}])
def test_an_unknown_layout_is_refused_with_the_known_ones(folder: Path, raw: Any) -> None:
    [problem] = refused([written(folder / "a.jsonl", [raw])], folder).problems
    assert (problem.code, problem.where) == ("unknown-layout", "a.jsonl, line 1")
    assert "instruction (alpaca)" in problem.expected
    assert layout_of(raw) is None


def test_rows_of_another_layout_than_the_first_are_counted(folder: Path) -> None:
    rows = [LAYOUTS["alpaca"][0], LAYOUTS["sharegpt"][0], [], {"instruction": "x", "score": 1}]
    found = list(Sources([written(folder / "a.jsonl", rows)], folder))
    assert [getattr(row, "reason", "kept") for row in found] == [
        "kept",
        "other_layout",
        "other_layout",
        "unknown_field",
    ]


def test_fields_that_are_not_understood_are_left_out_only_by_name(folder: Path) -> None:
    source = written(folder / "a.jsonl", [{"messages": [ASK], "prompt_id": 7, "prompt": "hi"}])
    [problem] = refused([source], folder).problems
    assert (problem.code, problem.found) == (
        "source-unusable",
        "unknown_field 1; the first is line 1: prompt, prompt_id",
    )
    assert "`ignore:`" in problem.fix
    [row] = Sources([{**source, "ignore": ["prompt", "prompt_id"]}], folder)
    assert messages_of(row) == [ASK]
    by_prompt = Sources([{**source, "ignore": ["messages", "prompt_id"]}], folder)
    assert [messages_of(row) for row in by_prompt] == [[ASK]]
    assert by_prompt.read == {"a.jsonl": {"layout": "prompt", "rows": 1}}
    [problem] = refused([{**source, "ignore": ["messages", "prompt"]}], folder).problems
    assert (problem.code, problem.found) == ("unknown-layout", "the fields prompt_id")


def test_an_input_of_alpaca_that_is_no_text_is_not_left_out_in_silence(folder: Path) -> None:
    rows = [{"instruction": "Add", "input": given} for given in ("1, 2", "", None, ["1", "2"], 12)]
    found = list(Sources([written(folder / "a.jsonl", rows)], folder))
    assert [getattr(row, "reason", "kept") for row in found] == [*["kept"] * 3, *["not_text"] * 2]


def test_roles_of_sharegpt_that_are_not_known_are_not_guessed_at(folder: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": name, "value": "x"}]}
        for name in ("gpt", "function_call", "bard", 7)
    ]
    found = list(Sources([written(folder / "a.jsonl", rows)], folder))
    assert [getattr(row, "reason", "kept") for row in found] == ["kept", *["unknown_role"] * 3]


def test_a_row_that_begins_with_an_answer_is_counted(folder: Path) -> None:
    rows = [
        {"conversations": [{"from": who, "value": "x"} for who in order]} for order in (["gpt", "human"], ["human"])
    ]
    found = list(Sources([written(folder / "a.jsonl", rows)], folder))
    assert [getattr(row, "reason", "kept") for row in found] == ["role_order", "kept"]


def test_text_in_parquet_that_is_not_utf8_makes_its_row_a_skipped_one(folder: Path) -> None:
    raw = pa.array([b"hi", b"\xff\xfe", b"you"])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"prompt": text}), folder / "a.parquet")
    track(folder / "a.parquet")
    found = list(Sources([{"file": "a.parquet"}], folder))
    assert [getattr(row, "reason", "kept") for row in found] == ["kept", "not_utf8", "kept"]


@pytest.mark.parametrize(
    "column", [pa.array([0, 2**62], pa.timestamp("us")), pa.array([0, 2**62], pa.duration("ms"))], ids=["date", "span"]
)
def test_a_value_in_parquet_that_python_has_not_makes_its_row_a_skipped_one(folder: Path, column: Any) -> None:
    pq.write_table(pa.table({"prompt": ["hi", "you"], "when": column}), folder / "a.parquet")
    track(folder / "a.parquet")
    found = list(Sources([{"file": "a.parquet", "ignore": ["when"]}], folder))
    assert [getattr(row, "reason", "kept") for row in found] == ["kept", "not_json"]


KINDS = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path.name),
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_named_as_a_file_and_is_none_is_never_opened(folder: Path, make: Callable[[Path], object]) -> None:
    """Reading a pipe would wait for ever, a device would never end."""
    make(folder / "a.jsonl")
    subprocess.run(["git", "add", "--force", "."], cwd=folder, check=True)
    problems = refused([{"file": "a.jsonl"}], folder).problems
    assert [problem.code for problem in problems if problem.code != "source-untracked"] == ["source-kind"]
    assert problems[0].expected == "a file, as sample.sources[0] says"


def test_a_file_that_is_named_as_a_folder_is_refused(folder: Path) -> None:
    name = written(folder / "a.jsonl", [{"prompt": "hi"}])["file"]
    [problem] = refused([{"folder": name}], folder).problems
    assert (problem.code, problem.found) == ("source-kind", "not a folder")


def test_what_is_no_parquet_file_is_refused(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1 nothing")
    track(folder / "a.parquet")
    assert refused([{"file": "a.parquet"}], folder).problems[0].code == "unreadable-source"


def test_a_file_without_rows_is_refused(folder: Path) -> None:
    [problem] = refused([written(folder / "a.jsonl", [])], folder).problems
    assert (problem.code, problem.found) == ("source-unusable", "no row")


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_every_line_of_any_file_gives_one_row(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = [line.replace(b"\n", b" ") for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert len(list(jsonl_rows(path))) == len(lines)


def test_faulty_lines_are_counted_and_the_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MAX_LINE_BYTES", 300_000)
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": [ASK]}).encode()
    long = b'{"prompt": "' + b"x" * 1_000_000 + b'"}'
    path.write_bytes(b"\n".join([good, b"", b"{", b"\xff\xfe", b"[" * 100_000, long, good]))
    found = [(key, raw.reason if isinstance(raw, Skipped) else "read") for key, raw in jsonl_rows(path)]
    reasons = ["read", "empty", "not_json", "not_utf8", "not_json", "not_json", "read"]
    assert found == [(f"line {number}", reason) for number, reason in enumerate(reasons, start=1)]


def test_rows_of_a_large_file_are_streamed(folder: Path) -> None:
    """Memory of Python and of Arrow while 40 MB of text go by, in row groups of 4 MB."""
    import tracemalloc

    rows = pa.table({"prompt": [f"{index} " + "x" * 20_000 for index in range(2_000)]})
    pq.write_table(rows, folder / "a.parquet", row_group_size=200)
    del rows
    track(folder / "a.parquet")
    tracemalloc.start()
    held = [pa.total_allocated_bytes() for _ in Sources([{"file": "a.parquet"}], folder)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == 2_000
    assert peak + max(held) < 20_000_000


def install(site: Path, rows: dict[str, list[dict[str, Any]]], unlisted: str = "") -> None:
    """The distribution chats 1.0 in a folder of sys.path, as pip leaves a wheel, but for `unlisted` in its RECORD."""
    info = site / "chats-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chats\nVersion: 1.0\n")
    for name, content in rows.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    listed = [*(name for name in rows if name != unlisted), "chats/__init__.py", "chats-1.0.dist-info/METADATA"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*listed, "chats-1.0.dist-info/RECORD"]))


CHATS = {"package": "chats", "version": "1.0"}
ALPACA, PROMPT = ({"instruction": "Add", "input": "1, 2"}, {"prompt": "hi", "rank": 1})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = {"chats/data/a.jsonl": [ALPACA, {}], "chats/b.jsonl": [PROMPT], "chats/c.json": [], "../up.jsonl": [PROMPT]}
    install(tmp_path / "site", {**rows, "chats/own.jsonl": [PROMPT]}, unlisted="chats/own.jsonl")
    pq.write_table(pa.Table.from_pylist([{"messages": [ASK, SAY]}]), tmp_path / "site/chats/data/d.parquet")
    with open(tmp_path / "site/chats-1.0.dist-info/RECORD", "a") as record:
        record.write("chats/data/d.parquet,,\n")
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps(PROMPT))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.usefixtures("site")
def test_row_files_inside_an_installed_package_are_read_as_files_are(folder: Path) -> None:
    files = ("chats/data/a.jsonl", "chats/b.jsonl", "chats/data/d.parquet")
    a, b, d = (CHATS | {"file": file} for file in files)
    sources = Sources([a | {"weight": 2.0}, b | {"ignore": ["rank"]}, d], folder)
    first, faulty, *others = sources
    assert messages_of(first) == [{"role": "user", "content": "Add\n\n1, 2"}]
    assert isinstance(faulty, Skipped)
    assert (faulty.source, faulty.key, faulty.reason) == ("chats:chats/data/a.jsonl", "line 2", "other_layout")
    assert [messages_of(row) for row in others] == [[ASK], [ASK, SAY]]
    assert sources.read == {
        "chats:chats/data/a.jsonl": {"layout": "alpaca", "rows": 2},
        "chats:chats/b.jsonl": {"layout": "prompt", "rows": 1},
        "chats:chats/data/d.parquet": {"layout": "messages", "rows": 1},
    }


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    "file",
    [
        *("chats/e.jsonl", "chats/c.json", "chats/__init__.py", "chats/data", "chats/own.jsonl"),
        *(
            "../up.jsonl",
            "../elsewhere.jsonl",
            "chats/../chats/b.jsonl",
            "/etc/passwd",
            "chats\\b.jsonl",
            "./chats/b.jsonl",
        ),
    ],
)
def test_what_is_no_row_file_of_the_package_is_refused_with_those_it_has(folder: Path, file: str) -> None:
    [problem] = refused([CHATS | {"file": file}], folder).problems
    assert (problem.code, problem.where) == ("unknown-file", "sample.sources[0]")
    assert problem.found == f"no {file} among the row files of chats 1.0"
    assert problem.expected == "chats/b.jsonl or chats/data/a.jsonl or chats/data/d.parquet"


def test_packages_that_are_not_there_of_another_version_or_without_their_file_are_refused_together(
    folder: Path, site: Path
) -> None:
    (site / "chats/b.jsonl").unlink()
    b = CHATS | {"file": "chats/b.jsonl"}
    problems = refused([b, b, b | {"version": "1.1"}, b | {"package": "chitchats"}, CHATS], folder).problems
    found = [(problem.code, problem.found) for problem in problems]
    assert found == [
        ("repeated-source", "chats:chats/b.jsonl again"),
        ("repeated-source", "chats:chats/b.jsonl again"),
        ("source-version", "chats 1.0 has no chats/b.jsonl"),
        ("source-version", "chats 1.0 has no chats/b.jsonl"),
        ("source-version", "chats 1.0 installed"),
        ("source-version", "chitchats is not installed"),
        ("unknown-package", "chats"),
    ]
    assert problems[4].fix == "pip install chats==1.1, or declare version 1.0"
    assert problems[6].fix.startswith("add file: chats/b.jsonl or chats/data/a.jsonl or chats/data/d.parquet, or put")


def test_a_saved_dataset_is_read_from_its_folder(folder: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list([{"messages": [ASK, SAY]}, {"messages": [ASK | {"content": "ho"}]}])
    data.save_to_disk(folder / "saved")
    track(folder / "saved")
    sources = Sources([{"folder": "saved", "weight": 2.5}], folder)
    rows = list(sources)
    assert [messages_of(row)[0]["content"] for row in rows] == ["hi", "ho"]
    assert {row.weight for row in rows if isinstance(row, Conversation)} == {2.5}
    assert sources.read == {"saved": {"layout": "messages", "rows": 2}}
    DatasetDict({"train": data}).save_to_disk(folder / "both")
    track(folder / "both")
    assert "splits ['train']" in refused([{"folder": "saved"}, {"folder": "both"}], folder).problems[0].found


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and the cache of `datasets` in `tmp_path`."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_a_dataset_in_the_cache_is_read_at_its_own_revision_alone(tmp_path: Path) -> None:
    """A cache as `datasets` 5.1.0 leaves it of org/chats at the commit 111..."""
    from datasets import load_dataset

    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [ASK, SAY]}))
    load_dataset("json", data_files=str(tmp_path / "rows.jsonl"))
    cached = tmp_path / "org___chats/default/0.0.0" / ("1" * 40)
    shutil.copytree(next(tmp_path.glob("json/*/*/*/dataset_info.json")).parent, cached)
    (cached / "json-train.arrow").rename(cached / "chats-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps({**info, "config_name": "default", "dataset_name": "chats"}))
    source = {"dataset": "org/chats", "revision": "1" * 40, "split": "train"}
    assert [messages_of(row) for row in Sources([source], tmp_path / "none")] == [[ASK, SAY]]
    [problem] = refused([source | {"revision": "0" * 40}], tmp_path / "none").problems
    assert problem.code == "other-revision"
    assert f"revision {'1' * 40} the newest" in problem.found


@pytest.mark.usefixtures("offline")
def test_a_dataset_of_the_hub_that_cannot_be_had_names_the_ways_out(tmp_path: Path) -> None:
    source = {"dataset": "org/chats", "revision": "0" * 40, "split": "train"}
    [problem] = refused([source], tmp_path).problems
    assert (problem.code, problem.where) == ("unreadable-source", "dataset org/chats")
    assert "{folder: NAME}" in problem.fix
