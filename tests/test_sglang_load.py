"""Single tensors through SGLang's loaders; whole checkpoints are in the corpus and tests/sglang_witness.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.checks.draft_config import parse_draft_config
from eagle3.checks.sglang_load import simulate_sglang_load, takes_prefix
from eagle3.formats.checkpoint_files import read_checkpoint_tensors
from eagle3.formats.flat_config import flatten
from eagle3.formats.safetensors_headers import TensorHeader
from tests.drafts import FROZEN, NESTED, TRAINED, write_tensors

FLAT = flatten(NESTED | {"norm_before_residual": False})


def headers(changes: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorHeader]:
    weights = FROZEN | TRAINED | changes
    return {name: TensorHeader(name, dtype, shape, Path("x"), 0, 0) for name, (dtype, shape) in weights.items()}


def fate(name: str, shape: tuple[int, ...], config: dict | None = None, dtype: str = "BF16") -> str:
    load = simulate_sglang_load(
        parse_draft_config(FLAT | (config or {}), "llama", False), headers({name: (dtype, shape)}), 160
    )
    return next(each.fate for each in load.tensors if each.tensor.name == name)


@pytest.mark.parametrize(
    ("name", "smaller", "right", "larger"),
    [
        ("layers.0.self_attn.q_proj.weight", "refused", (64, 128), "cut"),
        ("layers.0.mlp.gate_proj.weight", "cut", (96, 64), "cut"),  # filled up with zeros
        ("norm.weight", "refused", (64,), "refused"),
        ("lm_head.weight", "refused", (40, 64), "refused"),
        ("d2t", "cut", (40,), "cut"),  # taken whatever its length
    ],
)
def test_rows_of_another_number(name, smaller, right, larger):
    dtype = "I64" if name == "d2t" else "BF16"
    found = [fate(name, (right[0] + more, *right[1:]), dtype=dtype) for more in (-8, 0, 8)]
    assert found == [smaller, "fused" if "proj" in name else "loaded", larger]


@pytest.mark.parametrize(("columns", "expected"), [(88, "cut"), (96, "loaded"), (104, "cut")])
def test_down_is_cut_or_filled_up_in_its_columns(columns, expected):
    assert fate("layers.0.mlp.down_proj.weight", (64, columns)) == expected
    assert fate("layers.0.mlp.down_proj.weight", (65, columns)) == "refused"


def test_an_embedding_of_another_width_is_the_drafts_own():
    assert fate("embed_tokens.weight", (160, 64)) == "dropped_knowingly"
    assert fate("embed_tokens.weight", (160, 64), {"target_hidden_size": 96}) == "loaded"


def test_a_map_beside_equal_vocabularies_is_used():
    assert fate("d2t", (160,), {"draft_vocab_size": 160}, "I64") == "loaded"


def test_no_name_is_refused():
    assert fate("optimizer.step", (1,)) == "dropped_silently"
    assert fate("layers.0.self_attn.q_proj.bias", (64,), {"attention_bias": True}) == "dropped_silently"


def test_a_prefix_that_the_llama_class_takes():
    assert takes_prefix("model.", ["model.fc.weight"])
    assert not takes_prefix("module.", ["module.fc.weight"])
    assert not takes_prefix("model.", ["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"])


def test_the_files_that_sglang_reads(tmp_path):
    """Beside model.safetensors it leaves consolidated.safetensors alone; vLLM does the reverse."""
    for name in ("consolidated", "model"):
        write_tensors(tmp_path / f"{name}.safetensors", {name: ("F32", (1,))})
    for server, expected in (("vLLM 0.32.0", "consolidated"), ("SGLang 0.5.23", "model")):
        found = read_checkpoint_tensors(tmp_path, server)
        assert list(found.tensors) == [expected]
        assert [problem.code for problem in found.problems] == ["ignored-file"]
        assert server in found.problems[0].found


def test_the_table_is_for_the_config_as_sglang_reads_it():
    config = parse_draft_config(FLAT | {"attention_bias": True, "mlp_bias": True}, "llama", False)
    load = simulate_sglang_load(replace(config, num_hidden_layers=2), headers({}), 160)
    states = {state.parameter.name: state.state for state in load.parameters}
    assert states["model.layers.0.self_attn.o_proj.bias"] == "uninitialised"
    assert "model.layers.0.self_attn.qkv_proj.bias" not in states
    assert "model.layers.0.mlp.down_proj.bias" not in states
    assert states["model.layers.1.input_layernorm.weight"] == "unused"
    assert states["model.layers.1.hidden_norm.weight"] == "uninitialised"
