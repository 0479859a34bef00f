"""What a kill leaves is named: dvc.lock cut anywhere, whether DVC refuses it or takes it for a shorter one; HEAD."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml
from dvc.schema import COMPILED_LOCKFILE_SCHEMA
from dvc.utils.serialize import dump_yaml, parse_yaml

from eagle3.__main__ import main
from eagle3.plans.kill_faults import kill_faults
from tests.code_deps import ROOT

STAGES = {
    "sample": {"cmd": "python -m stages.sample", "deps": ["a.py"], "params": ["seed"], "outs": ["data/samples"]},
    "train": {
        "cmd": "python -m stages.train",
        "deps": ["b.py", "data/samples"],
        "params": ["seed", "train"],
        "outs": ["data/checkpoints"],
        "metrics": [{"reports/train.json": {"cache": False}}],
    },
}


def file(path: str) -> dict:
    md5, many = "0123456789abcdef" * 2, {} if "." in path else {"nfiles": 12}
    return {"path": path, "hash": "md5", "md5": md5 + (".dir" if many else ""), "size": 12345, **many}


def entry(name: str) -> dict:
    stage = STAGES[name]
    outs = [*stage["outs"], *(next(iter(metric)) for metric in stage.get("metrics", []))]
    values = {"seed": 0, **({"train": {"epochs": 3, "warm_start": None}} if name == "train" else {})}
    files = {"deps": list(map(file, stage["deps"])), "params": {"params.yaml": values}, "outs": list(map(file, outs))}
    return {"cmd": stage["cmd"], **files}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A repository with a committed dvc.lock as DVC writes it, and the outputs of both stages."""
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": STAGES}))
    dump_yaml(tmp_path / "dvc.lock", {"schema": "2.0", "stages": {name: entry(name) for name in STAGES}})
    for folder in ("data/samples", "data/checkpoints", "reports"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "reports/train.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    git("add", "dvc.lock")
    git("-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "-qm", "made")
    return tmp_path


def git(*words: str) -> None:
    subprocess.run(["git", *words], check=True)


def codes() -> list[str]:
    return [problem.code for problem in kill_faults()]


def dvc_takes(text: str) -> bool:
    try:
        COMPILED_LOCKFILE_SCHEMA(parse_yaml(text, "dvc.lock"))
    except Exception:
        return False
    return True


def test_a_cut_anywhere_is_named_and_the_whole_lock_is_not(here):
    """Before, inside and at the end of every line."""
    text = (here / "dvc.lock").read_text()
    assert codes() == []
    taken, ends = 0, [place for place, letter in enumerate(text) if letter == "\n"]
    cuts = sorted({0, *(place + more for place in ends for more in (-5, -1, 0, 1))} - {len(text)})
    for length in cuts:
        (here / "dvc.lock").write_text(text[:length])
        found = list(kill_faults())
        assert len(found) == 1, text[:length]
        assert found[0].fix.startswith("git checkout HEAD dvc.lock; then: dvc repro")
        if dvc_takes(text[:length]):
            taken += 1
        else:
            assert found[0].code == "cut-lock", "a warning alone would let DVC stop"
    assert taken > len(cuts) / 2, "most cuts are a shorter lock to DVC"
    git("checkout", "-q", "HEAD", "dvc.lock")
    assert codes() == []


def test_a_lock_that_was_never_committed_is_to_be_made_anew(here):
    text = (here / "dvc.lock").read_text()
    git("update-ref", "-d", "HEAD")
    assert codes() == []
    (here / "dvc.lock").write_text(text[:-1])
    assert next(kill_faults()).fix.startswith("rm dvc.lock; then: dvc repro")
    (here / "dvc.lock").write_text(text[: text.index("  train:")])
    assert codes() == [], "the first run may have come so far: nothing tells the two apart"


def test_a_cut_lock_that_was_committed_is_no_remedy(here):
    (here / "dvc.lock").write_text((here / "dvc.lock").read_text()[:200])
    git("add", "dvc.lock")
    git("-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "-qm", "cut")
    assert next(kill_faults()).fix.startswith("rm dvc.lock; then: dvc repro")


def test_a_stage_that_was_removed_or_has_no_output_here_is_not_missed(here):
    text = (here / "dvc.lock").read_text()
    (here / "dvc.lock").write_text(text[: text.index("  train:")])
    assert codes() == ["short-lock"]
    (here / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"sample": STAGES["sample"]}}))
    assert codes() == []
    (here / "dvc.yaml").write_text(yaml.safe_dump({"stages": STAGES}))
    (here / "data/checkpoints").rmdir()
    (here / "reports/train.json").unlink()
    assert codes() == []


def test_an_output_that_dvc_yaml_has_got_since_is_not_missed(here):
    (here / "dvc.yaml").write_text(yaml.safe_dump({"stages": {**STAGES, "more": {"cmd": "x", "outs": ["data/more"]}}}))
    assert codes() == []


def test_the_list_of_running_commands_cut_short_is_named(here):
    (here / ".dvc/tmp").mkdir(parents=True)
    for text, expected in (("", ["cut-rwlock"]), ('{"write": {"a', ["cut-rwlock"]), ("{}", [])):
        (here / ".dvc/tmp/rwlock").write_text(text)
        assert codes() == expected


def test_a_head_that_a_killed_experiment_left_detached_is_named(here):
    branch = subprocess.run(
        ["git", "branch", "--show-current"], text=True, capture_output=True, check=True
    ).stdout.strip()
    git("update-ref", "refs/exps/exec/EXEC_HEAD", "HEAD")
    assert codes() == [], "experiments leave refs"
    git("checkout", "-q", "--detach")
    assert codes() == [], "a detached HEAD of one's own"
    git("checkout", "-q", branch)
    head = subprocess.run(["git", "rev-parse", "HEAD"], text=True, capture_output=True, check=True).stdout.strip()
    git("checkout", "-q", head)  # as DVC does it
    assert codes() == ["detached-head"]
    assert next(kill_faults()).fix.startswith(f"git checkout {branch} ")


def test_plan_stops_at_a_cut_lock_and_goes_on_with_a_short_one(here, capsys):
    text = (here / "dvc.lock").read_text()
    shutil.copyfile(ROOT / "params.yaml", here / "params.yaml")
    (here / "dvc.lock").write_text(text[:-1])
    assert main(["plan"]) == 1
    told = capsys.readouterr()
    assert "ERROR cut-lock: dvc.lock" in told.err
    assert told.out == ""
    (here / "dvc.lock").write_text(text[: text.index("  train:")])
    assert main(["plan", "--json"]) == 0
    told = capsys.readouterr()
    assert "WARNING short-lock: dvc.lock" in told.err
    assert [row["stage"] for row in json.loads(told.out)] == ["sample", "train"]
