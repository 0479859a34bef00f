"""What the README promises to a consumer, by the real commands against real servers on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3.manifests import read_manifest, verify_files
from eagle3.yaml12 import read_yaml
from tests.code_deps import ROOT
from tests.remote_servers import BUCKET, SERVERS, Remote, counting_server
from tests.stand_ins import light_repository, variables

TAG = "v0.1.0"
# What a consumer of checkpoints has not: an import of any of these fails.
ENGINES = ("torch", "vllm", "speculators", "transformers", "numpy", "safetensors", "pyarrow", "dvc")

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Published:
    """A repository as its publisher left it: `origin` is bare, TAG holds the release, the objects are pushed."""

    origin: Path
    made: Path
    remote: Remote

    def run(self, folder: Path, *words: str, status: int | None = 0) -> str:
        """stdout and stderr of a command by somebody who shares nothing with the publisher but the servers."""
        done = subprocess.run(
            words,
            cwd=folder,
            env=variables(folder, **self.remote.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert status is None or done.returncode == status, f"{words} exited {done.returncode}\n{done.stdout[-6000:]}"
        return done.stdout

    def clone(self, folder: Path) -> Path:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.run(folder.parent, "git", "clone", "-q", str(self.origin), str(folder))
        return folder

    def files_of(self, out: str) -> dict[str, bytes]:
        return {str(path.relative_to(self.made / out)): path.read_bytes() for path in walk(self.made / out)}


def walk(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in walk(folder)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The whole pipeline, run once with stand-ins for the four slow stages, and committed."""
    folder = light_repository(tmp_path_factory.mktemp("finished"))
    here = Published(folder, folder, Remote(""))
    here.run(folder, "dvc", "repro", "-q")
    here.run(folder, "git", "add", "-A")
    here.run(folder, "git", "commit", "-qm", "Release the draft")
    return folder


@pytest.fixture(
    scope="module", params=[kind if kind == "local" else pytest.param(kind, marks=pytest.mark.long) for kind in SERVERS]
)
def published(request, finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with SERVERS[request.param](folder) as remote:
        made = shutil.copytree(finished, folder / "publisher", symlinks=True)
        here = Published(folder / "origin.git", made, remote)
        if request.param == "http":
            here.run(made, "dvc", "remote", "modify", "--local", "storage", "url", str(remote.objects))
            here.run(made, "dvc", "push", "-q")
            here.run(made, "dvc", "remote", "modify", "--local", "--unset", "storage", "url")
        # as the README says: the URL is committed, so that a consumer needs nothing but the repository's address
        for key, value in {"url": remote.url, **remote.options}.items():
            here.run(made, "dvc", "remote", "modify", "storage", key, value)
        here.run(made, "git", "commit", "-qam", "Where the checkpoints are")
        if request.param != "http":
            here.run(made, "dvc", "push", "-q")
        here.run(made, "git", "tag", TAG)
        here.run(made, "gto", "register", "eagle3-draft", "--version", TAG)
        here.run(made, "git", "clone", "-q", "--bare", ".", str(here.origin))
        yield here


def test_a_fresh_clone_pulls_the_release_and_its_story(published, tmp_path):
    clone = published.clone(tmp_path / "clone")
    published.run(clone, "dvc", "pull", "serve-test")
    assert files(clone / "data/release") == published.files_of("data/release")
    assert not {"hidden_states", "checkpoints", "samples"} & {path.name for path in (clone / "data").iterdir()}
    told = published.run(clone, sys.executable, "-m", "eagle3", "trace", "data/release")
    assert f"tag {TAG}" in told
    assert "Release the draft" in told


def test_it_is_used_without_hidden_states_and_without_any_engine(published, tmp_path):
    """Only Python, cerberus and PyYAML: the heavy libraries are made impossible to import."""
    clone = published.clone(tmp_path / "clone")
    published.run(clone, "dvc", "pull", "-q", "serve-test")
    shut = "".join(f"sys.modules[{name!r}] = None; " for name in ENGINES)
    for arguments in (["check", "data/release"], ["inspect", "data/release"], ["trace", "data/release"]):
        code = f"import sys; {shut}from eagle3.__main__ import main; sys.exit(main({arguments!r}))"
        published.run(clone, sys.executable, "-c", code)


def test_a_bare_pull_names_the_hidden_states_and_brings_the_rest(published, tmp_path):
    clone = published.clone(tmp_path / "clone")
    assert "data/hidden_states" in published.run(clone, "dvc", "pull", status=1)
    assert files(clone / "data/checkpoints") == published.files_of("data/checkpoints")
    published.run(clone, "dvc", "pull", "--allow-missing")
    assert not (clone / "data/hidden_states").exists()
    status = published.run(clone, "dvc", "repro", "--allow-missing", "--dry")
    assert "Running" not in status


def test_one_epoch_of_a_tag_comes_alone(published, tmp_path):
    tmp_path.joinpath("anywhere").mkdir()
    epoch = "data/flattened/epoch_1"
    published.run(tmp_path / "anywhere", "dvc", "get", str(published.origin), epoch, "--rev", TAG, "-o", "epoch")
    assert files(tmp_path / "anywhere/epoch") == published.files_of(epoch)

    clone = published.clone(tmp_path / "clone")
    published.run(clone, "dvc", "pull", epoch)
    assert files(clone / epoch) == published.files_of(epoch)
    objects = [path for path in walk(clone / ".dvc/cache/files") if path.suffix != ".dir"]
    assert sorted(path.read_bytes() for path in objects) == sorted(set(published.files_of(epoch).values()))


def objects_of(made: Path, *epochs: str) -> dict[str, int]:
    """Key below the remote's URL -> bytes of each file of these epochs."""
    lock = read_yaml(made / "dvc.lock")["stages"]["flatten"]["outs"]
    digest = next(out["md5"] for out in lock if out["path"] == "data/flattened")
    listed = json.loads((made / f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}").read_text())
    found = [entry["md5"] for entry in listed if entry["relpath"].startswith(tuple(f"{epoch}/" for epoch in epochs))]
    keys = [f"files/md5/{md5[:2]}/{md5[2:]}" for md5 in found]
    return {key: (made / ".dvc/cache" / key).stat().st_size for key in keys}


def taken(sent: Counter[str]) -> dict[str, int]:
    """Bytes of files that the server has sent since it was last asked; lists of files are small, however often sent."""
    lists = {path: size for path, size in sent.items() if path.endswith((".dir", "/files/md5", "/"))}
    assert sum(lists.values()) < 20_000
    found = {path: size for path, size in sent.items() if path not in lists}
    sent.clear()
    return found


def test_one_epoch_costs_its_own_bytes_on_the_wire_and_the_next_one_no_frozen_tensors(finished, tmp_path):
    """Counted at the server. What all epochs share is one object, which a clone that has one epoch does not ask for."""
    made = shutil.copytree(finished, tmp_path / "publisher", symlinks=True)
    with counting_server(tmp_path / "store") as (url, sent):
        here = Published(tmp_path / "origin.git", made, Remote(url))
        here.run(made, "dvc", "remote", "modify", "--local", "storage", "url", str(tmp_path / "store"))
        here.run(made, "dvc", "push", "-q")
        here.run(made, "dvc", "remote", "modify", "storage", "url", url)
        here.run(made, "git", "commit", "-qam", "Where the checkpoints are")
        here.run(made, "git", "clone", "-q", "--bare", ".", str(here.origin))
        one, both = objects_of(made, "epoch_1"), objects_of(made, "epoch_0", "epoch_1")
        clone = here.clone(tmp_path / "clone")
        assert not sent

        here.run(clone, "dvc", "pull", "data/flattened/epoch_1")
        assert taken(sent) == one
        here.run(clone, "dvc", "pull", "data/flattened/epoch_0")
        assert taken(sent) == {key: size for key, size in both.items() if key not in one}
        assert files(clone / "data/flattened/epoch_0") == here.files_of("data/flattened/epoch_0")
        assert sum(both.values()) < sum(one.values()) + sum(objects_of(made, "epoch_0").values()) - 20_000, "frozen"

        here.run(tmp_path, "dvc", "get", str(here.origin), "data/flattened/epoch_1", "-o", "epoch")
        got = taken(sent)
        assert got.keys() == one.keys()
        # fsspec's HTTP asks whether a file exists by a GET that it breaks off; small files are sent whole by then
        assert all(one[key] <= got[key] <= 2 * one[key] for key in one)


def test_the_artifact_comes_by_its_name_and_version(published, tmp_path):
    words = ("dvc", "artifacts", "get", str(published.origin), "eagle3-draft", "--rev", TAG, "-o", "draft")
    tmp_path.joinpath("anywhere").mkdir()
    published.run(tmp_path / "anywhere", *words)
    folder = tmp_path / "anywhere/draft"
    assert files(folder) == published.files_of("data/release")
    verify_files(folder, read_manifest(folder, "serve-test"))


def lost_object(published: Published) -> tuple[str, str]:
    """(its key below the remote's URL, its md5): the largest tensor file of the release."""
    lock = read_yaml(published.made / "dvc.lock")["stages"]["serve-test"]["outs"]
    digest = next(out["md5"] for out in lock if out["path"] == "data/release")
    listed = json.loads((published.made / f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}").read_text())
    md5 = next(entry["md5"] for entry in listed if entry["relpath"] == "model-frozen.safetensors")
    return f"files/md5/{md5[:2]}/{md5[2:]}", md5


def replace_object(remote: Remote, key: str, content: bytes | None) -> None:
    """Behind DVC's back, as a failing disk or a careless clean-up would; None removes it."""
    if remote.objects:
        path = remote.objects / key
        path.chmod(0o644) if path.exists() else None
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
            path.chmod(0o444)
        return
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=remote.options["endpointurl"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    if content is None:
        client.delete_object(Bucket=BUCKET, Key=f"eagle3/{key}")
    else:
        client.put_object(Bucket=BUCKET, Key=f"eagle3/{key}", Body=content)


@pytest.mark.parametrize("fault", ["corrupted", "missing"])
def test_a_broken_object_of_the_remote_is_refused_and_named(published, tmp_path, fault):
    key, md5 = lost_object(published)
    good = (published.made / ".dvc/cache" / key).read_bytes()
    replace_object(published.remote, key, b"\0" + good[1:] if fault == "corrupted" else None)
    try:
        clone = published.clone(tmp_path / "clone")
        told = published.run(clone, "dvc", "pull", "serve-test", status=None)
        assert not (clone / "data/release/model-frozen.safetensors").exists()
        assert md5 in told or "model-frozen.safetensors" in told or "data/release" in told, told
        assert published.run(clone, "dvc", "pull", "serve-test", status=1)
    finally:
        replace_object(published.remote, key, good)


def test_a_read_only_remote_refuses_a_push(published, tmp_path):
    if not published.remote.url.startswith("http:"):
        assert os.access(published.remote.objects or tmp_path, os.W_OK)
        return
    (published.made / "data/configs").joinpath("new").write_text("x")
    published.run(published.made, "dvc", "commit", "-q", "-f", "flatten")
    assert published.run(published.made, "dvc", "push", "data/configs", status=None)
    assert not [path for path in walk(published.remote.objects) if path.read_bytes() == b"x"]


def test_two_clones_share_one_cache_without_copies(finished, tmp_path):
    """docs/several-nodes.md: hidden states are made once, and lie once on the shared disk."""
    here = Published(finished, finished, Remote(""))
    shared = tmp_path / "shared"
    shutil.copytree(finished / ".dvc/cache", shared)
    other = here.clone(tmp_path / "other")
    here.run(other, "dvc", "config", "--local", "cache.dir", str(shared))
    here.run(other, "dvc", "checkout", "-q", "sample", "extract", "vocab-map")
    shards = walk(other / "data/hidden_states")
    assert files(other / "data/hidden_states") == files(finished / "data/hidden_states")
    assert all(path.is_symlink() or path.stat().st_nlink > 1 for path in shards)
    assert "Running" not in here.run(other, "dvc", "repro", "--dry", "extract", "vocab-map")


def test_the_committed_url_is_no_relative_path():
    config = (ROOT / ".dvc/config").read_text()
    assert "verify = true" in config
    assert "url = ~/.local/share/eagle3/storage" in config
