"""Where conversations come from: files and folders in `data/conversations/`, installed packages, datasets of the hub.

Every file is named in `sample.sources` and tracked by Git or DVC; a package is pinned to its version, a dataset to its
commit. Rows are streamed: nothing here holds more than a batch of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.sampling.conversations import Row, Skipped, parse_row
from eagle3.sampling.named_files import file_problems
from eagle3.sampling.row_files import RawRow, dataset_rows, jsonl_rows, parquet_rows, saved_dataset_rows
from eagle3.sampling.row_layouts import LAYOUTS, Layout, as_messages, layout_of
from eagle3.yaml12 import read_yaml

FOLDER = Path("data/conversations")
KINDS = ("package", "file", "folder", "dataset")
OWN_LAYOUT = "its own"
ROW_FILES: dict[str, Callable[[Path], Iterator[RawRow]]] = {".jsonl": jsonl_rows, ".parquet": parquet_rows}
# Files of a package that are listed where another one is named.
MANY = 10
HOW_TO_NAME = "`- file: {0}` (or `- folder: {0}`, a saved dataset)"


@dataclass
class Sources:
    """The rows of `sample.sources`, in that order. read: name -> layout and rows read, complete after the last row.

    `InvalidInput` before the first row with all faulty sources at once, and where a source turns out to hold no known
    layout, or no row that can be used.
    """

    sources: Sequence[dict[str, Any]]
    folder: Path = FOLDER
    read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {
            source.get("file") or source["folder"]: f"sample.sources[{index}]"
            for index, source in enumerate(self.sources)
            if "package" not in source and "dataset" not in source
        }
        folders = [source["folder"] for source in self.sources if "folder" in source]
        problems = [
            *_repeated(self.sources),
            *_package_problems(self.sources),
            *file_problems(named, self.folder, "sample.sources", HOW_TO_NAME, folders),
        ]
        if problems:
            raise InvalidInput(*problems)

    def __iter__(self) -> Iterator[Row]:
        for source in self.sources:
            yield from _counted(_rows(source, self.folder, self.read), _name(source), self.read)


def _rows(source: dict[str, Any], folder: Path, read: dict[str, dict[str, Any]]) -> Iterator[Row]:
    name, weight = _name(source), float(source.get("weight", 1))
    if "package" in source and "file" not in source:
        read[name] = {"layout": OWN_LAYOUT}
        for key, raw in PACKAGES[name][1](_installed(source)):
            yield raw if isinstance(raw, Skipped) else parse_row(raw, name, key, weight)
        return
    layout: Layout | None = None
    ignored = source.get("ignore", ())
    for key, raw in _raw_rows(source, folder):
        if isinstance(raw, Skipped):
            yield replace(raw, source=name)
            continue
        if isinstance(raw, dict):
            raw = {field: value for field, value in raw.items() if field not in ignored}
        if layout is None:
            layout = _known_layout(raw, name, key)
            read[name] = {"layout": layout.name}
        row, why = as_messages(raw, layout)
        if row is None:
            yield Skipped(name, key, "unknown_field" if layout_of(raw) is layout else "other_layout", why)
        else:
            yield parse_row(row, name, key, weight)


def _raw_rows(source: dict[str, Any], folder: Path) -> Iterator[RawRow]:
    if "dataset" in source:
        return dataset_rows(source["dataset"], source.get("config"), source["split"], source["revision"])
    if "folder" in source:
        return saved_dataset_rows(folder / source["folder"])
    path = _installed(source) if "package" in source else folder / source["file"]
    return ROW_FILES[path.suffix](path)


def _known_layout(raw: Any, name: str, key: str) -> Layout:
    if layout := layout_of(raw):
        return layout
    fields = ", ".join(map(str, raw))[:200] if isinstance(raw, dict) else type(raw).__name__
    marks = ", ".join(f"{each.mark} ({each.name})" for each in LAYOUTS)
    raise invalid(
        "unknown-layout",
        f"{name}, {key}",
        f"the fields {fields}" if isinstance(raw, dict) else f"a {fields}",
        f"one of {marks}",
        "convert the rows to one of these; data/conversations/README.md shows each",
        "a guessed field would be asked, or trained on, as if it were the conversation",
    )


def _counted(rows: Iterator[Row], name: str, read: dict[str, dict[str, Any]]) -> Iterator[Row]:
    """The rows as they are; at their end, the refusal of a source without one that can be used."""
    reasons: Counter[str] = Counter()
    usable = 0
    first: Skipped | None = None
    for row in rows:
        if isinstance(row, Skipped):
            reasons[row.reason] += 1
            first = first or row
        else:
            usable += 1
        yield row
    read.setdefault(name, {"layout": "none"})["rows"] = usable + sum(reasons.values())
    if not usable:
        example = f"; the first is {first.key}: {first.detail}" if first else ""
        raise invalid(
            "source-unusable",
            name,
            (", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())) or "no row") + example,
            "conversations; a file is read as UTF-8 JSON lines, one row a line, or as Parquet where its name ends so",
            "name fields that can be left out under `ignore:` of this source, or mend the rows "
            "(data/conversations/README.md says what each reason means)",
        )


def _name(source: dict[str, Any]) -> str:
    """The name that ids, manifests and skipped.jsonl use; two splits of a dataset, or files of a package, are two."""
    name = str(next(source[kind] for kind in KINDS if kind in source))
    if "package" in source and "file" in source:
        return f"{name}:{source['file']}"
    return f"{name}:{source.get('config') or ''}:{source['split']}" if "dataset" in source else name


def chatterbot_rows(folder: Path) -> Iterator[RawRow]:
    """chatterbot-corpus: YAML files of question and answer(s); the English ones, the question alone is taken."""
    for path in sorted(folder.glob("*.yml")):
        for index, item in enumerate(read_yaml(path)["conversations"]):
            key = f"{path.name}:{index}"
            if isinstance(item, list) and item and isinstance(item[0], str):
                yield key, _one_turn(item[0])
            else:
                yield key, Skipped("chatterbot-corpus", key, "not_text", "the question is no text")


def chitchat_rows(path: Path) -> Iterator[RawRow]:
    """chitchat-dataset: a JSON of human chats; the messages with which the first sender opens, joined by newlines."""
    for key, chat in json.loads(path.read_text(encoding="utf-8")).items():
        if not chat["messages"] or not chat["messages"][0]:
            yield key, Skipped("chitchat-dataset", key, "empty", "a chat without messages")
            continue
        yield key, _one_turn("\n".join(message["text"] for message in chat["messages"][0]))


# distribution -> (its data inside site-packages, the reader)
PACKAGES: dict[str, tuple[str, Any]] = {
    "chatterbot-corpus": ("chatterbot_corpus/data/english", chatterbot_rows),
    "chitchat-dataset": ("chitchat_dataset/dataset.json", chitchat_rows),
}


def _one_turn(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _installed(source: dict[str, Any]) -> Path:
    """The file, or for `PACKAGES` the folder, in which the rows lie."""
    name = source["package"]
    return Path(str(distribution(name).locate_file(source.get("file") or PACKAGES[name][0])))


def _row_files(name: str) -> list[str]:
    """The files of an installed distribution that hold rows, as its own list of files names them."""
    paths = [path for path in distribution(name).files or () if path.suffix in ROW_FILES and ".." not in path.parts]
    return sorted(map(str, paths))


def _repeated(sources: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    names = [_name(source) for source in sources]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                "repeated-source", f"sample.sources[{index}]", f"{name} again", "each source once", "remove one of them"
            )


def _package_problems(sources: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        if "package" not in source:
            continue
        name, declared, file = source["package"], source["version"], source.get("file")
        where = f"sample.sources[{index}]"
        try:
            installed = distribution(name).version
        except PackageNotFoundError:
            installed = None
        if file is None and name not in PACKAGES:
            known = " or ".join(sorted(PACKAGES))
            yield Problem(
                "unknown-package",
                where,
                name,
                f"{known}, or `file:` with one of the files of the package",
                (f"add file: {_listed(name)}" if installed and _row_files(name) else f"name {known}")
                + f", or put the conversations into {FOLDER}/NAME.jsonl and name it as {{file: NAME.jsonl}}",
            )
        elif installed != declared:
            yield Problem(
                "source-version",
                where,
                f"{name} {installed or 'is not'} installed",
                f"{name} {declared}, as params.yaml declares",
                f"pip install {name}=={declared}" + (f", or declare version {installed}" if installed else ""),
                "another version may hold other conversations",
            )
        elif file is not None and file not in _row_files(name):
            yield Problem(
                "unknown-file",
                where,
                f"no {file} among the row files of {name} {installed}",
                _listed(name) or f"a {' or '.join(ROW_FILES)} file; this package has none",
                "name one of its files as they are spelled here" if _row_files(name) else f"remove {where}",
            )
        elif not (path := _installed(source)).exists() or (file is not None and not path.is_file()):
            yield Problem(
                "source-version",
                where,
                f"{name} {installed} has no {file or PACKAGES[name][0]}",
                "its data file",
                f"pip install --force-reinstall {name}=={declared}",
            )


def _listed(name: str) -> str:
    files = _row_files(name)
    return " or ".join(files[:MANY]) + (f" or {len(files) - MANY} others" if len(files) > MANY else "")
