"""Conversations: messages with their roles, what is skipped and why, and the hash that decides split and order.

The split hangs on the hash of the first user message alone, so that the same question never lies on two sides.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from eagle3.atomic_files import sha256_of_json

SPLITS = ("train", "val", "eval")
Message = dict[str, Any]
# role -> the fields a message may have beside role and content
ROLES: dict[str, frozenset[str]] = {
    "system": frozenset(),
    "user": frozenset(),
    "assistant": frozenset({"tool_calls", "reasoning", "reasoning_content"}),
    "tool": frozenset({"name", "tool_call_id"}),
}
MAY_FOLLOW = {"user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"tool", "assistant"}}


@dataclass(frozen=True)
class Conversation:
    """One usable row: messages are what its source said, roles checked, the first user message not blank.

    tools: the functions that the verifier is offered, as its chat template takes them. weight: that of its source.
    """

    source: str
    key: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    weight: float = 1.0

    @cached_property
    def conversation_id(self) -> str:
        """20 hex digits over source and content: the same row has the same id in every run."""
        tools = [list(self.tools)] if self.tools else []
        return sha256_of_json([self.source, list(self.messages), *tools])[:20]

    @property
    def prompt(self) -> list[Message]:
        """What the verifier is asked first: the messages up to the first user message."""
        return [dict(message) for message in self.messages[: self._first_user + 1]]

    @property
    def opening(self) -> str:
        """The first user message."""
        return str(self.messages[self._first_user]["content"])

    @cached_property
    def opening_sha256(self) -> str:
        """The digest that decides split and order: of the normalised first user message."""
        return hashlib.sha256(normalised(self.opening).encode()).hexdigest()

    @property
    def _first_user(self) -> int:
        return 0 if self.messages[0]["role"] == "user" else 1

    @property
    def answer_places(self) -> list[int]:
        """Positions at which the assistant speaks: of its messages, and of the one that is to come at the end."""
        places = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return places if self.messages[-1]["role"] == "assistant" else [*places, len(self.messages)]


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


class SkippedFile:
    """`skipped.jsonl`, one JSON object a line, written as rows are skipped; by_reason counts them."""

    def __init__(self, path: Path) -> None:
        self.by_reason: Counter[str] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by the context)

    def __enter__(self) -> SkippedFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, entry: Skipped) -> None:
        self.by_reason[entry.reason] += entry.count
        self._file.write(json.dumps(entry.as_dict(), sort_keys=True) + "\n")


def parse_row(raw: Any, source: str, key: str, weight: float = 1.0) -> Row:
    """`{"messages": [{"role", "content"}, ...]}` as a conversation, or the reason why it is none.

    Roles: system (first only), user, assistant, tool; user comes first, then they take turns. Another role or field
    is never guessed at: a text with the wrong role would be trained on as an answer. Fields that are null count as
    absent (Parquet gives every message every field).
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        return Skipped(source, key, "no_messages", f"{_kind(raw)} without a list under `messages`")
    if unknown := sorted(map(str, set(raw) - {"messages", "tools", "id"})):
        return Skipped(source, key, "unknown_field", ", ".join(unknown)[:200])
    messages = [_without_nulls(message) for message in raw["messages"]]
    if not messages:
        return Skipped(source, key, "empty", "no message")
    for index, message in enumerate(messages):
        if fault := _message_fault(message):
            reason, detail = fault
            return Skipped(source, key, reason, f"messages[{index}]: {detail}")
    if disorder := _order_fault([message["role"] for message in messages]):
        return Skipped(source, key, "role_order", disorder)
    tools = raw.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools) or not _encodable(tools):
        return Skipped(source, key, "malformed_tools", "tools is no list of mappings")
    conversation = Conversation(source, key, tuple(map(_as_server_renders, messages)), tuple(tools), weight)
    if not conversation.opening.strip():
        return Skipped(source, key, "empty", "the first user message is blank")
    return conversation


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    if kept.get("role") == "assistant" and kept.get("tool_calls") and kept.get("content") is None:
        kept["content"] = ""  # a message that only calls a tool
    return kept


def _message_fault(message: Any) -> tuple[str, str] | None:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        return "malformed_message", f"{_kind(message)}, not a mapping with role and content"
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        return "unknown_role", repr(role)[:100]
    if unknown := sorted(map(str, set(message) - {"role", "content"} - ROLES[role])):
        return "unknown_field", ", ".join(unknown)[:200]
    if not all(isinstance(value, str) for name, value in message.items() if name != "tool_calls"):
        return "not_text", f"content is {_kind(message['content'])}, or another field is no text"
    if not _encodable(message):
        return "not_text", "content has a lone surrogate"
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_tool_call, calls)):
        return "malformed_tools", "a tool call without a function's name and an object of arguments"
    return None


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and _arguments(function) is not None


def _arguments(function: dict[str, Any]) -> dict[str, Any] | None:
    """Tool-call arguments as an object; the OpenAI format writes them as JSON text, which may hold a lone surrogate."""
    given = function.get("arguments") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) and _encodable(given) else None


def _as_server_renders(message: Message) -> Message:
    """The message as vLLM hands it to a chat template.

    vLLM 0.32.0, vllm/renderers/chat_utils.py: arguments as an object, no empty list of calls, reasoning under both
    names (`_postprocess_messages`, `_parse_chat_message_content`).
    """
    shown = dict(message)
    if calls := shown.pop("tool_calls", None):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}} for call in calls
        ]
    reasoning = shown.pop("reasoning", None) or shown.pop("reasoning_content", None)
    return {**shown, "reasoning": reasoning, "reasoning_content": reasoning} if reasoning else shown


def _order_fault(roles: list[str]) -> str:
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns or turns[0] != "user":
        return f"{' '.join(roles[:4])}: the first message (after system) must be the user's"
    if "system" in turns:
        return "a system message that is not the first"
    for before, after in pairwise(turns):
        if after not in MAY_FOLLOW[before]:
            return f"{before}, then {after}"
    return ""


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        return False
    return True


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "a text", type(None): "null"}.get(type(value), type(value).__name__)


def normalised(text: str) -> str:
    """What counts as the same question: compatibility caseless (Unicode 3.13, D146), white space runs as one space."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold()).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def split_bounds(val_percent: int, eval_percent: int) -> dict[str, tuple[int, int]]:
    """Where the hash cuts [0, 100): eval first, then val, then train, so that the shares can grow from one side."""
    return {
        "eval": (0, eval_percent),
        "val": (eval_percent, eval_percent + val_percent),
        "train": (eval_percent + val_percent, 100),
    }


def split_of(opening_sha256: str, val_percent: int, eval_percent: int) -> str:
    """The split of a first user message."""
    place = _place(opening_sha256)
    return "eval" if place < eval_percent else "val" if place < eval_percent + val_percent else "train"


def turn_in_line(opening_sha256: str, weight: float, bounds: tuple[int, int]) -> tuple[float, str]:
    """What conversations of one split are ordered by; the lowest are taken.

    An exponential race (Efraimidis and Spirakis, 2006): -log(1 - u) / weight of the hash's place u in its split, so
    that of two sources a conversation of weight 2 is twice as likely to be taken, a larger budget only adds
    conversations, and with equal weights the order is that of the hashes.
    """
    begin, end = bounds
    place = (_place(opening_sha256) - begin) / (end - begin)
    return -math.log1p(-min(place, 1 - 2**-53)) / weight, opening_sha256


def _place(opening_sha256: str) -> float:
    return int(opening_sha256[:16], 16) * 100 / 2**64
