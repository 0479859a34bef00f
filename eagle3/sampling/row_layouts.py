"""The layouts in which conversations are published, told apart by one field, and brought to one form.

messages    {"messages": [{"role", "content", ...}], "tools": [...]}        OpenAI, Hugging Face
sharegpt    {"conversations": [{"from": "human" | "gpt" | ..., "value"}]}   ShareGPT
alpaca      {"instruction", "input", "output"}                              Stanford Alpaca
questions   {"turns": ["first question", "second", ...]}                    FastChat's MT-bench files
prompt      {"prompt": "..."}                                               prompts alone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True)
class Layout:
    """name and the field that marks it; known: every field that may stand beside it (an id, or what is converted)."""

    name: str
    mark: str
    known: frozenset[str]
    convert: Callable[[dict[str, Any]], Any]


def layout_of(raw: Any) -> Layout | None:
    """The layout of one row, or None: the first whose mark the row has."""
    if not isinstance(raw, dict):
        return None
    return next((layout for layout in LAYOUTS if raw.get(layout.mark) is not None), None)


def as_messages(raw: Any, layout: Layout) -> tuple[Any, str]:
    """(a row of the layout `messages`, "") or (None, why this is no row of `layout`).

    An unknown field makes the row unusable: a field that is not understood may be the one that matters.
    """
    if not isinstance(raw, dict) or raw.get(layout.mark) is None:
        return None, f"no field {layout.mark!r}, which layout {layout.name} has"
    row = {name: value for name, value in raw.items() if value is not None}
    if unknown := sorted(map(str, set(row) - layout.known)):
        return None, ", ".join(unknown)[:200]
    return layout.convert(row), ""


def _from_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    said = row["conversations"]
    messages = [_sharegpt_message(item) for item in said] if isinstance(said, list) else said
    if "system" in row and isinstance(messages, list):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return {"messages": messages, "tools": row.get("tools")}


def _sharegpt_message(item: Any) -> Any:
    if not isinstance(item, dict) or not {"from", "value"} <= set(item):
        return item
    role = item["from"]
    other = {name: value for name, value in item.items() if name not in ("from", "value")}
    known = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": known, "content": item["value"], **other}


def _from_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    asked, given = row["instruction"], row.get("input", "")
    if not isinstance(given, str):
        asked = given  # no text, and counted as that
    elif isinstance(asked, str) and given.strip():
        asked = f"{asked}\n\n{given}"
    return {"messages": [*_message("system", row), {"role": "user", "content": asked}, *_message("output", row)]}


def _message(field: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    role = {"system": "system", "output": "assistant"}[field]
    return [{"role": role, "content": row[field]}] if row.get(field) not in (None, "") else []


def _from_questions(row: dict[str, Any]) -> dict[str, Any]:
    """Questions alone: a place for each answer stands between them, which only the verifier can fill."""
    turns = row["turns"]
    if not isinstance(turns, list):
        return {"messages": turns}
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [{"role": "assistant", "content": ""}] if messages else []
        messages.append({"role": "user", "content": turn})
    return {"messages": messages}


LAYOUTS = (
    Layout("messages", "messages", frozenset({"messages", "tools", "id"}), dict),
    Layout("sharegpt", "conversations", frozenset({"conversations", "system", "tools", "id"}), _from_sharegpt),
    Layout("alpaca", "instruction", frozenset({"instruction", "input", "output", "system", "id"}), _from_alpaca),
    Layout("questions", "turns", frozenset({"turns", "question_id", "category", "reference", "id"}), _from_questions),
    Layout(
        "prompt",
        "prompt",
        frozenset({"prompt", "id"}),
        lambda row: {"messages": [{"role": "user", "content": row["prompt"]}]},
    ),
)
