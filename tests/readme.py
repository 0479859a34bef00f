"""The parts of README.md that are generated: the file tree of the library and the table of rules.

`python -m tests.readme` rewrites them between their markers; tests/test_readme.py proves them current.
"""

from __future__ import annotations

import ast
import re

from eagle3.checks.checkpoint_check import rule_rows
from tests.code_deps import ROOT
from tests.reruns import SECTIONS, leaves

README = ROOT / "README.md"


def first_line(path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].rstrip(".")


def file_tree() -> str:
    """The top modules, then each package with its docstring and its modules."""
    top = ROOT / "eagle3"
    lines = [_line(path, 4) for path in _modules(top)]
    for package in sorted(path.parent for path in top.glob("*/__init__.py")):
        lines += ["", f"    eagle3/{package.name + '/':<28} {first_line(package / '__init__.py')}"]
        lines += [_line(path, 6) for path in _modules(package)]
    return "\n".join(lines)


def _modules(folder) -> list:
    return sorted(path for path in folder.glob("*.py") if path.stem != "__init__")


def _line(path, indent: int) -> str:
    name = path.relative_to(ROOT) if indent == 4 else path.name
    return f"{' ' * indent}{name!s:<{39 - indent}} {first_line(path)}"


def rules_table() -> str:
    rows = [f"| {name} | {server} | {truth} | {source} |" for name, server, truth, source in rule_rows()]
    return "\n".join(["| rule | server | what must hold | source |", "|---|---|---|---|", *rows])


def rerun_table() -> str:
    known = leaves()
    rows = [f"| `{key}{'' if key in known else '.*'}` | {', '.join(stages)} |" for key, stages in SECTIONS.items()]
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
