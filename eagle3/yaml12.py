"""YAML as DVC reads it: PyYAML's safe loader with the scalar rules of YAML 1.2's core schema.

DVC writes and compares params.yaml through ruamel.yaml, which follows YAML 1.2. PyYAML follows 1.1 and would read
`1e-05` (what `dvc exp run -S train.learning_rate=1e-5` writes) as a string, `010` as 8, `1:30` as 90 and `off` as
False, so that a stage would train with other values than DVC recorded.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from eagle3.problems import invalid


class CoreLoader(yaml.SafeLoader):
    """Safe types only; null, bool, int and float as in YAML 1.2.2 section 10.3.2; repeated keys are refused."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML declares it so


_SCALARS = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        # a bare fraction takes an exponent only with its sign: `.5e3` is a string to ruamel.yaml, so to DVC
        r"^(?:[-+]?(?:\.[0-9]+(?:[eE][-+][0-9]+)?|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)
for _name, _pattern, _first in _SCALARS:
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def _int(loader: CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, {"0o": 8, "0x": 16}.get(text.lstrip("+-")[:2], 10))


def _float(loader: CoreLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _mapping(loader: CoreLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


CoreLoader.add_constructor("tag:yaml.org,2002:int", _int)
CoreLoader.add_constructor("tag:yaml.org,2002:float", _float)
CoreLoader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """The value of one YAML document; `InvalidInput` names the line of a syntax error, a tag or a repeated key."""
    try:
        return yaml.load(text, Loader=CoreLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        found = getattr(error, "problem", None) or str(error)
        raise invalid("yaml", f"{where}{line}", found, "YAML 1.2 with plain values", f"edit {where}") from None


def read_yaml(path: Path) -> Any:
    """The value of a YAML file; a missing, unreadable or non-UTF-8 file is `InvalidInput`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid("unreadable", str(path), str(error), "a UTF-8 YAML file", f"create or repair {path}") from None
    return parse_yaml(text, str(path))
