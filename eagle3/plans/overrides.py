"""`-S section.key=value`, as `dvc exp run` takes it, applied to raw parameters without writing a file."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from eagle3.formats.json_files import printable
from eagle3.params import parse_params
from eagle3.problems import InvalidInput, Problem
from eagle3.yaml12 import parse_yaml

Json = dict[str, Any]


def override(raw: Json, settings: list[str]) -> Json:
    """A changed copy, validated; `InvalidInput` names every setting that is no `key=value` of a known key."""
    changed, problems = copy.deepcopy(raw), []
    for setting in settings:
        key, equals, text = setting.partition("=")
        *parents, last = key.split(".")
        section = changed
        for parent in parents:
            section = section.get(parent, {}) if isinstance(section, dict) else {}
        if not equals or not isinstance(section, dict) or last not in section:
            problems.append(_unknown(setting, key, raw))
        else:
            section[last] = parse_yaml(text, f"-S {printable(setting)}")
    if problems:
        raise InvalidInput(*problems)
    parse_params(changed, "params.yaml with -S" if settings else "params.yaml")
    return changed


def _unknown(setting: str, key: str, raw: Json) -> Problem:
    known = [f"{section}.{name}" for section, value in raw.items() if isinstance(value, dict) for name in value]
    near = difflib.get_close_matches(key.lstrip("+~"), [*known, "seed"], 1)
    fix = f"did you mean {near[0]}?" if near else "look the key up in params.yaml"
    return Problem("override", f"-S {printable(setting)}", printable(key), "a key of params.yaml, =, a value", fix)
