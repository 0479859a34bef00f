from __future__ import annotations

import json
import os

import pytest

from eagle3.formats.checkpoint_copies import link_checkpoint
from eagle3.formats.checkpoint_files import read_checkpoint_tensors
from eagle3.formats.flattening import flatten_checkpoint, flatten_folder
from eagle3.problems import InvalidInput
from tests.drafts import FROZEN, NESTED, TRAINED, write_nested, write_tensors

EMBEDDING = frozenset({"embed_tokens.weight"})


def content(path):
    return path.read_bytes()


def test_tensor_files_are_the_same_files(tmp_path):
    source = write_nested(tmp_path / "nested")
    target = tmp_path / "flat"
    assert flatten_checkpoint(source, target) == ["model-frozen.safetensors", "model-trained.safetensors"]
    for name in ("model-frozen.safetensors", "model-trained.safetensors"):
        assert os.path.samefile(source / name, target / name)
    assert content(target / "config_speculators.json") == content(source / "config.json")
    assert content(target / "model.safetensors.index.json") == content(source / "model.safetensors.index.json")
    assert json.loads(content(target / "config.json"))["architectures"] == ["LlamaForCausalLMEagle3"]


def test_without_the_embedding_every_other_tensor_keeps_its_bytes(tmp_path):
    source = write_nested(tmp_path / "nested")
    target = tmp_path / "flat"
    assert flatten_checkpoint(source, target, EMBEDDING) == ["model-trained.safetensors"]
    before, after = read_checkpoint_tensors(source).tensors, read_checkpoint_tensors(target).tensors
    assert set(after) == set(before) - EMBEDDING
    for name, tensor in after.items():
        old = before[name]
        assert (tensor.dtype, tensor.shape) == (old.dtype, old.shape)
        assert content(tensor.file)[tensor.begin : tensor.end] == content(old.file)[old.begin : old.end]
    index = json.loads(content(target / "model.safetensors.index.json"))
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(tensor.end - tensor.begin for tensor in after.values())


def test_a_trained_embedding_is_not_dropped(tmp_path):
    source = write_nested(tmp_path / "nested", {**NESTED, "embed_requires_grad": True})
    with pytest.raises(InvalidInput, match="trained-embedding"):
        flatten_checkpoint(source, tmp_path / "flat", EMBEDDING)
    assert not (tmp_path / "flat").exists()


def test_a_repeated_key_is_refused(tmp_path):
    source = write_nested(tmp_path / "nested")
    text = (source / "config.json").read_text().replace("{", '{"draft_vocab_size": 41,', 1)
    (source / "config.json").write_text(text)
    with pytest.raises(InvalidInput, match="repeated-key: draft_vocab_size"):
        flatten_checkpoint(source, tmp_path / "flat")


def test_a_single_file_without_an_index_stays_so(tmp_path):
    source = tmp_path / "nested"
    write_tensors(source / "model.safetensors", FROZEN | TRAINED)
    (source / "config.json").write_text(json.dumps(NESTED))
    flatten_folder(source, tmp_path / "flat")
    assert sorted(path.name for path in (tmp_path / "flat").iterdir()) == [
        "config.json",
        "config_speculators.json",
        "model.safetensors",
    ]


def test_a_target_that_exists_is_not_touched(tmp_path):
    source = write_nested(tmp_path / "nested")
    (tmp_path / "flat").mkdir()
    with pytest.raises(InvalidInput, match="exists"):
        flatten_folder(source, tmp_path / "flat")


def test_a_broken_source_leaves_no_target(tmp_path):
    source = write_nested(tmp_path / "nested")
    (source / "model-trained.safetensors").unlink()
    with pytest.raises(InvalidInput, match="missing-shard"):
        flatten_folder(source, tmp_path / "flat")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nested"]


def test_a_folder_without_tensors_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "target").mkdir()
    with pytest.raises(InvalidInput, match="no-weights"):
        link_checkpoint(tmp_path / "empty", tmp_path / "target")
