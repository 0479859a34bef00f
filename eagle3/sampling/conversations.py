"""Conversations from files and installed packages: read, counted, deduplicated, split; nothing is dropped unsaid.

A row gives one prompt: the system message, if any, and the first user message. Its split hangs on the hash of that
user message alone, so that the same question never lies on two sides.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from eagle3.atomic_files import sha256_of_json, write_text

SPLITS = ("train", "val", "eval")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """One usable row: messages are what its source said, roles checked, the first user message not blank."""

    source: str
    key: str
    messages: tuple[dict[str, str], ...]

    @cached_property
    def conversation_id(self) -> str:
        """20 hex digits over source and content: the same row has the same id in every run."""
        return sha256_of_json([self.source, list(self.messages)])[:20]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """What the verifier is asked: the messages up to the first user message."""
        return [dict(message) for message in self.messages[: self._first_user + 1]]

    @cached_property
    def opening_sha256(self) -> str:
        """The digest that decides split and order: of the normalised first user message."""
        return hashlib.sha256(normalised(self.messages[self._first_user]["content"]).encode()).hexdigest()

    @property
    def _first_user(self) -> int:
        return 0 if self.messages[0]["role"] == "user" else 1


@dataclass(frozen=True)
class Skipped:
    """A row (or `count` rows) that gave no sample, where it stood and why; reason is one of a few short words."""

    source: str
    key: str
    reason: str
    detail: str = ""
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


Row = Conversation | Skipped


def write_skipped(path: Path, skipped: Iterable[Skipped]) -> None:
    """One JSON object a line: source, key, reason, detail, count."""
    lines = [json.dumps(entry.as_dict(), sort_keys=True) for entry in skipped]
    write_text(path, "".join(f"{line}\n" for line in lines))


def parse_row(raw: Any, source: str, key: str) -> Row:
    """`{"messages": [{"role", "content"}, ...]}` as a conversation, or the reason why it is none.

    Roles: system (first only), user, assistant, tool; user comes first and does not follow user. Another role or field
    is never guessed at: a text with the wrong role would be trained on as an answer.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        return Skipped(source, key, "no_messages", f"{_kind(raw)} without a list under `messages`")
    if unknown := sorted(set(raw) - {"messages", "id"}):
        return Skipped(source, key, "unknown_field", ", ".join(unknown)[:200])
    if not raw["messages"]:
        return Skipped(source, key, "empty", "no message")
    for index, message in enumerate(raw["messages"]):
        if fault := _message_fault(message):
            reason, detail = fault
            return Skipped(source, key, reason, f"messages[{index}]: {detail}")
    roles = [message["role"] for message in raw["messages"]]
    if disorder := _order_fault(roles):
        return Skipped(source, key, "role_order", disorder)
    first = roles.index("user")
    if not raw["messages"][first]["content"].strip():
        return Skipped(source, key, "empty", "the first user message is blank")
    return Conversation(source, key, tuple(dict(message) for message in raw["messages"]))


def _message_fault(message: Any) -> tuple[str, str] | None:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        return "malformed_message", f"{_kind(message)}, not a mapping with role and content"
    if unknown := sorted(set(message) - {"role", "content"}):
        return "unknown_field", ", ".join(unknown)[:200]
    if message["role"] not in ROLES:
        return "unknown_role", repr(message["role"])[:100]
    if not isinstance(message["content"], str):
        return "not_text", f"content is {_kind(message['content'])}"
    if not _encodable(message["content"]):
        return "not_text", "content has a lone surrogate"
    return None


def _order_fault(roles: list[str]) -> str:
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns or turns[0] != "user":
        return f"{' '.join(roles[:4])}: the first message (after system) must be the user's"
    if "system" in turns:
        return "a system message that is not the first"
    if any(pair == ("user", "user") for pair in pairwise(turns)):
        return "two user messages in a row"
    return ""


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "a text", type(None): "null"}.get(type(value), type(value).__name__)


def read_jsonl(path: Path) -> Iterator[Row]:
    """One row a line; a line that is blank, not UTF-8 or not JSON is a skipped row with its number."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            key = f"line {number}"
            if not line.strip():
                yield Skipped(path.name, key, "empty", "a blank line")
                continue
            try:
                raw = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield Skipped(path.name, key, "not_utf8", f"byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield Skipped(path.name, key, "not_json", str(error)[:200] or type(error).__name__)
            else:
                yield parse_row(raw, path.name, key)


def normalised(text: str) -> str:
    """What counts as the same question: compatibility caseless (Unicode 3.13, D146), white space runs as one space."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold()).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def split_of(opening_sha256: str, val_percent: int, eval_percent: int) -> str:
    """The split of a first user message: the hash cuts [0, 100) at eval_percent and eval_percent + val_percent."""
    place = int(opening_sha256[:16], 16) * 100 / 2**64
    return "eval" if place < eval_percent else "val" if place < eval_percent + val_percent else "train"


def without_duplicates(conversations: Iterable[Conversation]) -> tuple[list[Conversation], list[Skipped]]:
    """The first conversation of each normalised first user message, and the others as skipped."""
    kept: dict[str, Conversation] = {}
    skipped = []
    for row in conversations:
        first = kept.setdefault(row.opening_sha256, row)
        if first is not row:
            skipped.append(Skipped(row.source, row.key, "duplicate", f"of {first.source}, {first.key}"))
    return list(kept.values()), skipped


def within_budget(
    conversations: Iterable[Conversation], split: str, maximum: int
) -> tuple[list[Conversation], list[Skipped]]:
    """At most `maximum` conversations, the lowest hashes first; the surplus is one skipped entry a source."""
    ordered = sorted(conversations, key=lambda row: row.opening_sha256)
    surplus = Counter(row.source for row in ordered[maximum:])
    skipped = [
        Skipped(source, f"split {split}", "over_budget", f"sample.max_{split}: {maximum}", count)
        for source, count in sorted(surplus.items())
    ]
    return ordered[:maximum], skipped
