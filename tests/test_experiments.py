"""Experiments by the real `dvc exp`: in the workspace, in a temporary folder, queued, failed, shared and compared."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from eagle3.plans.compare import HEAD, experiment_seconds
from eagle3.yaml12 import read_yaml
from tests.stand_ins import command, light_repository, start, variables

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
RESTORE = (("git", "checkout", "params.yaml", "dvc.lock", "reports"), ("dvc", "checkout"))


def run(folder: Path, *words: str, status: int | None = 0) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=variables(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert status is None or done.returncode == status, f"{words} exited {done.returncode}\n{done.stdout[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A bare repository, and a home folder: the committed remote lies in it."""
    folder = tmp_path_factory.mktemp("shared")
    command(folder, "git", "init", "-q", "--bare", "origin.git")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        yield folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, origin):
    folder = light_repository(tmp_path_factory.mktemp("repository"))
    (folder / "machine.yaml").write_text("cpu_threads: 1\n")
    # the stand-in of sample reads no sources; here it refuses them as the stage does
    sample, head = folder / "stages/sample.py", "def run(stage: Stage) -> None:\n"
    refusal = "    Sources(stage.params.sample.sources)\n"
    text = f"from eagle3.sampling.conversation_sources import Sources\n{sample.read_text()}"
    sample.write_text(text.replace(head, head + refusal))
    run(folder, "dvc", "repro", "-q")
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "The first draft")
    run(folder, "git", "remote", "add", "origin", str(origin / "origin.git"))
    run(folder, "git", "push", "-q", "-u", "origin", "HEAD")
    return folder


@pytest.fixture
def clean(finished):
    """The workspace as it was committed, whatever a test leaves behind."""
    yield finished
    for words in RESTORE:
        run(finished, *words)


def is_as_committed(folder: Path) -> bool:
    return run(folder, "git", "status", "--short") == "" and "up to date" in run(folder, "dvc", "status")


def test_in_the_workspace_the_result_is_applied_and_can_be_compared(clean):
    told = run(clean, "dvc", "exp", "run", "-S", "draft.head_dim=96", "-n", "wide")
    assert "machine.yaml -> cpu_threads=1" in told
    assert "Running stage 'extract'" not in told
    assert read_yaml(clean / "params.yaml")["draft"]["head_dim"] == 96
    assert "acceptance_length" in run(clean, "dvc", "metrics", "diff")
    assert "draft.head_dim" in run(clean, "dvc", "params", "diff")
    run(clean, "dvc", "plots", "diff", "HEAD", "-o", "dvc_plots")
    assert "reports/loss.csv" in (clean / "dvc_plots/index.html").read_text()
    for words in RESTORE:
        run(clean, *words)
    assert is_as_committed(clean), "the two commands that the README names bring everything back"


def test_a_temporary_one_leaves_the_workspace_alone_and_finds_the_machine(clean):
    """It shares scratch, cache and machine.yaml with the repository it was started in, and nothing else."""
    told = run(clean, "dvc", "exp", "run", "--temp", "-S", "train.learning_rate=1e-5", "-n", "slow")
    assert f"machine: {clean}/machine.yaml -> cpu_threads=1" in told
    assert "Running stage 'extract'" not in told, "restored from the run cache"
    assert is_as_committed(clean)
    shown = json.loads(run(clean, "dvc", "exp", "show", "--json"))
    rates = {
        revision["name"]: revision["data"]["params"]["params.yaml"]["data"]["train"]["learning_rate"]
        for experiment in shown[1]["experiments"]
        for revision in experiment["revs"]
    }
    assert rates["slow"] == 1e-5, "a number, though DVC writes 1e-05"


def test_a_queued_one_runs_the_code_that_was_queued(clean):
    run(clean, "dvc", "exp", "run", "--queue", "-S", "train.epochs=2", "-n", "short")
    code = clean / "eagle3/atomic_files.py"
    good = code.read_text()
    code.write_text("raise RuntimeError('the live workspace')\n")
    try:
        told = run(clean, "dvc", "exp", "run", "--run-all", "-j", "1")
    finally:
        code.write_text(good)
    assert "the live workspace" not in told
    assert "short" in run(clean, "dvc", "exp", "list", "--name-only")


def test_an_untracked_conversation_file_is_refused_in_both(clean):
    (clean / "data/conversations/mine.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    setting = "sample.sources=[{file: tiny.jsonl}, {file: mine.jsonl}]"
    try:
        assert "tracked by neither Git nor DVC" in run(clean, "dvc", "exp", "run", "-S", setting, status=None)
        for words in RESTORE:
            run(clean, *words)
        assert "source-absent" in run(clean, "dvc", "exp", "run", "--temp", "-S", setting, status=None)
    finally:
        (clean / "data/conversations/mine.jsonl").unlink()


def test_a_failed_one_is_undone_by_the_two_commands_that_it_says(clean):
    with open(clean / "README.md", "a") as file:
        file.write("an edit that has nothing to do with it\n")
    told = run(clean, "dvc", "exp", "run", "-S", "flatten.select=9", "-n", "broken", status=255)
    assert "no-epoch" in told
    said = " && ".join(" ".join(words) for words in RESTORE)
    assert f"it comes back as committed with: {said}" in told
    for words in RESTORE:
        run(clean, *words)
    assert run(clean, "git", "status", "--short") == " M README.md\n"
    run(clean, "git", "checkout", "README.md")
    assert is_as_committed(clean)


def test_a_killed_one_leaves_a_detached_head_and_the_remedy_is_said(clean):
    """DVC 3.67 detaches HEAD for the time of an experiment; commits after a kill would belong to no branch."""
    process = start(clean, "dvc", "exp", "run", "-S", "train.ttt_steps=2", STAND_IN_SECONDS="0.5")
    deadline = time.monotonic() + 120
    while not list((clean / ".dvc/tmp/eagle3/train").glob("*/out/data")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    told = json.loads(run(clean, "python", "-m", "eagle3", "doctor", "--json", status=None))
    fix = next(problem["fix"] for problem in told if problem["code"] == "detached-head")
    run(clean, *fix.partition("   ")[0].split())
    assert run(clean, "git", "symbolic-ref", "HEAD")
    run(clean, "git", "reset", "-q")
    for words in RESTORE:
        run(clean, *words)
    assert is_as_committed(clean)


def test_a_failed_temporary_one_says_that_the_workspace_is_as_it_was(clean):
    told = run(clean, "dvc", "exp", "run", "--temp", "-S", "flatten.select=9", "-n", "broken", status=None)
    assert "no-epoch" in told
    assert "the workspace is as it was" in told
    assert is_as_committed(clean)


def test_it_is_pushed_pulled_applied_and_made_a_branch(clean, origin, tmp_path):
    run(clean, "dvc", "exp", "run", "--temp", "-S", "flatten.select=1", "-n", "second")
    run(clean, "dvc", "exp", "push", "origin", "second")
    assert (origin / "home/.local/share/eagle3/storage/files").is_dir(), (
        "a relative url is taken from / by this command"
    )
    run(tmp_path, "git", "clone", "-q", str(origin / "origin.git"), "other")
    other = tmp_path / "other"
    run(other, "dvc", "exp", "pull", "origin", "second")
    run(other, "dvc", "exp", "apply", "second", status=None)
    assert read_yaml(other / "params.yaml")["flatten"]["select"] == 1
    run(other, "dvc", "pull", "-q", "serve-test")
    assert json.loads((other / "data/release/manifest.json").read_text())["decisions"]["epoch"] == 1
    run(other, "git", "checkout", "-q", ".")
    run(other, "dvc", "exp", "branch", "second", "chosen")
    assert "chosen" in run(other, "git", "branch", "--list", "chosen")


def test_compare_shows_what_differs_and_what_came_of_it(clean):
    told = run(clean, "python", "-m", "eagle3", "compare").splitlines()
    assert told[0].split() == " ".join(HEAD).split()
    slow = next(line for line in told if line.startswith("slow"))
    assert "train.learning_rate=1e-05" in slow
    assert "head_dim" not in slow
    assert len(slow.split()) >= 6, "name, acceptance length, speed-up, loss, bytes, time, differences"
    assert told[-1].startswith("workspace")


def test_the_clean_columns_of_the_readme(clean):
    words = ("dvc", "exp", "show", "--only-changed", "--drop", "^(data|stages|eagle3|reports)/.*", "--md")
    head = run(clean, *words).splitlines()[0]
    assert "train.learning_rate" in head
    assert "eagle3/" not in head
    assert "data/" not in head


def test_experiments_of_an_earlier_commit_are_compared_too(clean):
    run(clean, "git", "commit", "-q", "--allow-empty", "-m", "The work goes on")
    told = [line.split()[0] for line in run(clean, "python", "-m", "eagle3", "compare").splitlines()[1:]]
    assert {"slow", "short", "second", "workspace"} <= set(told)
    assert len(told) == len(set(told)), "each of them once"


def test_seconds_are_summed_by_experiment_and_a_broken_line_is_passed_over(tmp_path):
    rows = [{"experiment": "a", "seconds": 1.5}, {"experiment": "a", "seconds": 2}, {"seconds": 9}, {"experiment": ""}]
    lines = [json.dumps({"stage": "train", "completed": True, **row}) for row in rows if "seconds" in row]
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines, json.dumps(rows[-1]), '{"experiment": "a", "sec']))
    assert experiment_seconds(tmp_path / "runs.jsonl") == {"a": 3.5}
    assert experiment_seconds(tmp_path / "none") == {}
