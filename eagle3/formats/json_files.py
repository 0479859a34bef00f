"""Strict JSON from files that anybody may have written: bounded, UTF-8, finite, with every repeated key remembered.

Python's `json` keeps the last of two equal keys, reads NaN, and answers deep nesting with RecursionError. The servers
read their configs with it, so a fault here is a fault that they would swallow.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eagle3.problems import InvalidInput, invalid

# Ten times the largest public config (a quantised model that lists every layer).
MAX_CONFIG_BYTES = 1 << 20
MAX_TEXT = 200


@dataclass(frozen=True)
class RepeatedKey:
    """A key that stands more than once in one JSON object; Python and both servers keep the last value."""

    where: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class JsonFile:
    """A JSON object read from `path`, and the keys that were written more than once in it."""

    path: Path
    value: dict[str, Any]
    repeated: tuple[RepeatedKey, ...]


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """A text of unknown origin as one short line of printable ASCII: no terminal escapes, no lone surrogates."""
    plain = "".join(char if " " <= char <= "~" else char.encode("unicode_escape").decode() for char in text[:limit])
    return plain if len(text) <= limit else plain + "…"


def spelled(value: object, limit: int = MAX_TEXT) -> str:
    """A value as JSON spells it (`true`, `null`, `"x"`), as one short line of printable ASCII."""
    try:
        return printable(json.dumps(value), limit)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> JsonFile:
    """The JSON object in `path`; `InvalidInput` for a file that is missing, not UTF-8, not JSON or not an object."""
    try:
        if not path.is_file():
            raise _refused(path, "no such file", "a JSON file")
        size = path.stat().st_size
        if size > limit:
            raise _refused(path, f"{size} bytes", f"at most {limit} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise _refused(path, error.strerror or str(error), "a readable JSON file") from None
    return parse_json_object(data, path)


def parse_json_object(data: bytes, path: Path) -> JsonFile:
    """The JSON object that `data`, the content of `path`, spells."""
    marks: dict[int, list[tuple[str, tuple[Any, ...]]]] = {}

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            spellings: dict[str, list[Any]] = {}
            for key, each in items:
                spellings.setdefault(key, []).append(each)
            # The dropped values stay referenced here, so that no id is used a second time.
            marks[id(value)] = [(key, tuple(values)) for key, values in spellings.items() if len(values) > 1]
        return value

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant, parse_float=_finite_float
        )
    except UnicodeDecodeError as error:
        raise _refused(path, f"not UTF-8 at byte {error.start}", "UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"not JSON: {error or 'nested too deeply'}", "one JSON object") from None
    if not isinstance(value, dict):
        raise _refused(path, f"a JSON {type(value).__name__}", "one JSON object")
    return JsonFile(path, value, tuple(_repeated(value, marks)))


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} does not fit a 64-bit float")
    return number


def _repeated(root: Any, marks: dict[int, list[tuple[str, tuple[Any, ...]]]]) -> list[RepeatedKey]:
    """Where each repeated key lies, found by a walk over the finished value (a hook does not know its path)."""
    found: list[RepeatedKey] = []
    todo = [(root, "")] if marks else []
    while todo:
        value, where = todo.pop()
        found += [RepeatedKey(_join(where, key), values) for key, values in marks.get(id(value), ())]
        children = value.items() if isinstance(value, dict) else enumerate(value)
        todo += [(child, _join(where, str(key))) for key, child in children if isinstance(child, (dict, list))]
    return found


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _refused(path: Path, found: str, expected: str) -> InvalidInput:
    return invalid(
        "unreadable-json", printable(path.name), printable(found), expected, f"repair {printable(path.name)}"
    )
