"""The guard around a stage, tried on a toy stage in a process of its own, as DVC starts one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.stage_guard import Declared
from tests.code_deps import ROOT

DVC_YAML = """\
stages:
  toy:
    cmd: python -m stages.toy
    deps: [in.txt, data/made]
    params: [engines.vllm, seed]
    outs: [data/toy]
"""
TOY = """\
import os, sys, time
from eagle3.stage_guard import run_stage

def run(stage):
    exec(open("body.py").read(), {"stage": stage})

sys.exit(run_stage("toy", run))
"""
PUBLISH = """
out = stage.out("data/toy")
out.mkdir(parents=True)
(out / "answer").write_text(str(stage.params.seed))
"""


@pytest.fixture
def toy(tmp_path):
    """A folder with one stage; `body.py` is what the stage does."""
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "in.txt").write_text("in")
    (tmp_path / "data/made").mkdir(parents=True)
    (tmp_path / "data/made/file").write_text("made")
    return tmp_path


def start(folder: Path, body: str, *arguments: str, **options) -> subprocess.Popen[str]:
    (folder / "body.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.pop("DVC_ROOT", None)
    command = [sys.executable, "toy.py", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes, **options)


def run(folder: Path, body: str, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, body, *arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def runs(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / ".dvc/tmp/eagle3/runs.jsonl").read_text().splitlines()]


def scratch(folder: Path) -> list[Path]:
    return [path for path in (folder / ".dvc/tmp/eagle3/toy").iterdir() if path.is_dir()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_outputs_appear_when_the_stage_has_succeeded(toy):
    status, _, err = run(toy, PUBLISH + 'stage.figures["tokens_per_second"] = 5.0')
    assert (status, err) == (0, "")
    assert (toy / "data/toy/answer").read_text() == "0"
    row = runs(toy)[0]
    assert (row["stage"], row["completed"], row["tokens_per_second"]) == ("toy", True, 5.0)
    assert row["peak_memory_bytes"] > 1 << 20


def test_peak_memory_is_that_of_all_processes_and_falls_with_none(toy):
    child = "import time; held = bytearray(b'x') * (300 << 20); time.sleep(1.5)"
    body = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {child!r}], check=True); time.sleep(1)"
    held = bytearray(b"x") * (600 << 20)  # Linux' getrusage hands the highest memory of a parent down
    assert run(toy, body)[0] == 0
    del held
    assert 300 << 20 < runs(toy)[0]["peak_memory_bytes"] < 500 << 20


def test_a_stage_that_fails_half_way_leaves_the_old_output(toy):
    assert run(toy, PUBLISH)[0] == 0
    status, _, err = run(toy, PUBLISH + '(out / "answer").write_text("half"); raise RuntimeError("broken")')
    assert status == 1
    assert "RuntimeError: broken" in err
    assert (toy / "data/toy/answer").read_text() == "0"
    assert [row["completed"] for row in runs(toy)] == [True, False]


DIES_REMOVING = """
import os, shutil
from pathlib import Path

def dying(path, *rest, **more):
    next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
    os._exit(9)

shutil.rmtree = dying
"""


def test_a_kill_while_the_old_output_is_removed_leaves_a_whole_one(toy):
    assert run(toy, PUBLISH + '(out / "more").write_text("more")')[0] == 0
    (toy / "params.yaml").write_text((toy / "params.yaml").read_text().replace("seed: 0", "seed: 1"))
    assert run(toy, PUBLISH + '(out / "more").write_text("more")' + DIES_REMOVING)[0] == 9
    assert {path.name: path.read_text() for path in (toy / "data/toy").iterdir()} == {"answer": "1", "more": "more"}
    assert run(toy, PUBLISH)[0] == 0
    assert [path.name for path in (toy / "data/toy").iterdir()] == ["answer"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_cycles_of_kills_lose_nothing():
    """A few of the thousand of `python -m benchmarks.guard_cycles`."""
    words = [sys.executable, "-m", "benchmarks.guard_cycles", "40"]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.stdout.endswith("nothing was lost\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "change",
    [
        'open("in.txt", "w").write("other")',
        'open("data/made/file", "w").write("other")',
        'text = open("params.yaml").read(); open("params.yaml", "w").write(text.replace("seed: 0", "seed: 1"))',
    ],
    ids=["file", "folder", "parameter"],
)
def test_inputs_that_change_while_the_stage_runs_fail_it_and_publish_nothing(toy, change):
    status, _, err = run(toy, PUBLISH + change)
    assert status == 1
    assert "ERROR inputs-changed: toy" in err
    assert "nothing was recorded" in err
    assert not (toy / "data/toy").exists()


def test_parameters_of_other_stages_may_change_meanwhile(toy):
    change = 'text = open("params.yaml").read(); open("params.yaml", "w").write(text.replace("epochs: 3", "epochs: 4"))'
    assert run(toy, PUBLISH + change)[0] == 0


def test_sigterm_unwinds_the_stage_and_never_ends_in_success(toy):
    body = 'try:\n    open("started", "w"); __import__("time").sleep(60)\nfinally:\n    open("unwound", "w")'
    process = start(toy, body)
    wait_for(toy / "started")
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert (toy / "unwound").exists()
    assert runs(toy)[0]["completed"] is False


def test_the_stage_dies_with_its_parent(toy):
    (toy / "body.py").write_text('open("pid", "w").write(str(__import__("os").getpid())); __import__("time").sleep(60)')
    parent_code = "import subprocess, sys; subprocess.run([sys.executable, 'toy.py'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", parent_code], cwd=toy, env=environment, stderr=subprocess.DEVNULL)
    wait_for(toy / "pid")
    time.sleep(0.2)
    pid = int((toy / "pid").read_text())
    assert alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_second_run_with_the_same_inputs_waits_and_then_finds_the_work_done(toy):
    body = (
        'done = stage.scratch / "done"\n'
        'print("found" if done.exists() else "works", flush=True)\n'
        'open("started", "w"); __import__("time").sleep(1); done.touch()'
    )
    first = start(toy, body)
    wait_for(toy / "started")
    second = start(toy, body)
    assert "works" in first.communicate(timeout=30)[0]
    out = second.communicate(timeout=30)[0]
    assert out.splitlines() == ["waiting for another run of this stage with the same inputs", "found"]


def test_scratch_survives_a_kill_and_belongs_to_its_inputs(toy):
    process = start(toy, '(stage.scratch / "shard").touch(); open("started", "w"); __import__("time").sleep(60)')
    wait_for(toy / "started")
    process.kill()
    process.communicate()
    assert run(toy, 'print((stage.scratch / "shard").exists())')[1] == "True\n"
    (toy / "in.txt").write_text("other")
    assert run(toy, 'print((stage.scratch / "shard").exists())')[1] == "False\n"


def test_scratch_of_old_inputs_is_dropped_but_the_newest_two(toy):
    for text in "abcde":
        (toy / "in.txt").write_text(text)
        assert run(toy, "")[0] == 0
    assert len(scratch(toy)) == 3


def test_a_full_disk_is_one_message_with_a_remedy(toy):
    status, _, err = run(toy, 'with open("/dev/full", "w") as file: file.write("x" * 100000)')
    assert status == 1
    assert "ERROR no-space" in err
    assert "dvc gc -w -a -T --all-experiments" in err
    assert "Traceback" not in err


def test_bad_input_is_a_message_and_no_traceback(toy):
    body = 'from eagle3.problems import invalid\nraise invalid("code", "where", "found", "expected", "fix")'
    status, _, err = run(toy, body)
    assert (status, "Traceback" in err) == (1, False)
    assert err.startswith("ERROR code: where\n")


def test_a_wrong_parameter_or_a_missing_dependency_stops_the_stage_before_it_starts(toy):
    (toy / "in.txt").unlink()
    status, _, err = run(toy, 'open("started", "w")')
    assert (status, "missing-input: in.txt" in err) == (1, True)
    (toy / "in.txt").write_text("in")
    (toy / "params.yaml").write_text((toy / "params.yaml").read_text().replace("seed: 0", "seed: x"))
    status, _, err = run(toy, 'open("started", "w")')
    assert (status, "ERROR parameter: seed" in err) == (1, True)
    assert not (toy / "started").exists()


def test_a_folder_of_another_stage_counts_by_its_manifest(toy):
    (toy / "data/made/manifest.json").write_text("{}")
    assert run(toy, 'open("data/made/file", "w").write("not what DVC made, but not looked at")')[0] == 0
    assert run(toy, 'open("data/made/manifest.json", "w").write("{ }")')[0] == 1


def test_an_undeclared_parameter_is_a_fault_of_the_stage(toy):
    _, _, err = run(toy, "stage.params.train")
    assert "AssertionError: the stage reads `train`, which its `params:` in dvc.yaml do not declare" in err
    assert "AssertionError" in run(toy, "stage.params.engines.speculators")[2]
    assert (
        run(toy, "print(stage.params.engines.vllm, stage.values)")[1]
        == "0.32.0 {'engines': {'vllm': '0.32.0'}, 'seed': 0}\n"
    )
    with pytest.raises(AssertionError):
        _ = Declared({}).seed


def test_scratch_lies_in_the_repository_that_dvc_names(toy, tmp_path_factory, monkeypatch):
    root = tmp_path_factory.mktemp("root")
    (toy / "body.py").write_text(PUBLISH)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DVC_ROOT": str(root)}
    assert subprocess.run([sys.executable, "toy.py"], cwd=toy, env=environment, check=False).returncode == 0
    assert (root / ".dvc/tmp/eagle3/toy").is_dir()
    assert not (toy / ".dvc").exists()
    assert (toy / "data/toy/answer").exists()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("-h", 0), ("data/other", 2)])
def test_a_stage_takes_no_arguments(toy, argument, status):
    code, out, _ = run(toy, "", argument)
    assert code == status
    assert out.startswith("usage: python -m stages.toy")
