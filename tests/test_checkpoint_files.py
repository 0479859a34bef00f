from __future__ import annotations

import json

import pytest

from eagle3.formats.checkpoint_files import epoch_folders, load_signature, read_checkpoint_tensors
from eagle3.problems import InvalidInput
from tests.drafts import write_nested, write_tensors

A = {"a": ("F32", (2,))}
B = {"b": ("F32", (2,))}


def codes(folder) -> list[tuple[str, str]]:
    return [(problem.code, problem.severity) for problem in read_checkpoint_tensors(folder).problems]


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_file_needs_no_index(tmp_path):
    write_tensors(tmp_path / "any-name.safetensors", A)
    assert list(read_checkpoint_tensors(tmp_path).tensors) == ["a"]
    assert codes(tmp_path) == []


def test_a_config_alone_has_no_tensors_and_no_problem(tmp_path):
    assert read_checkpoint_tensors(tmp_path) == type(read_checkpoint_tensors(tmp_path))({}, (), ())


def test_two_files_without_an_index_are_an_error(tmp_path):
    write_tensors(tmp_path / "model.safetensors", A)
    write_tensors(tmp_path / "model_1.safetensors", B)
    assert codes(tmp_path) == [("no-index", "error")]


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    write_tensors(tmp_path / "x.safetensors", A)
    write_tensors(tmp_path / "y.safetensors", A)
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    assert ("tensor-twice", "error") in codes(tmp_path)


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path):
    write_tensors(tmp_path / "x.safetensors", A)
    write_tensors(tmp_path / "y.safetensors", B)
    write_index(tmp_path, {"a": "x.safetensors"})
    assert list(read_checkpoint_tensors(tmp_path).tensors) == ["a"]
    assert codes(tmp_path) == [("ignored-file", "warning")]


def test_consolidated_files_take_the_place_of_all_others(tmp_path):
    write_tensors(tmp_path / "consolidated.safetensors", A)
    write_tensors(tmp_path / "model.safetensors", B)
    assert list(read_checkpoint_tensors(tmp_path).tensors) == ["a"]
    assert codes(tmp_path) == [("ignored-file", "error")]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", 3, None, "x.bin"])
def test_an_index_that_leads_out_of_the_folder_is_an_error(tmp_path, name):
    write_tensors(tmp_path / "x.safetensors", A)
    write_index(tmp_path, {"a": name})
    assert ("bad-index", "error") in codes(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_an_error(tmp_path, weight_map):
    write_tensors(tmp_path / "x.safetensors", A)
    write_index(tmp_path, weight_map)
    assert ("bad-index", "error") in codes(tmp_path)


def test_a_tensor_that_only_the_index_knows_is_an_error(tmp_path):
    write_tensors(tmp_path / "x.safetensors", A)
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    assert codes(tmp_path) == [("index-mismatch", "error")]


def test_a_tensor_that_the_index_does_not_know_is_a_warning(tmp_path):
    write_tensors(tmp_path / "x.safetensors", A | B)
    write_index(tmp_path, {"a": "x.safetensors"})
    assert codes(tmp_path) == [("index-mismatch", "warning")]


def test_every_broken_file_is_reported_with_the_missing_ones(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "y.safetensors").write_bytes(b"x")
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors", "c": "z.safetensors"})
    with pytest.raises(InvalidInput) as caught:
        read_checkpoint_tensors(tmp_path)
    assert [problem.code for problem in caught.value.problems] == [
        "missing-shard",
        "broken-safetensors",
        "broken-safetensors",
    ]


def test_pickled_weights_are_named_and_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert codes(tmp_path) == [("pickled-weights", "warning")]


def test_a_folder_called_like_a_tensor_file_is_no_file(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    assert read_checkpoint_tensors(tmp_path).files == ()


def test_epochs_are_ordered_by_number(tmp_path):
    for name in ("epoch_10", "epoch_9", "epoch_x", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in epoch_folders(tmp_path, "train")] == ["epoch_9", "epoch_10"]
    with pytest.raises(InvalidInput, match="dvc repro train"):
        epoch_folders(tmp_path / "other", "train")


def test_only_values_differ_between_epochs_of_one_signature(tmp_path):
    first = write_nested(tmp_path / "epoch_0", fill=1)
    second = write_nested(tmp_path / "epoch_1", fill=2)
    assert load_signature(first) == load_signature(second)
    write_tensors(second / "model-trained.safetensors", {"fc.weight": ("F32", (64, 192))})
    assert load_signature(first) != load_signature(second)
