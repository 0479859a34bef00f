"""Every folder of tests/bad_checkpoints and tests/good_checkpoints, through the command, its whole output compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.__main__ import main
from tests.code_deps import ROOT
from tests.drafts import write_sparse_tensors

BAD = sorted(path.parent for path in (ROOT / "tests/bad_checkpoints").glob("*/config.json"))
GOOD = sorted(path.parent for path in (ROOT / "tests/good_checkpoints").glob("*/config.json"))


def checkpoint(case: Path, folder: Path) -> list[str]:
    """The case as a checkpoint in `folder`, and the arguments that judge it."""
    (folder / "config.json").write_bytes((case / "config.json").read_bytes())
    weights = json.loads((case / "weights.json").read_text())
    write_sparse_tensors(
        folder / "model.safetensors", {name: (dtype, tuple(shape)) for name, (dtype, shape) in weights.items()}
    )
    own, engine = case / "verifier.json", case / "engine"
    return [
        "check",
        "--no-values",
        *(["--engine", engine.read_text().strip()] if engine.exists() else []),
        str(folder),
        "--verifier",
        str(own if own.exists() else case.parent / "verifier.json"),
    ]


@pytest.mark.parametrize("case", [*BAD, *GOOD], ids=lambda case: f"{case.parent.name}/{case.name}")
def test_the_output_is_the_expected_one(case, tmp_path, capsys):
    status = main(checkpoint(case, tmp_path))
    assert capsys.readouterr().out == (case / "expected.txt").read_text()
    assert status == (1 if case.parent.name == "bad_checkpoints" else 0)


@pytest.mark.parametrize("case", [BAD[0], GOOD[0]], ids=lambda case: case.name)
def test_the_command_says_the_same_as_data(case, tmp_path):
    arguments = [sys.executable, "-m", "eagle3", *checkpoint(case, tmp_path), "--json"]
    done = subprocess.run(arguments, cwd=ROOT, text=True, capture_output=True, check=False)
    found = json.loads(done.stdout)
    assert set(found) == {"verdict", "problems", "checked", "not_checked"}
    assert (done.returncode, found["verdict"]) == ((1, "error") if case is BAD[0] else (0, "warning"))
    keys = {"code", "severity", "where", "found", "expected", "consequence", "fix"}
    assert all(set(problem) == keys for problem in found["problems"])
    assert [problem["severity"] for problem in found["problems"]] == sorted(
        problem["severity"] for problem in found["problems"]
    )


@pytest.mark.parametrize("case", [*BAD, *GOOD], ids=lambda case: f"{case.parent.name}/{case.name}")
def test_every_case_is_in_the_list_of_its_folder(case):
    assert f"| `{case.name}` |" in (case.parent / "README.md").read_text()
