"""The shard store: where boundaries fall, what a key depends on, and that what is filled in is what is read."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eagle3.formats.safetensors_headers import read_header
from eagle3.manifests import Manifest, write_manifest
from eagle3.params import ExtractParams
from eagle3.problems import InvalidInput
from eagle3.states.fp8 import dequantise, quantise
from eagle3.states.hidden_states import HiddenStates, store_errors
from eagle3.states.shard_file import ShardFile, state_faults, tokens_arrived, write_at
from eagle3.states.shard_plan import ids_as_bytes, plan_shards, planned_extraction

ORIGIN = {"verifier": "a" * 64, "layer_ids": [1, 3, 6], "vllm": "0.32.0"}


@dataclass(frozen=True)
class Stored:
    sample_id: str
    split: str = "train"
    num_prompt: int = 1
    input_ids: tuple[int, ...] = (5, 6, 7)
    loss_mask: tuple[bool, ...] = (False, True, True)


A, B, C = Stored("a"), Stored("b", "val", 2, (8, 9), (False, True)), Stored("c", "eval", 1, (4,), (True,))


def plan(*samples, origin=ORIGIN, samples_per_shard=10**18, store_dtype="bfloat16"):
    sizes = {"num_states": 3, "hidden_size": 4}
    return plan_shards(samples, origin, samples_per_shard, **sizes, store_dtype=store_dtype)


def states_of(sample):
    """[T, 3, 4], another number in each element."""
    first = sum(map(ord, sample.sample_id))
    return (torch.arange(len(sample.input_ids) * 12) + first).reshape(-1, 3, 4).to(torch.bfloat16)


def fill(folder, shard):
    """What the engine's worker does: states first, then ids."""
    with ShardFile(folder / shard.name, shard) as file:
        fd = os.open(file.path, os.O_WRONLY)
        for index, sample in enumerate(shard.samples):
            *states_at, ids_at = file.place_of(index)
            states = states_of(sample)
            for part, at in zip(quantise(states) if len(states_at) > 1 else [states], states_at, strict=True):
                write_at(fd, part.view(torch.uint8).numpy().tobytes(), at)
            write_at(fd, ids_as_bytes(sample.input_ids), ids_at)
        os.close(fd)
        assert file.missing(range(len(shard.samples))) == []


def store(folder, *shards):
    for shard in shards:
        fill(folder, shard)
    write_manifest(folder, Manifest("extract"))
    return HiddenStates(folder)


def test_a_sample_is_read_as_it_was_written(tmp_path):
    states = store(tmp_path, *plan(A, B, C))
    read = states.get("b")
    assert (read.split, read.num_prompt, states.split_of("c")) == ("val", 2, "eval")
    assert read.hidden_TAH.dtype == torch.bfloat16
    assert read.hidden_TAH.equal(states_of(B))
    assert read.input_ids_T.tolist() == [8, 9]
    assert read.loss_mask_T.tolist() == [False, True]


def test_a_sample_stored_as_fp8_is_read_as_bf16_with_the_error_that_the_shards_tell(tmp_path):
    shards = plan(A, B, C, store_dtype="fp8")
    states = store(tmp_path, *shards)
    read = states.get("b")
    assert (read.stored_TAH.dtype, read.hidden_TAH.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert read.hidden_TAH.equal(dequantise(*quantise(states_of(B))[:2]))
    assert read.input_ids_T.tolist() == [8, 9]
    kept = [one.sample_id for one in (A, B, C)]
    found, written = (
        torch.cat([one[1:] if len(one) > 1 else one for one in each]).float()
        for each in ([states.get(name).hidden_TAH for name in kept], [states_of(one) for one in (A, B, C)])
    )
    errors = (found - written).norm(dim=(0, 2)) / written.norm(dim=(0, 2))
    assert list(store_errors(tmp_path, shards, [1, 3, 6]).items()) == [
        (layer_id, pytest.approx(error, abs=1e-5))
        for layer_id, error in zip(("1", "3", "6"), errors.tolist(), strict=True)
    ]
    assert 0 < errors.min() < errors.max() < 0.05


def test_a_shard_of_fp8_takes_a_byte_a_number_and_is_aligned(tmp_path):
    (shard,) = plan(A, B, C, store_dtype="fp8")
    fill(tmp_path, shard)
    assert shard.bytes_per_token == 3 * (4 + 4)
    assert (tmp_path / shard.name).stat().st_size == shard.num_bytes
    assert {name: (value.dtype, list(value.shape)) for name, value in load_file(tmp_path / shard.name).items()} == {
        "offsets": (torch.int64, [4]),
        "input_ids": (torch.int32, [6]),
        "scales": (torch.float32, [6, 3]),
        "squares": (torch.float32, [3, 3, 2]),
        "hidden_states": (torch.float8_e4m3fn, [6, 3, 4]),
        "loss_mask": (torch.bool, [6]),
    }
    sizes = {"I64": 8, "I32": 4, "F32": 4}
    header = read_header(tmp_path / shard.name)
    assert all(tensor.begin % sizes.get(tensor.dtype, 1) == 0 for tensor in header.tensors)


def test_another_dtype_is_another_key():
    assert plan(A)[0].key != plan(A, store_dtype="fp8")[0].key


def test_samples_of_all_shards_are_listed_in_order(tmp_path):
    assert store(tmp_path, *plan(A, C), *plan(B)).sample_ids == ["a", "b", "c"]


def test_the_file_is_what_the_safetensors_library_reads(tmp_path):
    (shard,) = plan(A, B, C)
    fill(tmp_path, shard)
    path = tmp_path / shard.name
    assert path.stat().st_size == shard.num_bytes
    assert {name: (value.dtype, list(value.shape)) for name, value in load_file(path).items()} == {
        "offsets": (torch.int64, [4]),
        "input_ids": (torch.int32, [6]),
        "hidden_states": (torch.bfloat16, [6, 3, 4]),
        "loss_mask": (torch.bool, [6]),
    }
    assert load_file(path)["offsets"].tolist() == [0, 3, 5, 6]
    assert json.loads(read_header(path).metadata["sample_ids"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("rope", "hangs_on_the_window"),
    [
        ({}, False),
        ({"rope_scaling": None}, False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, True),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}}}, True),
    ],
)
def test_the_window_is_in_the_key_where_it_chooses_the_rope_factors_and_nowhere_else(rope, hangs_on_the_window):
    config = {"num_hidden_layers": 6, "hidden_size": 4, **rope}
    extract = ExtractParams([1, 3], 256, "bfloat16", 0)

    def key(window):
        made = Manifest("sample", {"sample": {"max_model_len": window}}, verifier={"sha256": "a" * 64})
        [shard] = planned_extraction([A, B], made, config, extract, "0.32.0")
        return shard.key

    assert (key(64) == plan(A, B)[0].key) is not hangs_on_the_window
    assert (key(64) != key(128)) is hangs_on_the_window


def test_the_same_shard_is_the_same_bytes(tmp_path):
    (shard,) = plan(A, B)
    fill(tmp_path / "1", shard)
    fill(tmp_path / "2", shard)
    assert (tmp_path / "1" / shard.name).read_bytes() == (tmp_path / "2" / shard.name).read_bytes()


def test_reading_maps_the_file_and_copies_nothing(tmp_path):
    states = store(tmp_path, *plan(A, B))
    first, second = states.get("a"), states.get("b")
    assert first.hidden_TAH.untyped_storage().data_ptr() == second.hidden_TAH.untyped_storage().data_ptr()
    assert states.get("a").hidden_TAH.data_ptr() == first.hidden_TAH.data_ptr()


def test_the_store_travels_to_a_worker_process_without_its_maps(tmp_path):
    states = store(tmp_path, *plan(A))
    states.get("a")
    copy = pickle.loads(pickle.dumps(states))
    assert copy._maps == {}
    assert copy.get("a").hidden_TAH.equal(states_of(A))


def test_a_shard_that_is_absent_or_foreign_is_refused(tmp_path):
    ((one,), (other,)) = plan(A), plan(B)
    store(tmp_path, one)
    fill(tmp_path, other)
    (tmp_path / one.name).unlink()
    with pytest.raises(InvalidInput) as error:
        HiddenStates(tmp_path)
    assert [problem.code for problem in error.value.problems] == ["missing-shard", "foreign-shard"]


def test_a_sample_is_missing_until_its_own_ids_stand_in_the_file(tmp_path):
    (shard,) = plan(A, B)
    with ShardFile(tmp_path / shard.name, shard) as file:
        assert file.missing([0, 1]) == [0, 1]
        fd = os.open(file.path, os.O_WRONLY)
        write_at(fd, ids_as_bytes([5, 6, 0]), file.place_of(0)[1])
        write_at(fd, ids_as_bytes([8, 9]), file.place_of(1)[1])
        os.close(fd)
        assert file.missing([0, 1]) == [0]


def test_tokens_of_a_shard_in_work_count_as_they_arrive(tmp_path):
    ((shard,), (other,)) = plan(A, B), plan(C)
    assert tokens_arrived(tmp_path, shard) == 0
    with ShardFile(tmp_path / shard.name, shard) as file, ShardFile(tmp_path / other.name, other):
        assert tokens_arrived(tmp_path, shard) == 0
        with open(file.path, "r+b") as written:
            write_at(written.fileno(), ids_as_bytes([8, 9]), file.place_of(1)[1])
            assert tokens_arrived(tmp_path, shard) == 2
            write_at(written.fileno(), bytes(8), 0)
        assert tokens_arrived(tmp_path, shard) == 0, "reserved, and nothing known written yet"
    assert tokens_arrived(tmp_path, shard) == 0


def test_a_shard_that_fails_leaves_nothing(tmp_path):
    (shard,) = plan(A)
    with pytest.raises(KeyboardInterrupt), ShardFile(tmp_path / shard.name, shard):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "fault"), [(0.0, "all zero"), (float("nan"), "NaN or infinite"), (float("inf"), "NaN or infinite")]
)
def test_states_that_are_not_finite_or_all_zero_are_named_by_layer(value, fault):
    states = torch.ones(5, 3, 4, dtype=torch.bfloat16)
    assert state_faults(states, [1, 3, 6]) == []
    states[2 if value else slice(None), 1] = value
    assert state_faults(states, [1, 3, 6]) == [f"layer id 3: {fault}"]


@pytest.mark.parametrize(
    "change",
    [
        {"sample_id": "b"},
        {"split": "val"},
        {"num_prompt": 2},
        {"input_ids": (5, 6, 8)},
        {"loss_mask": (False, False, True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_sample_changes_the_key(change):
    assert plan(A)[0].key != plan(replace(A, **change))[0].key


@pytest.mark.parametrize("change", [{"verifier": "b" * 64}, {"layer_ids": [1, 4, 6]}, {"vllm": "0.33.0"}], ids=str)
def test_verifier_layers_and_engine_change_the_key(change):
    assert plan(A)[0].key != plan(A, origin={**ORIGIN, **change})[0].key


IDS = st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=60)


@given(IDS, st.integers(1, 8))
def test_shards_hold_every_sample_once_and_in_order(ids, samples_per_shard):
    samples = [Stored(one) for one in sorted(ids)]
    shards = plan(*samples, samples_per_shard=samples_per_shard)
    assert [sample for shard in shards for sample in shard.samples] == samples
    assert len({shard.key for shard in shards}) == len(shards)


@given(IDS, st.integers(1, 8), st.text("abcdef", min_size=1, max_size=4))
def test_one_more_sample_changes_only_the_shard_it_falls_in(ids, samples_per_shard, added):
    before, after = (
        {
            shard.key: {sample.sample_id for sample in shard.samples}
            for shard in plan(*map(Stored, sorted(each)), samples_per_shard=samples_per_shard)
        }
        for each in (ids - {added}, ids | {added})
    )
    gone = [members for key, members in before.items() if key not in after]
    assert len(gone) <= 1
    assert set().union(*(members for key, members in after.items() if key not in before)) == {added}.union(*gone)
