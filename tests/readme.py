"""The parts of README.md that are generated: the file tree of the library and the table of rules.

`python -m tests.readme` rewrites them between their markers; tests/test_readme.py proves them current.
"""

from __future__ import annotations

import ast
import re

from eagle3.checkpoint_check import rule_rows
from tests.code_deps import ROOT
from tests.test_rerun_table import TABLE

README = ROOT / "README.md"


def first_line(path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].rstrip(".")


def file_tree() -> str:
    files = sorted((ROOT / "eagle3").glob("*.py"))
    return "\n".join(f"    eagle3/{path.name:<28} {first_line(path)}" for path in files if path.stem != "__init__")


def rules_table() -> str:
    rows = [f"| {name} | {truth} | {source} |" for name, truth, source in rule_rows()]
    return "\n".join(["| rule | what must hold | source |", "|---|---|---|", *rows])


def rerun_table() -> str:
    rows = [f"| `{path}` | {', '.join(stages)} |" for path, _, stages in TABLE]
    last = ["| a comment in `stages/flatten.py` | flatten |", "| back to an earlier value | none: restored |"]
    return "\n".join(["| change | stages that run |", "|---|---|", *rows, *last])


def generated(text: str) -> str:
    """`text` with every generated part made anew."""
    for name, make in (("files", file_tree), ("rules", rules_table), ("reruns", rerun_table)):
        pattern = rf"(<!-- {name}: generated -->\n\n)(.*?)(\n\n<!-- end -->)"
        text, count = re.subn(pattern, lambda match, make=make: match[1] + make() + match[3], text, flags=re.DOTALL)
        assert count == 1, name
    return text


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
