"""What one parameter may be: cerberus, made strict, and the rules that a record's fields carry.

Integers refuse booleans, floats refuse NaN and infinity, nothing lossy is coerced (cerberus' own `integer` and `float`
allow all of these); unknown and missing keys are named with the nearest known one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, field, fields
from typing import Any

from cerberus import TypeDefinition, Validator

from eagle3.problems import Problem

VERSION = r"^\d+(\.\d+)+([.+-]?[A-Za-z0-9.]+)?$"
JSONL = r"^[^/\\.][^/\\]*\.jsonl$"
COMMIT = r"^[0-9a-f]{40}$"
SHA256 = r"^[0-9a-f]{64}$"
# What a text of each pattern is, for people.
PATTERN_WORDS = {
    VERSION: "a version, e.g. 1.2.3, in quotes",
    JSONL: "the name of a file, NAME.jsonl, without its folder",
    COMMIT: "a commit: 40 hex digits",
    SHA256: "a sha256: 64 hex digits",
}
# The kinds of sources: what each must say, and what it may say beside that and weight.
SOURCE_FORMS: tuple[tuple[dict[str, str], set[str]], ...] = (
    ({"package": r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "version": VERSION}, set()),
    ({"package": r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "version": VERSION, "file": r"."}, {"ignore"}),
    ({"file": r"^[^/\\.][^/\\]*\.(jsonl|parquet)$"}, {"ignore"}),
    ({"folder": r"^[^/\\.][^/\\]*$"}, {"ignore"}),
    ({"dataset": r"^[\w.-]+/[\w.-]+$", "revision": COMMIT, "split": r"^[\w.-]+$"}, {"ignore", "config"}),
)


def _has_form(value: dict[Any, Any], required: dict[str, str], optional: set[str]) -> bool:
    return (
        set(required) <= set(value) <= {*required, *optional, "weight"}
        and all(isinstance(value[key], str) and re.match(pattern, value[key]) for key, pattern in required.items())
        and _is_weight(value.get("weight", 1))
        and isinstance(value.get("config", ""), str)
        and isinstance(ignore := value.get("ignore", []), list)
        and all(isinstance(name, str) for name in ignore)
    )


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


class StrictValidator(Validator):
    """cerberus with an `integer` that refuses booleans and a `float` that refuses NaN, infinity and booleans."""

    types_mapping = Validator.types_mapping | {
        "integer": TypeDefinition("integer", (int,), (bool,)),
        "number": TypeDefinition("number", (int, float), (bool,)),
    }

    def _check_with_finite(self, name: str, value: Any) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            self._error(name, f"must be a finite number, not {value}")

    def _check_with_ascending(self, name: str, value: Any) -> None:
        if isinstance(value, list) and all(type(item) is int for item in value) and value != sorted(set(value)):
            self._error(name, f"must ascend without repetition, e.g. {sorted(set(value))}")

    def _check_with_selection(self, name: str, value: Any) -> None:
        if value not in ("best", "last") and not (type(value) is int and value >= 0):
            self._error(name, "must be best, last or the number of an epoch (from 0)")

    def _check_with_source(self, name: str, value: Any) -> None:
        if not isinstance(value, dict) or not any(_has_form(value, *form) for form in SOURCE_FORMS):
            self._error(
                name,
                "must be {package: NAME, version: X.Y.Z}, with file: PATH for a file inside it, {file: NAME.jsonl or "
                "NAME.parquet}, {folder: NAME} or {dataset: OWNER/NAME, revision: 40 hex digits, split: NAME}, with "
                "weight (over 0), and ignore (a list of fields) and config where they apply; see sample.sources",
            )


def integer(minimum: int, maximum: int | None = None, nullable: bool = False) -> Any:
    rule: dict[str, Any] = {"type": "integer", "min": minimum, "nullable": nullable}
    return field(metadata=rule if maximum is None else {**rule, "max": maximum})


def number(minimum: float, maximum: float, nullable: bool = False) -> Any:
    return field(
        metadata={"type": "number", "min": minimum, "max": maximum, "nullable": nullable, "check_with": "finite"}
    )


def text(pattern: str | None = None, nullable: bool = False) -> Any:
    rule: dict[str, Any] = {"type": "string", "nullable": nullable, "empty": False}
    return field(metadata={**rule, "regex": pattern} if pattern else rule)


def choice(*allowed: str) -> Any:
    return field(metadata={"type": "string", "allowed": list(allowed)})


def flag(nullable: bool = False) -> Any:
    return field(metadata={"type": "boolean", "nullable": nullable})


def rule(**metadata: Any) -> Any:
    return field(metadata=metadata)


def section_schema(record: type) -> dict[str, Any]:
    """The cerberus schema of a section: the rules its fields carry; every key is required."""
    assert all(item.default is MISSING for item in fields(record)), "a parameter has no hidden default"
    return {item.name: {**item.metadata, "required": True} for item in fields(record)}


def rule_problems(raw: dict[str, Any], schema: dict[str, Any], where: str) -> list[Problem]:
    """What `schema` refuses in `raw`, which was read from the file `where`."""
    validator = StrictValidator(schema)
    return [] if validator.validate(raw) else list(_flattened(validator.errors, raw, schema, where))


def _flattened(errors: Any, raw: Any, schema: Any, where: str, prefix: str = "") -> Iterator[Problem]:
    """cerberus' nested lists of errors as problems with dotted paths."""
    for key, messages in errors.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        value = raw.get(key) if isinstance(raw, dict) else (raw[key] if isinstance(raw, list) else None)
        for message in messages:
            if isinstance(message, dict):
                inner = schema.get(key, {}).get("schema") if isinstance(schema, dict) else None
                yield from _flattened(message, value, inner or {}, where, path)
            elif message == "unknown field":
                near = difflib.get_close_matches(str(key), [str(name) for name in schema or ()], 1)
                fix = f"did you mean {near[0]}?" if near else "remove it"
                yield Problem("unknown-parameter", path, repr(value), "no such key", f"{fix} (in {where})")
            elif message == "required field":
                yield Problem("missing-parameter", path, "absent", "a value", f"add {path} to {where}")
            else:
                yield Problem(
                    "parameter", path, repr(value), _expected(message, schema, key), f"correct {path} in {where}"
                )


def _expected(message: str, schema: Any, key: Any) -> str:
    """cerberus names neither the values it allows nor what its patterns are."""
    if message.startswith("unallowed value"):
        return f"one of {', '.join(schema[key]['allowed'])}"
    return next((words for pattern, words in PATTERN_WORDS.items() if f"'{pattern}'" in message), message)
