"""The code that each stage really runs: transitive local imports, those inside functions included.

`python -m tests.code_deps` rewrites the code dependencies in dvc.yaml; tests/test_architecture.py proves them exact.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from eagle3.yaml12 import read_yaml

ROOT = Path(__file__).resolve().parents[1]
LOCAL = {"eagle3", "stages"}


def stages() -> dict[str, dict]:
    return read_yaml(ROOT / "dvc.yaml")["stages"]


def module_of(stage: dict) -> str:
    return stage["cmd"].split("-m ")[1].split()[0]


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports_of(path: Path) -> Iterator[str]:
    """Every module named by an import statement anywhere in the file, relative imports resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def closure(module: str) -> set[str]:
    """Every local file that importing `module` can run, the packages' __init__.py included."""
    seen: set[Path] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name.split(".")[0] not in LOCAL:
            continue
        for depth in range(1, name.count(".") + 2):
            path = file_of(".".join(name.split(".")[:depth]))
            if path and path not in seen:
                seen.add(path)
                todo.extend(imports_of(path))
    return {str(path.relative_to(ROOT)) for path in seen}


def rewrite() -> None:
    """Replace the `.py` lines under each `deps:` of dvc.yaml by the real ones, in alphabetical order."""
    found = {name: sorted(closure(module_of(stage))) for name, stage in stages().items()}
    lines, name, in_deps, deps = [], "", False, []
    for line in (ROOT / "dvc.yaml").read_text(encoding="utf-8").splitlines():
        if in_deps and line.startswith("      - "):
            if not line.endswith(".py"):
                deps.append(line.removeprefix("      - "))
            continue
        if in_deps:
            lines += [f"      - {dep}" for dep in sorted([*deps, *found[name]])]
            in_deps = False
        if line.startswith("  ") and not line.startswith("   ") and line.endswith(":"):
            name = line.strip().rstrip(":")
        if line == "    deps:" and name in found:
            in_deps, deps = True, []
        lines.append(line)
    (ROOT / "dvc.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    rewrite()
