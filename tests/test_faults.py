"""What may happen to a run: kills, a second run, edits, rot in the cache, another clock, user or place.

Real `dvc repro` on a repository with stand-ins (tests/stand_ins.py). The rounds of kills are few here; more of them:

    FAULT_ROUNDS=20 python -m pytest tests/test_faults.py -k kill
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eagle3.manifests import Manifest, verify_files
from eagle3.yaml12 import read_yaml
from tests.repository import set_params
from tests.stand_ins import command, light_repository, outputs, start, variables

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "2"))
STAGES = ("sample", "extract", "vocab-map", "train", "flatten", "validate-config", "simulate-weight-load", "serve-test")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = light_repository(tmp_path_factory.mktemp("finished"))
    command(folder, "dvc", "repro")
    command(folder, "git", "add", "-A")
    command(folder, "git", "commit", "-qm", "finished")
    return folder


@pytest.fixture(scope="module")
def reference(finished, tmp_path_factory) -> dict[str, bytes]:
    """The outputs with other parameters, from an undisturbed run."""
    folder = other_run(copy_of(finished, tmp_path_factory.mktemp("reference")))
    command(folder, "dvc", "repro")
    return outputs(folder)


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return copy_of(finished, tmp_path)


def copy_of(finished: Path, parent: Path) -> Path:
    folder = Path(shutil.copytree(finished, parent / "copy", symlinks=True))
    command(folder, "dvc", "checkout", "--relink", "-q")
    return folder


def other_run(folder: Path) -> Path:
    """Parameters with which every stage runs: the seed changes the data, head_dim the configs."""
    text = (folder / "params.yaml").read_text()
    assert "\nseed: 0\n" in text
    (folder / "params.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 1\n"))
    set_params(folder, {"draft": {"head_dim": 96}})
    return folder


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def session_of(leader: int) -> dict[int, str]:
    """The living processes that descend from a `start`ed command: it leads a session of their own."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def stage_of(leader: int, stage: str) -> int:
    module = f" -m stages.{stage.replace('-', '_')} "
    return next((pid for pid, line in session_of(leader).items() if module in line and "sh -c" not in line), 0)


def require_whole_or_absent(folder: Path) -> None:
    for stage in read_yaml(folder / "dvc.yaml")["stages"].values():
        for out in stage.get("outs", []):
            place = folder / (out if isinstance(out, str) else next(iter(out)))
            if place.exists() and place.name != "configs":
                manifest = Manifest(**json.loads((place / "manifest.json").read_text()))
                verify_files(place, manifest)


MENDED = ("cut-lock", "short-lock", "cut-rwlock", "rotten-list")


def mend_records(folder: Path) -> list[str]:
    """The codes of what doctor says of DVC's own files, after its remedies were run as a user would run them."""
    done = subprocess.run(
        ["python", "-m", "eagle3", "doctor", "--json"],
        **{"cwd": folder, "env": variables(folder), "text": True, "capture_output": True, "check": False},
    )
    found = [problem for problem in json.loads(done.stdout) if problem["code"] in MENDED]
    for problem in found:
        command(folder, "bash", "-c", problem["fix"].partition("; then: ")[0])
    return [problem["code"] for problem in found]


@pytest.mark.long
def test_a_cut_lock_is_named_and_mended_and_nothing_runs_again(copy, reference):
    """DVC empties dvc.lock and writes it again after each stage: a kill in between leaves any beginning of it."""
    other_run(copy)
    command(copy, "dvc", "repro")
    text = (copy / "dvc.lock").read_text()
    train = text.index("  train:")
    cuts = (
        ("cut-lock", 255, train + len("  train:")),
        ("short-lock", 0, train),
        ("cut-lock", 0, len(text) - 2),  # in the last size, which DVC compares with nothing
    )
    for code, status, length in cuts:
        (copy / "dvc.lock").write_text(text[:length])
        command(copy, "dvc", "repro", "--dry", status=status)
        assert mend_records(copy) == [code]
        assert "Running stage" not in command(copy, "dvc", "repro").stdout
        assert outputs(copy) == reference


# Every Python reads this module at its start. In the process of the stage that KILL names it kills that process or DVC,
# which leads the session: after some seconds, at the latest when the stage ends, or some seconds after its end.
KILLER = """
import atexit, os, signal, subprocess, sys, threading, time

stage, victim, moment, seconds = os.environ.get("KILL", "- - - 0").split()

def kill():
    os.kill(os.getpid() if victim == "stage" else os.getsid(0), signal.SIGKILL)

def kill_later():
    time.sleep(float(seconds))
    kill()

def have_killed():
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -9 {os.getsid(0)}"], start_new_session=True)

if "stages." + stage in sys.orig_argv:
    if moment == "during":
        threading.Thread(target=kill_later, daemon=True).start()
    atexit.register(kill if moment == "during" else have_killed)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize(("victim", "moment"), [("dvc", "during"), ("dvc", "after"), ("stage", "during")])
def test_a_kill_loses_nothing_and_leaves_nobody(copy, reference, victim, moment, number, tmp_path):
    other_run(copy)
    chance = random.Random(f"{victim}{moment}{number}")
    stage = (STAGES[number % 8] if number < 8 else chance.choice(STAGES)).replace("-", "_")
    kill = f"{stage} {victim} {moment} {chance.uniform(0, 1.0 if moment == 'during' else 0.2):.3f}"
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    dvc = start(copy, "dvc", "repro", STAND_IN_SECONDS="0.05", KILL=kill, PYTHONPATH=str(tmp_path))
    said = dvc.communicate(timeout=120)[0]
    assert dvc.returncode == (-signal.SIGKILL if victim == "dvc" else 255), f"{kill}\n{said}"
    wait_for(lambda: not session_of(dvc.pid), seconds=30)
    require_whole_or_absent(copy)
    faults = mend_records(copy)
    assert set(read_yaml(copy / "dvc.lock")["stages"]) == set(STAGES), faults
    command(copy, "dvc", "repro")
    assert outputs(copy) == reference, f"{kill} {faults=}"
    assert command(copy, "git", "status", "--porcelain", "--", "data").stdout == ""


def test_a_second_repro_is_refused_and_the_first_one_undisturbed(copy, reference):
    other_run(copy)
    first = start(copy, "dvc", "repro", STAND_IN_SECONDS="0.3")
    wait_for(lambda: stage_of(first.pid, "sample"))
    second = command(copy, "dvc", "repro", status=255)
    assert "is busy, it is being blocked by" in second.stderr
    assert str(first.pid) in second.stderr
    assert "Traceback" not in second.stderr
    said = first.communicate(timeout=300)[0]
    assert first.returncode == 0, said
    assert outputs(copy) == reference


def edit_code(folder: Path) -> None:
    with open(folder / "eagle3/manifests.py", "a") as file:
        file.write("# edited\n")


def edit_params(folder: Path) -> None:
    set_params(folder, {"extract": {"aux_layer_ids": [2, 15, 26]}})


@pytest.mark.parametrize("edit", [edit_code, edit_params])
def test_an_edit_while_a_stage_runs_fails_it_and_is_not_recorded(copy, edit):
    """DVC alone would record the edited input with the output that was made before (treeverse/dvc#11058)."""
    set_params(copy, {"extract": {"aux_layer_ids": [2, 15, 25]}})
    before = read_yaml(copy / "dvc.lock")
    dvc = start(copy, "dvc", "repro", "extract", STAND_IN_SECONDS="0.5")
    wait_for(lambda: list((copy / ".dvc/tmp/eagle3/extract").glob("*/out/data/hidden_states/shard-*")))
    edit(copy)
    said = dvc.communicate(timeout=120)[0]
    assert dvc.returncode == 255
    assert "ERROR inputs-changed: extract" in said
    assert read_yaml(copy / "dvc.lock") == before
    assert not (copy / "data/hidden_states").exists()
    command(copy, "dvc", "repro", "extract")
    made = json.loads((copy / "data/hidden_states/manifest.json").read_text())
    assert made["params"]["extract"]["aux_layer_ids"] == read_yaml(copy / "params.yaml")["extract"]["aux_layer_ids"]


def cache_faults(folder: Path) -> list[str]:
    objects = [path for path in (folder / ".dvc/cache/files/md5").rglob("*") if path.is_file()]
    assert objects
    return [
        str(path)
        for path in objects
        if hashlib.md5(path.read_bytes()).hexdigest() != path.parent.name + path.name.removesuffix(".dir")
    ]


def test_no_stage_writes_into_what_the_cache_shares(copy):
    """Outputs are hard links of read-only cache objects, into which root can write all the same."""
    shared = copy / "data/samples/samples.parquet"
    assert shared.stat().st_nlink > 1
    assert shared.stat().st_mode & 0o222 == 0
    other_run(copy)
    command(copy, "dvc", "repro")
    command(copy, "dvc", "repro", "--force")
    assert cache_faults(copy) == []


def rot(path: Path) -> None:
    """One flipped bit, and the times of the file as they were: nothing that DVC looks at has changed."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(status.st_mode & 0o777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("file", "reader", "parameter"),
    [
        ("data/samples/samples.parquet", "vocab-map", {"vocab_map": {"draft_vocab_size": 41}}),
        ("data/checkpoints/epoch_1/model-trained.safetensors", "flatten", {"flatten": {"select": 0}}),
    ],
)
def test_a_rotten_cache_object_is_named_by_the_stage_that_reads_it(copy, file, reader, parameter):
    before = outputs(copy)
    rot(copy / file)
    assert len(cache_faults(copy)) == 1, "the output is a link to the cache"
    set_params(copy, parameter)
    said = command(copy, "dvc", "repro", reader, status=255).stderr
    assert f"ERROR changed-file: {file}" in said
    assert "nothing was recorded" in said
    assert outputs(copy)["dvc.lock"] == before["dvc.lock"]
    remedy = re.search(r"fix: (find .*; rm -f \S+); then: (dvc repro \S+)", " ".join(said.split()))
    for line in remedy.groups():
        command(copy, "bash", "-c", line)
    command(copy, "dvc", "repro", reader)
    assert outputs(copy)[file] == before[file]
    assert cache_faults(copy) == []


@pytest.mark.long
def test_a_rotten_list_of_files_is_named_and_mended(copy):
    """DVC trusts its list of an output's files and would check out a file under another name."""
    before = outputs(copy)
    outs = read_yaml(copy / "dvc.lock")["stages"]["sample"]["outs"]
    md5 = next(out["md5"] for out in outs if out["path"] == "data/samples")
    listed = copy / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}"
    text = listed.read_text()
    listed.chmod(0o644)
    listed.write_text(text.replace("samples.parquet", "samples.parquev"))
    listed.chmod(0o444)  # what is read-only DVC believes without a look
    shutil.rmtree(copy / "data/samples")
    said = " ".join(command(copy, "dvc", "repro", "vocab-map", status=255).stderr.split())
    assert "ERROR changed-file: data/samples/samples.parquet found: no such file" in said
    remedy = re.search(r"fix: python -m eagle3 doctor; then: (dvc repro --force --single-item sample)", said)[1]
    assert "rotten-list" in mend_records(copy)
    command(copy, *remedy.split())
    command(copy, "dvc", "repro")
    assert outputs(copy) == before


def test_time_zone_locale_and_hash_seed_change_no_byte(copy, reference):
    other_run(copy)
    for path in copy.rglob("*.py"):
        os.utime(path, (2**31, 2**31))  # the clock was wrong, by years
    strange = {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "7", "LANG": "C"}
    command(copy, "dvc", "repro", "train", **strange)
    for path in (copy / ".dvc/tmp/eagle3").rglob("*"):
        os.utime(path, (0, 0))
    command(copy, "dvc", "repro", **{**strange, "TZ": "America/Adak", "PYTHONHASHSEED": "8"})
    assert outputs(copy) == reference


def test_a_clock_that_was_set_back_or_on_hides_no_edit_and_runs_nothing(copy):
    """Files of the future and of 1970: inputs, outputs, scratch, and DVC's and Git's records of them."""
    for number, path in enumerate(sorted(path for path in copy.rglob("*") if path.is_file())):
        os.utime(path, (2**32, 2**32) if number % 2 else (0, 0), follow_symlinks=False)
    assert "Running stage" not in command(copy, "dvc", "repro", TZ="Pacific/Kiritimati").stdout
    told = command(copy, "python", "-m", "eagle3", "plan", "--json", TZ="America/Adak").stdout
    assert {row["state"] for row in json.loads(told)} == {"unchanged"}
    code = copy / "stages/flatten.py"
    code.write_text(code.read_text() + "# a comment\n")
    os.utime(code, (1, 1))
    set_params(copy, {"serve_test": {"num_prompts": 8}})
    os.utime(copy / "params.yaml", (1, 1))
    rows = {row["stage"]: row for row in json.loads(command(copy, "python", "-m", "eagle3", "plan", "--json").stdout)}
    assert (rows["flatten"]["state"], rows["serve-test"]["state"]) == ("runs", "runs")
    ran = command(copy, "dvc", "repro", TZ="America/Adak").stdout
    assert re.findall(r"Running stage '([^']+)'", ran) == ["flatten", "serve-test"]


def test_a_path_with_blanks_quotes_and_other_scripts(finished, reference, tmp_path):
    folder = tmp_path / "ein Ordner, 空白 & \"quotes\" 'n' $HOME; #3"
    folder.mkdir()
    folder = other_run(copy_of(finished, folder))
    command(folder, "dvc", "repro")
    assert outputs(folder) == reference
    found = command(folder, "grep", "-rlF", "Ordner", "data", "reports", "dvc.lock", status=1)
    assert found.stdout == ""


# Root without its power over foreign files is a second user who can still read the interpreter.
SECOND_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]
OWNER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository to somebody else")


def give_away(folder: Path, mode: str) -> None:
    subprocess.run(["chown", "-R", f"{OWNER}:{os.getegid()}", str(folder)], check=True)
    subprocess.run(["chmod", "-R", mode, str(folder)], check=True)


def as_second_user(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    return subprocess.run(
        [*SECOND_USER, *words],
        **{"cwd": folder, "env": variables(folder, **trusted), "text": True, "capture_output": True, "check": False},
    )


@as_root
@pytest.mark.parametrize("stage", ["vocab_map", "flatten"])
def test_who_may_only_read_a_repository_is_told_so(copy, stage):
    before = outputs(copy)
    give_away(copy, "a+rX,go-w")
    done = as_second_user(copy, "python", "-m", f"stages.{stage}")
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("ERROR not-permitted: ")
    assert f"belongs to user {OWNER}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert outputs(copy) == before


@as_root
def test_a_second_user_of_a_shared_repository_can_run_it(copy, reference):
    """Cache objects stay read-only, and the first user's: a link to such a file may be refused, so it is copied."""
    command(copy, "dvc", "config", "cache.shared", "group")
    give_away(copy, "g+rwX")
    other_run(copy)
    done = as_second_user(copy, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert outputs(copy) == reference
