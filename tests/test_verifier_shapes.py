"""Verifiers of other shapes through the whole pipeline: `dvc repro` with the real engines, every stage as it is."""

from __future__ import annotations

import json
from functools import partial

import pytest

from eagle3.manifests import read_manifest
from tests.repository import make_repository, repro, set_params
from tests.reruns import ALL_STAGES
from tests.shapes import draft_heads, shaped_verifier

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


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
