"""Manifests: written last, read strictly, and every file they name checked."""

from __future__ import annotations

import json

import pytest

from eagle3.manifests import NAME, Manifest, read_manifest, verify_files, write_manifest
from eagle3.problems import InvalidInput


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "epoch_0/model").write_text("abc")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_what_was_written_is_read_again(folder):
    written = write_manifest(folder, Manifest("train", {"seed": 0}, counts={"samples": 3}))
    assert read_manifest(folder, "train") == written
    assert set(written.files) == {"config.json", "epoch_0/model"}
    assert written.files["epoch_0/model"]["bytes"] == 3


def test_the_same_folder_is_the_same_bytes(folder):
    write_manifest(folder, Manifest("train", {"b": 1, "a": 2}))
    before = (folder / NAME).read_bytes()
    write_manifest(folder, Manifest("train", {"a": 2, "b": 1}))
    assert (folder / NAME).read_bytes() == before
    assert str(folder).encode() not in before


def test_an_absent_manifest_names_the_stage_that_makes_it(tmp_path):
    with pytest.raises(InvalidInput, match="dvc repro extract") as caught:
        read_manifest(tmp_path, "extract")
    assert caught.value.problems[0].code == "missing-input"


@pytest.mark.parametrize("text", ["{", "[]", '{"stage": "train"}', "\x00"])
def test_a_broken_manifest_is_refused(folder, text):
    (folder / NAME).write_text(text)
    with pytest.raises(InvalidInput, match="broken-manifest"):
        read_manifest(folder, "train")


def test_another_version_or_another_key_is_refused(folder):
    write_manifest(folder, Manifest("train"))
    value = json.loads((folder / NAME).read_text())
    for changed in ({**value, "schema_version": 2}, {**value, "host": "x"}):
        (folder / NAME).write_text(json.dumps(changed))
        with pytest.raises(InvalidInput, match="broken-manifest"):
            read_manifest(folder, "train")


@pytest.mark.parametrize("change", [{"decisions": []}, {"files": "x"}, {"files": {"a": 1}}, {"files": {"a": {}}}])
def test_parts_of_another_type_are_refused(folder, change):
    write_manifest(folder, Manifest("train"))
    value = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**value, **change}))
    with pytest.raises(InvalidInput, match="broken-manifest"):
        read_manifest(folder, "train")


def test_a_decision_is_read_as_its_stage_writes_it_or_refused():
    made = Manifest("sample", decisions={"vocab_size": 5, "ids": [1, 2], "text": "x", "none": None, "true": True})
    assert (made.decided_size("vocab_size"), made.decided_list("ids", int)) == (5, [1, 2])
    for name in ("text", "none", "true", "absent", "ids"):
        with pytest.raises(InvalidInput, match=f"decisions.{name}"):
            made.decided_size(name)
    used = Manifest("sample", {"sample": {"window": 5}, "seed": 0})
    assert used.used_size("sample", "window") == 5
    for section, name in (("sample", "absent"), ("seed", "window"), ("absent", "window")):
        with pytest.raises(InvalidInput, match=f"params.{section}.{name}"):
            used.used_size(section, name)
    for name, of in (("text", str), ("ids", str), ("absent", int)):
        with pytest.raises(InvalidInput, match="dvc repro --single-item --force sample"):
            made.decided_list(name, of)


def test_the_folder_of_another_stage_is_refused(folder):
    write_manifest(folder, Manifest("train"))
    with pytest.raises(InvalidInput, match="written by train"):
        read_manifest(folder, "flatten")


def test_every_file_that_is_missing_cut_or_changed_is_named(folder):
    (folder / "gone").write_text("x")
    manifest = write_manifest(folder, Manifest("train"))
    verify_files(folder, manifest)
    (folder / "gone").unlink()
    (folder / "config.json").write_text("{ }")
    (folder / "epoch_0/model").write_text("abd")
    with pytest.raises(InvalidInput) as caught:
        verify_files(folder, manifest)
    found = {problem.where.removeprefix(f"{folder}/"): problem.found for problem in caught.value.problems}
    assert set(found) == {"config.json", "epoch_0/model", "gone"}
    assert found["gone"] == "no such file"
    assert found["config.json"] == "3 bytes"
    assert found["epoch_0/model"].startswith("sha256 ")
