"""What is left behind beside the shards, and which disk must have room for what: on file systems mounted for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from eagle3.problems import InvalidInput
from eagle3.states.shard_file import ShardFile
from eagle3.states.shard_scratch import bytes_to_clean, check_sizes, require_space, scratch_in_use
from tests.code_deps import ROOT
from tests.test_disk_full import mounts
from tests.test_extract_stage import make_repository, set_params
from tests.test_hidden_states import A, B, C, fill, plan

EIGHT_DAYS = 8 * 24 * 3600


def test_leftovers_of_a_killed_run_are_removed_and_a_shard_in_work_is_not(tmp_path):
    ((one,), (other,)) = plan(A), plan(B)
    leftover = tmp_path / f".{other.name}.partial-0123"
    leftover.write_bytes(b"")
    with ShardFile(tmp_path / one.name, one) as file, scratch_in_use(tmp_path, [other]):
        assert file.path.exists()
    assert not leftover.exists()
    assert (tmp_path / one.name).exists()


def test_shards_of_other_inputs_are_removed_after_a_week(tmp_path):
    ((current,), (old,), (new,)) = plan(A), plan(B), plan(C)
    for shard in (current, old, new):
        fill(tmp_path, shard)
    for shard in (current, old):
        os.utime(tmp_path / shard.name, (0, time.time() - EIGHT_DAYS))
    with scratch_in_use(tmp_path, [old, current]), scratch_in_use(tmp_path, [current]) as missing:
        assert missing == []
    assert {path.name for path in tmp_path.glob("shard-*")} == {current.name, old.name, new.name}
    with scratch_in_use(tmp_path, [current]):
        assert {path.name for path in tmp_path.glob("shard-*")} == {current.name, new.name}


def test_a_shard_of_another_length_is_refused(tmp_path):
    (shard,) = plan(A)
    fill(tmp_path, shard)
    os.truncate(tmp_path / shard.name, 100)
    with pytest.raises(InvalidInput, match=r"found: +100 bytes"):
        check_sizes(tmp_path, [shard])


def test_a_disk_too_small_is_refused_with_the_sum(tmp_path):
    shard = replace(plan(A)[0], hidden_size=10**14)
    with pytest.raises(InvalidInput) as error:
        require_space(tmp_path, [shard], [shard])
    assert "(3 tokens of 600000000000000 bytes are 1800000.00 GB: 3 states" in error.value.problems[0].expected


def test_what_will_be_cleaned_counts_as_free_and_what_has_a_second_name_does_not(tmp_path):
    ((current,), (old,), (other,)) = plan(A), plan(B), plan(C)
    (tmp_path / f".{other.name}.partial-0123").write_bytes(bytes(8192))
    fill(tmp_path, old)
    os.utime(tmp_path / old.name, (0, time.time() - EIGHT_DAYS))
    with ShardFile(tmp_path / current.name, current):
        before = bytes_to_clean(tmp_path, [])
        assert before >= 8192 + old.num_bytes
        os.link(tmp_path / old.name, tmp_path / "in the cache")
        assert before - bytes_to_clean(tmp_path, []) >= old.num_bytes
        (tmp_path / "in the cache").unlink()
        with scratch_in_use(tmp_path, [other]):  # a week has passed
            assert not (tmp_path / old.name).exists()
        assert bytes_to_clean(tmp_path, []) == 0


def test_while_a_run_is_at_work_no_whole_shard_counts_as_free(tmp_path):
    ((old,), (current,)) = plan(A), plan(B)
    fill(tmp_path, old)
    with scratch_in_use(tmp_path, [current]):
        assert bytes_to_clean(tmp_path, [current]) == 0
    assert bytes_to_clean(tmp_path, [current]) >= old.num_bytes


def in_a_namespace(folder, script):
    """Run it with mounts of its own, which are gone when it ends; what it printed."""
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", MOUNTS + script],
        **{"cwd": folder, "text": True, "capture_output": True, "check": False},
        env={name: value for name, value in os.environ.items() if not name.startswith("DVC_")} | {"PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


MOUNTS = """
import os, shutil, subprocess, sys
from pathlib import Path
from eagle3.states.shard_scratch import LOW_WATER_BYTES, space_problems, writings

PAGE = os.sysconf("SC_PAGE_SIZE")

def mount(path, size=2 * LOW_WATER_BYTES):
    Path(path).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", path], check=True)

def leave(folder, num_bytes):
    "Reserve all but so many bytes there, rounded up to pages."
    ballast = Path(folder, "ballast")
    ballast.unlink(missing_ok=True)
    ballast.touch()
    with open(ballast, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - -(-num_bytes // PAGE) * PAGE)
"""


@mounts
@pytest.mark.parametrize(
    ("mounted", "expected"),
    [
        ([], {"scratch": 10}),
        (["data"], {"scratch": 20, "data": 100}),
        ([".dvc/cache"], {"scratch": 10, ".dvc/cache": 10}),
        (["scratch"], {"scratch": 10, "data": 100}),
        (["scratch", "data"], {"scratch": 10, "data": 100, ".dvc/cache": 10}),
        (["scratch", "data", ".dvc/cache"], {"scratch": 10, "data": 100, ".dvc/cache": 10}),
    ],
    ids=str,
)
def test_each_file_system_takes_what_is_written_there(tmp_path, mounted, expected):
    """10 bytes of 100 are still to be made. Where nothing is mounted, all is one file system."""
    for name in ("scratch", "data", ".dvc/cache"):
        (tmp_path / name).mkdir(parents=True)
    script = f"""
for name in {mounted!r}:
    mount(name)
print({{str(one.where): one.num_bytes for one in writings(Path("scratch"), 10, 100)}})
"""
    assert in_a_namespace(tmp_path, script) == f"{expected}\n"


@mounts
def test_two_mounts_of_one_file_system_take_copies_from_one_pool(tmp_path):
    """As a container has them: the device number is the same, and Linux links and moves nothing across."""
    for name in ("scratch", "data", ".dvc"):
        (tmp_path / name).mkdir()
    script = """
subprocess.run(["mount", "--bind", "data", "data"], check=True)
print([one.num_bytes for one in writings(Path("scratch"), 10, 100)])
"""
    assert in_a_namespace(tmp_path, script) == "[120]\n"


@mounts
def test_every_disk_is_judged_to_the_page(tmp_path):
    (tmp_path / ".dvc").mkdir()
    script = """
mount("scratch")
mount("data")
for scratch, data in ((0, 0), (-PAGE, 0), (0, -PAGE), (-PAGE, -PAGE)):
    leave("scratch", LOW_WATER_BYTES + 10_000 + scratch)
    leave("data", LOW_WATER_BYTES + 100_000 + data)
    print(*(problem.where for problem in space_problems(Path("scratch"), 10_000, 100_000, "so many")))
leave("scratch", LOW_WATER_BYTES + 10_000 - PAGE)
leave("data", LOW_WATER_BYTES + 100_000)
print(*(problem.where for problem in space_problems(Path("scratch"), 10_000, 100_000, "so many", freed=PAGE)))
print(*(problem.where for problem in space_problems(Path("scratch"), 0, 0, "so many")))
"""
    assert in_a_namespace(tmp_path, script) == "\nscratch\ndata\nscratch data\n\n\n"


GC = """
from dataclasses import dataclass
from eagle3.problems import InvalidInput
from eagle3.states.shard_scratch import bytes_to_clean, scratch_in_use

@dataclass
class Planned:
    name: str
    num_bytes: int
    num_tokens = bytes_per_token = num_states = hidden_size = 1
    store_dtype = "bfloat16"

def dvc(*words):
    subprocess.run(["dvc", *words, "-q"], check=True)

def has_room():
    try:
        with scratch_in_use(scratch, [Planned("shard-new.safetensors", 48 << 20)]):
            return True
    except InvalidInput as error:
        assert "dvc gc -w -a -T --all-experiments" in error.problems[0].fix, error
        return False

def free():
    return shutil.disk_usage(".").free >> 20

mount("disk")
os.chdir("disk")
dvc("init", "--no-scm")
dvc("config", "cache.type", "hardlink")
scratch, data = Path("scratch"), Path("data")
scratch.mkdir()
data.mkdir()
old = scratch / "shard-old.safetensors"
old.write_bytes(bytes(64 << 20))
os.link(old, data / old.name)
dvc("add", "data")
assert old.stat().st_nlink == 3, "scratch, data and cache"
shutil.rmtree(data)
data.mkdir()
(data / "other").write_bytes(b"other inputs")
dvc("add", "data")
leave(".", LOW_WATER_BYTES + (32 << 20))
before = free()
assert not has_room() and old.exists(), "it has a second name, in the cache"
dvc("gc", "-w", "-f")
assert free() == before and old.stat().st_nlink == 1, "dvc gc alone frees nothing"
with scratch_in_use(scratch, [Planned("shard-small.safetensors", 1)]):
    assert not has_room() and old.exists(), "another run is at work"
assert bytes_to_clean(scratch, []) == 64 << 20
assert has_room() and not old.exists()
print(free() - before)
"""


@mounts
def test_the_room_that_the_message_advises_to_make_is_made(tmp_path):
    """Old shards of 64 MiB in scratch, data and DVC's cache, and a disk that is 16 MiB too small for the next ones."""
    assert in_a_namespace(tmp_path, GC) == "64\n"


# The real stage and `estimate`, which know nothing of each other, on data/ and scratch of their own.
BOTH = """
from eagle3.params import read_params
from eagle3.plans.estimate import estimate, shortages

def codes():
    return [(one.code, one.where) for one in shortages(needs(), 1 << 60) if one.severity == "error"]

def needs():
    return estimate(read_params(), None)

def stage():
    done = subprocess.run([sys.executable, "-m", "stages.extract"], text=True, capture_output=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())

shutil.copytree("data", "kept")
mount(".dvc/tmp/eagle3")
mount("data")
shutil.copytree("kept", "data", dirs_exist_ok=True)
home, extract = Path(".dvc/tmp/eagle3").absolute(), needs()[0]
(home / "extract").mkdir()
for short in (home / "extract", Path("data")):
    for folder, num_bytes in ((home, extract.disk), (Path("data"), extract.output)):
        leave(folder, LOW_WATER_BYTES + num_bytes + (-PAGE if str(short).startswith(str(folder)) else 1 << 20))
    assert codes() == [("no-space", str(short))], codes()
    status, said = stage()
    assert status == 1 and f"ERROR no-space: {short} " in said, said
    assert not Path("data/hidden_states").exists() and not list(home.glob("extract/*shard-*"))
for folder, num_bytes in ((home, extract.disk), (Path("data"), extract.output)):
    leave(folder, LOW_WATER_BYTES + num_bytes + (1 << 20))
assert codes() == [], codes()
status, said = stage()
assert status == 0, said
assert needs()[0].disk == 0 and needs()[0].output == extract.output
print(extract.disk == extract.output == sum(path.stat().st_size for path in Path("data").rglob("shard-*")))
"""


@mounts
@pytest.mark.engine
@pytest.mark.long
def test_estimate_refuses_where_the_stage_does(tmp_path):
    folder = make_repository(tmp_path)
    set_params(folder, vocab_map={"draft_vocab_size": 128})
    assert in_a_namespace(folder, BOTH) == "True\n"
