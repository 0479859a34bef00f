"""machine.yaml: facts of this machine, never of a result, so DVC does not track the file.

It is looked up at `$DVC_ROOT` first, since a temporary experiment runs in a folder that has no copy of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from eagle3.params import StrictValidator, integer, section_schema
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.yaml12 import read_yaml


@dataclass(frozen=True)
class Machine:
    """null everywhere = what is visible: every GPU, else the CPU with all its cores."""

    tensor_parallel_size: int | None = integer(1, nullable=True)
    cpu_threads: int | None = integer(1, nullable=True)
    kv_cache_gib: int | None = integer(1, nullable=True)


DEFAULT = Machine(**{item.name: None for item in fields(Machine)})


def read_machine(root: Path | None = None) -> Machine:
    """The machine's settings; says which file was used and what was taken from it."""
    path = (root or Path(os.environ.get("DVC_ROOT", "."))) / "machine.yaml"
    if not path.exists():
        print(f"machine: no {path.name}, taking everything visible", flush=True)
        return DEFAULT
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise invalid("machine", str(path), f"a {type(raw).__name__}", "a mapping", f"edit or remove {path}")
    schema = section_schema(Machine)
    validator = StrictValidator({name: {**rule, "required": False} for name, rule in schema.items()})
    if not validator.validate(raw):
        raise InvalidInput(
            *(
                Problem("machine", f"{path}: {key}", repr(raw.get(key)), "; ".join(map(str, found)), f"edit {path}")
                for key, found in validator.errors.items()
            )
        )
    machine = Machine(**{item.name: raw.get(item.name) for item in fields(Machine)})
    print(f"machine: {path} -> {', '.join(f'{key}={value}' for key, value in raw.items()) or 'empty'}", flush=True)
    return machine
