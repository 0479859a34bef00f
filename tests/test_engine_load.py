"""The simulation against vLLM's own class, over the whole corpus; and planted faults that the witness must find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.engine_load import EngineLoad, engine, witness_problems
from eagle3.checks.simulated_load import SimulatedLoad
from eagle3.formats.flat_config import flatten
from eagle3.formats.safetensors_headers import read_header
from eagle3.verifiers.verifier_config import parse_verifier_config
from tests.code_deps import ROOT
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, write_sparse_tensors, write_tensors

pytestmark = pytest.mark.engine

# One engine has one verifier: the case whose verifier has another vocabulary is left to tests/test_corpus.py.
CASES = sorted(
    path.parent
    for path in (ROOT / "tests").glob("*_checkpoints/*/config.json")
    if path.parent.name != "map_beside_equal_vocabularies"
)
# vLLM refuses these before any tensor is read, so there is no load to compare; it must refuse, and so must we.
REFUSED_BEFORE = {
    "activation", "config-type", "dtype", "heads", "model-type", "name-prefix", "nested-config", "not-eagle3",
    "other-drafter", "rope", "window",
}  # fmt: skip
# Among those, what vLLM loads all the same: wrongly, or because --speculative-config, as used here, reads less.
LOADS_ALL_THE_SAME = {
    "eagle1_wrapped", "ids_as_text", "mla_as_kimi_k2", "mla_as_llama", "nested_without_proposals",
    "positions_absent_nested", "rope_in_two_spellings", "rope_of_two_thetas", "window_without_layer_types",
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Iterator:
    from transformers import DeepseekV3Config
    from vllm.transformers_utils import repo_utils

    path = tmp_path_factory.mktemp("verifier") / "config.json"
    path.write_text(json.dumps(VERIFIER))
    with pytest.MonkeyPatch.context() as patch, engine(path) as real:
        # put back at the end: vLLM renames transformers' own class when it meets a kimi_k2
        patch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
        patch.setattr(repo_utils.time, "sleep", lambda seconds: None)  # it retries a config that cannot be read
        yield real


def judged(folder: Path) -> tuple[set[str], SimulatedLoad | None]:
    verdict, load = check_checkpoint(folder, parse_verifier_config(VERIFIER))
    return {problem.code for problem in verdict.problems if problem.severity == "error"}, load


def write_case(case: Path, folder: Path) -> None:
    (folder / "config.json").write_bytes((case / "config.json").read_bytes())
    weights = json.loads((case / "weights.json").read_text())
    write_sparse_tensors(
        folder / "model.safetensors", {name: (dtype, tuple(shape)) for name, (dtype, shape) in weights.items()}
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_simulation_is_what_vllm_does(vllm, case, tmp_path):
    write_case(case, tmp_path)
    codes, load = judged(tmp_path)
    real = vllm.load(tmp_path, load or SimulatedLoad((), ()))
    if real.refusal:
        assert codes, f"vLLM refuses what we let pass: {real.refusal}"
    if codes & REFUSED_BEFORE or (real.refusal and "class-name" in codes):
        assert real.refusal or case.name in LOADS_ALL_THE_SAME
    elif load:
        assert list(witness_problems(real, load)) == []


@pytest.fixture
def draft(tmp_path):
    write_tensors(tmp_path / "model.safetensors", FROZEN | TRAINED, 3)
    (tmp_path / "config.json").write_text(json.dumps(flatten(NESTED)))
    return tmp_path


def differences(vllm, draft, planted) -> list[str]:
    """What the witness finds when the tensors are `planted` while the simulation saw the good checkpoint."""
    _, load = judged(draft)
    write_tensors(draft / "model.safetensors", planted, 3)
    return [problem.where for problem in witness_problems(vllm.load(draft, load), load)]


def test_a_good_checkpoint_has_no_difference(vllm, draft):
    assert differences(vllm, draft, FROZEN | TRAINED) == []


def test_a_missing_tensor_is_seen(vllm, draft):
    without = {name: each for name, each in TRAINED.items() if name != "norm.weight"}
    assert differences(vllm, draft, FROZEN | without) == ["model.norm.weight", "norm.weight"]


def test_a_missing_part_of_a_fused_parameter_is_seen(vllm, draft):
    name = "layers.0.self_attn.k_proj.weight"
    without = {each: shape for each, shape in TRAINED.items() if each != name}
    assert differences(vllm, draft, FROZEN | without) == ["model.layers.0.self_attn.qkv_proj.weight", name]


def test_a_tensor_that_goes_elsewhere_is_seen(vllm, draft):
    """gate and up have one shape and one parameter: only their values tell which rows each fills."""
    gate = next(tensor for tensor in read_header(draft / "model.safetensors").tensors if "gate_proj" in tensor.name)
    data = bytearray((draft / "model.safetensors").read_bytes())
    data[gate.begin : gate.end] = bytes([9]) * (gate.end - gate.begin)
    (draft / "model.safetensors").write_bytes(data)
    _, load = judged(draft)
    assert list(witness_problems(vllm.load(draft, load), load)) == []
    states = [
        replace(state, parameter=replace(state.parameter, parts=state.parameter.parts[::-1]))
        for state in load.parameters
    ]
    wrong = replace(load, parameters=tuple(states))
    found = {problem.where for problem in witness_problems(vllm.load(draft, wrong), wrong)}
    assert {"layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"} <= found


def test_a_refusal_that_was_not_simulated_is_seen(vllm, draft):
    assert differences(vllm, draft, FROZEN | TRAINED | {"other.weight": ("BF16", (1,))}) == ["the load"]


def test_a_parameter_that_the_table_does_not_have_is_seen(draft):
    _, load = judged(draft)
    states = {state.parameter.name: "filled" for state in load.parameters}
    shapes = {
        state.parameter.name: (
            sum(part.shape[0] for part in state.parameter.parts),
            *state.parameter.parts[0].shape[1:],
        )
        for state in load.parameters
    }
    real = EngineLoad("X", states | {"model.new.weight": "unset"}, shapes | {"model.new.weight": (1,)}, "", ())
    assert [problem.where for problem in witness_problems(real, load)] == ["model.new.weight"]
