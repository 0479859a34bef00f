"""Verifiers of other shapes through the whole pipeline: `dvc repro` with the real engines, every stage as it is."""

from __future__ import annotations

import json
from functools import partial

import pytest

from eagle3.manifests import read_manifest
from tests.repository import make_repository, repro, run, set_params
from tests.reruns import ALL_STAGES
from tests.shapes import draft_heads, shaped_verifier

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("shape", ["deepseek_v3", "kimi_k2", "kimi_k25"])
def test_latent_attention_comes_as_far_as_the_cpu_build_serves_a_draft_with_it(shape, tmp_path):
    """Every stage but the server, under a nested config too; vLLM's own words say why (README, known limits)."""
    folder = make_repository(tmp_path, partial(shaped_verifier, shape=shape))
    set_params(folder, {"draft": draft_heads(shape)})
    done = run(folder, "dvc", "repro", check=False)
    assert "No common block size for 16 (CPU_MLA: [16]; CPU_ATTN:" in done.stdout + done.stderr
    states = read_manifest(folder / "data/hidden_states", "extract")
    assert (states.decisions["parity"]["samples"], states.decisions["num_hidden_layers"]) == (4, 6)
    assert (folder / "reports/simulate_weight_load.json").is_file()
    assert not (folder / "data/release").exists()


@pytest.mark.parametrize("shape", ["qwen3"])
def test_a_verifier_of_this_shape_becomes_a_release(shape, tmp_path):
    """The gates are passed too: among them the answers of the server with the draft and without it."""
    folder = make_repository(tmp_path, partial(shaped_verifier, shape=shape))
    set_params(folder, {"draft": draft_heads(shape)})
    assert sorted(repro(folder)) == sorted(ALL_STAGES)
    states = read_manifest(folder / "data/hidden_states", "extract")
    assert states.decisions["parity"]["samples"] == 4
    assert states.decisions["num_hidden_layers"] == 6
    report = json.loads((folder / "reports/serve_test.json").read_text())
    assert report["served"]["rounds"] > 0
    assert all(gate["passed"] for gate in report["gates"].values())
    assert (folder / "data/release/model.safetensors.index.json").is_file()
