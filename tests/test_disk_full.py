"""A disk that fills up, really: each writing stage on a file system of a few pages, and DVC around it.

`unshare` gives a command mounts of its own, which are gone when it ends. Where that is not allowed (some containers),
the limit on the size of a file (RLIMIT_FSIZE) still makes the same writes fail.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.code_deps import ROOT
from tests.stand_ins import command, light_repository, outputs, variables

SCRATCH = ".dvc/tmp/eagle3"
PAGE = 4096
# The bodies of sample, extract, train and serve-test are stand-ins.
STAGES = ("sample", "extract", "vocab-map", "train", "flatten", "validate-config", "simulate-weight-load", "serve-test")
MESSAGE = (
    r"ERROR no-space: (\S+) found: (No space left on device|File too large); [\d.]+ MiB free there expected: "
    r"room for what is written there fix: make room .* then run it again {stage}: failed; nothing was recorded "
)
MAY_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
mounts = pytest.mark.skipif(not MAY_MOUNT, reason="this user may not mount a file system")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = light_repository(tmp_path_factory.mktemp("finished"))
    command(folder, "dvc", "repro")
    return folder


def on_small_disk(folder: Path, size: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command whose scratch is a file system with room for `size` bytes."""
    mount = (
        f'mount -t tmpfs -o size={size + PAGE} small {SCRATCH} && head -c {PAGE} /dev/zero >{SCRATCH}/one && exec "$@"'
    )
    return run(folder, "unshare", "-rm", "sh", "-c", mount, "sh", *words)


def with_small_files(folder: Path, size: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that may write no file longer than `size` bytes."""
    return run(folder, *words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))


def run(folder: Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=variables(folder), text=True, capture_output=True, check=False, **options
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("limited", [pytest.param(on_small_disk, marks=mounts), with_small_files])
def test_a_stage_without_room_says_so_and_leaves_everything_as_it_was(finished, limited, stage):
    """The room grows until the stage has enough, so that many of its writes are once the one that fails."""
    before = outputs(finished)
    shutil.rmtree(finished / SCRATCH)
    (finished / SCRATCH).mkdir()
    named = []
    for pages in (0, 1, 2, 4, 8, 14, 25, 50, 1000):
        done = limited(finished, pages * PAGE, "python", "-m", f"stages.{stage.replace('-', '_')}")
        if done.returncode == 0:
            break
        said = re.fullmatch(MESSAGE.format(stage=stage), re.sub(r"\s+", " ", done.stderr))
        assert said, done.stderr
        named.append(said[1].removeprefix(f"{finished}/"))
        assert outputs(finished) == before
    assert named, "there was room from the start"
    assert all(name.startswith((SCRATCH, "reports/", "data/")) for name in named)
    assert done.returncode == 0
    assert outputs(finished) == before, "the same inputs give the same bytes"


@mounts
@pytest.mark.parametrize("stage", ["extract", "flatten"])
def test_a_stage_publishes_across_two_mounts_of_one_file_system(finished, stage):
    """As a container has them: data/ and .dvc share a device number, and no file can be moved from one to the other."""
    before = outputs(finished)
    words = ("python", "-m", f"stages.{stage}")
    done = run(finished, "unshare", "-rm", "sh", "-c", 'mount --bind data data && exec "$@"', "sh", *words)
    assert done.returncode == 0, done.stderr
    assert outputs(finished) == before


# In mounts of its own: the repository argv[1] on a disk of 24 MiB, of which fewer and fewer KiB are left.
FULL = """
import shutil, subprocess, sys
from pathlib import Path
from tests.stand_ins import command, outputs, set_params

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "small", "disk"], check=True)
folder = Path(shutil.copytree(sys.argv[1], "disk/repository", symlinks=True))
outside = {"DVC_SITE_CACHE_DIR": str(Path("site").absolute())}
command(folder, "dvc", "repro", **outside)
ballast = folder / ".dvc/tmp/ballast"
for number, left in enumerate((800, 8, 0)):
    before = outputs(folder)
    set_params(folder, {"train": {"learning_rate": 0.01 * (number + 1)}})
    ballast.write_bytes(bytes(shutil.disk_usage(folder).free - left * 1024))
    said = command(folder, "dvc", "repro", status=255, **outside).stderr
    assert "no-space" in said or "[Errno 28] No space left on device" in said, said
    assert "Traceback" not in said
    ballast.unlink()
    # README: at 8 KiB it is DVC's own lock file that had no room, and DVC cannot read it any more
    (folder / ".dvc/tmp/rwlock").unlink()
    command(folder, "dvc", "checkout", **outside)
    command(folder, "git", "checkout", "-q", "reports")
    assert outputs(folder) == before
    command(folder, "dvc", "repro", **outside)
    command(folder, "git", "commit", "-qam", "recorded")
    assert outputs(folder) != before
"""


@mounts
def test_on_a_full_disk_dvc_keeps_its_record_and_the_old_outputs_come_back(finished, tmp_path):
    """At 800 KiB the stage itself has room, and DVC would not have had it."""
    command(finished, "git", "add", "-A")
    command(finished, "git", "commit", "-qm", "recorded")
    (tmp_path / "disk").mkdir()
    words = ["unshare", "-rm", sys.executable, "-c", FULL, str(finished)]
    done = subprocess.run(
        words,
        **{"cwd": tmp_path, "env": variables(tmp_path, PYTHONPATH=str(ROOT)), "text": True},
        **{"capture_output": True, "check": False},
    )
    assert done.returncode == 0, done.stderr[-4000:]
