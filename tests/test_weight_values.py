from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.__main__ import main
from eagle3.checks.servers import SERVERS
from eagle3.checks.weight_values import WINDOW, map_problems, value_problems
from eagle3.formats.flat_config import flatten
from eagle3.formats.safetensors_headers import num_bytes, read_header, write_header
from tests.drafts import FROZEN, NESTED, TRAINED

ONE = {"BF16": 0x3F80, "F16": 0x3C00, "F32": 0x3F800000, "F8_E4M3": 0x38, "F8_E5M2": 0x3C}
NAN = {"BF16": 0x7FC1, "F16": 0xFE00, "F32": 0x7F800001, "F8_E4M3": 0xFF, "F8_E5M2": 0x7E}
INFINITE = {"BF16": 0xFF80, "F16": 0x7C00, "F32": 0xFF800000, "F8_E4M3": 0x7F, "F8_E5M2": 0xFC}
WIDTH = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8}


def codes(
    tmp_path, name: str, dtype: str, shape: tuple[int, ...], values: np.ndarray, verifier_dtype: str | None = None
) -> list[str]:
    path = tmp_path / "x.safetensors"
    data = values.astype(WIDTH[dtype]).tobytes()
    assert len(data) == num_bytes(dtype, shape)
    path.write_bytes(write_header({name: (dtype, shape)}, {}) + data)
    tensors = {tensor.name: tensor for tensor in read_header(path).tensors}
    return [problem.code for problem in value_problems(tensors, 160, verifier_dtype)]


def ramp(dtype: str, count: int) -> np.ndarray:
    return np.arange(count) % (50 if dtype == "F8_E5M2" else 60 if dtype == "F8_E4M3" else 1000) + ONE[dtype]


@pytest.mark.parametrize("dtype", sorted(ONE))
@pytest.mark.parametrize("bits", [NAN, INFINITE])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(tmp_path, dtype, bits):
    count = WINDOW // 2 + 12345
    for place in (0, count // 2, count - 1):
        values = ramp(dtype, count)
        values[place] = bits[dtype]
        assert codes(tmp_path, "fc.weight", dtype, (count,), values) == ["not-finite"]


def test_ordinary_values_are_no_problem(tmp_path):
    assert codes(tmp_path, "fc.weight", "BF16", (64, 192), ramp("BF16", 64 * 192)) == []


def test_the_largest_finite_value_is_finite(tmp_path):
    values = ramp("BF16", 64)
    values[3] = 0xFF7F
    assert codes(tmp_path, "norm.weight", "BF16", (64,), values) == []


@pytest.mark.parametrize(("dtype", "last", "first"), [("BF16", 0x477F, 0x4780), ("F32", 0x477FEFFF, 0x477FF000)])
def test_values_that_float16_cannot_hold_matter_to_a_float16_verifier(tmp_path, dtype, last, first):
    for bits, found in ((last, []), (first, ["not-finite"])):
        values = ramp(dtype, 64)
        values[9] = bits
        assert codes(tmp_path, "fc.weight", dtype, (64,), values, "float16") == found
        assert codes(tmp_path, "fc.weight", dtype, (64,), values, "bfloat16") == []


def test_constant_matrices_and_untrained_norms(tmp_path):
    ones, zeros = np.full(64, ONE["BF16"]), np.zeros(64)
    assert codes(tmp_path, "fc.weight", "BF16", (8, 8), zeros) == ["constant"]
    assert codes(tmp_path, "fc.weight", "BF16", (8, 8), ones) == ["constant"]
    assert codes(tmp_path, "norm.weight", "BF16", (64,), ones) == ["untrained-norm"]
    assert codes(tmp_path, "norm.weight", "BF16", (64,), zeros) == ["constant"]
    assert codes(tmp_path, "layers.0.self_attn.q_proj.bias", "BF16", (64,), zeros) == []


def test_zero_of_both_signs_is_all_zero(tmp_path):
    values = np.zeros(64)
    values[1::2] = 0x8000
    assert codes(tmp_path, "fc.weight", "BF16", (8, 8), values) == ["constant"]


def test_check_reads_the_values_unless_told_not_to(tmp_path, capsys):
    weights = FROZEN | TRAINED
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(write_header(weights, {}))
        for name, (dtype, shape) in weights.items():
            count = int(np.prod(shape))
            ids = np.arange(0, 120, 3)
            integers = {"d2t": ids - np.arange(40), "t2d": np.isin(np.arange(160), ids)}
            values = integers.get(name, ramp("BF16", count).astype(np.uint16))
            file.write(values.astype(bool if dtype == "BOOL" else values.dtype).tobytes())
    (tmp_path / "config.json").write_text(json.dumps(flatten(NESTED)))
    assert main(["check", str(tmp_path)]) == 0
    assert ", values" in capsys.readouterr().out
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    place = next(each.begin for each in read_header(tmp_path / "model.safetensors").tensors if each.name == "fc.weight")
    data[place : place + 2] = NAN["BF16"].to_bytes(2, "little")
    (tmp_path / "model.safetensors").write_bytes(data)
    assert main(["check", str(tmp_path)]) == 1
    assert "ERROR not-finite: fc.weight" in capsys.readouterr().out
    assert main(["check", "--no-values", str(tmp_path)]) == 0
    assert "not checked: values (--no-values)" in capsys.readouterr().out


def mapped(d2t, t2d=None, vocab_size=160) -> list[str]:
    mask = None if t2d is None else np.isin(np.arange(vocab_size), t2d)
    return [problem.code for problem in map_problems(np.array(d2t, np.int64), mask, vocab_size)]


def test_offsets_and_their_mask_are_no_problem():
    """Draft ids 0, 1, 2 mean verifier ids 0, 3, 6."""
    assert mapped([0, 2, 4], t2d=[0, 3, 6]) == []


def test_a_full_vocabulary_needs_no_offsets():
    assert mapped([0] * 160, t2d=range(160)) == []


@pytest.mark.parametrize(
    ("d2t", "t2d", "code"),
    [
        ([0, 2, 500], None, "map-range"),
        ([-1, 2, 4], None, "map-range"),
        ([0, 2, 1], None, "map-repeated"),
        ([5, 0, 0], None, "map-order"),
        ([0, 0, 0], None, "map-default"),
        ([0, 0, 0], [0, 1, 2], "map-default"),
        ([0, 2, 4], [0, 3, 7], "map-mismatch"),
        ([0, 2, 4], [0, 3], "map-mismatch"),
        ([0, 3, 6], [0, 3, 6], "map-absolute"),
        ([10, 100, 159], None, "map-absolute"),
        ([2**63 - 1, 2**63 - 1, 2**63 - 1], None, "map-range"),
    ],
)
def test_each_fault_of_a_map_has_its_name(d2t, t2d, code):
    assert mapped(d2t, t2d) == [code]


@given(st.sets(st.integers(0, 159), min_size=1, max_size=40))
def test_every_ascending_choice_of_ids_passes_or_is_the_first_ids(ids):
    chosen = np.array(sorted(ids))
    found = mapped(chosen - np.arange(len(chosen)), t2d=chosen)
    assert found == (["map-default"] if chosen[-1] == len(chosen) - 1 and len(chosen) < 160 else [])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8), st.lists(st.integers(0, 159), max_size=8))
def test_any_map_gives_problems_and_no_exception(d2t, t2d):
    mapped(d2t, t2d)
    mapped(d2t)


def test_every_consequence_is_that_of_the_server_asked_for():
    d2t = [np.array(each, np.int64) for each in ([0, 159, 0], [1, 0, 0], [0, 5, 9])]
    found = [each for part in d2t for each in map_problems(part, np.zeros(160), 160, SERVERS["sglang"])]
    assert [problem.code for problem in found] == ["map-range", "map-repeated", "map-mismatch"]
    assert all(problem.consequence.startswith("SGLang 0.5.23") for problem in found)
    assert "proposes" in found[0].consequence
    assert "proposes" in found[1].consequence
