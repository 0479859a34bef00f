"""A verifier whose projections are compressed-tensors' INT4: vLLM's states against transformers', and its own head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.layer_ids import stored_layer_ids
from eagle3.machine import DEFAULT
from eagle3.params import VerifierParams
from eagle3.states.extraction import extract_shards, start_extraction
from eagle3.states.shard_plan import plan_shards
from eagle3.states.vllm_engine import stop_engine
from eagle3.states.witness import check_parity, first_samples
from eagle3.verifiers.verifier import resolve_verifier
from tests.shapes import quantise
from tests.test_extract_stage import greedy_samples
from tests.tiny import tiny_verifier

pytestmark = pytest.mark.engine

LAYER_IDS = stored_layer_ids([1, 3, 5], 6)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantise(tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny"))


@pytest.fixture(scope="module")
def engine(verifier: Path) -> Any:
    resolved = resolve_verifier(VerifierParams(str(verifier), None, None, False))
    llm = start_extraction(resolved, DEFAULT, 256, False, LAYER_IDS)
    yield llm
    stop_engine(llm)


def test_states_of_an_int4_verifier_pass_both_checks(engine, verifier, tmp_path):
    """The answers are transformers' own, of the same packed weights."""
    samples = sorted(greedy_samples(verifier, 12), key=lambda one: one.sample_id)
    shards = plan_shards(samples, {}, 10**18, len(LAYER_IDS), 64)
    done = extract_shards(engine, shards, tmp_path, LAYER_IDS, {"train", "val", "eval"})
    assert done.asked == 144
    errors = check_parity(verifier, first_samples(tmp_path, shards, 4), LAYER_IDS, "bfloat16", False)
    assert list(errors) == LAYER_IDS
