"""The witness of stored hidden states: a float32 forward of transformers over tiny verifiers of several shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3.problems import InvalidInput
from eagle3.states.hidden_states import SampleStates
from eagle3.states.witness import check_parity, relative_error
from eagle3.verifiers import reference_model
from tests.shapes import shaped_verifier
from tests.tiny import tiny_verifier

LAYER_IDS = [0, 1, 3, 6]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"))


def bf16_states(folder: Path, layer_ids: list[int]) -> SampleStates:
    """What an engine would store: a bf16 forward, taken from transformers' own outputs, not by the witness's hooks."""
    import transformers

    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, name.replace("KimiK25", "Kimi_K25"))
    model = model_class.from_pretrained(folder, dtype=torch.bfloat16).eval()
    input_ids_T = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(0))
    last: dict[str, torch.Tensor] = {}
    decoder = model.get_decoder()
    hook = decoder.norm.register_forward_pre_hook(lambda _, args: last.update(x=args[0]))
    with torch.inference_mode():
        hidden = model(input_ids_T[None], output_hidden_states=True).hidden_states
    hook.remove()
    states = [last["x"][0] if layer_id == len(decoder.layers) else hidden[layer_id][0] for layer_id in layer_ids]
    mask_T = torch.arange(40) >= 20
    return SampleStates("a", "train", 20, torch.stack(states, 1), input_ids_T.int(), mask_T)


@pytest.fixture(scope="module")
def stored(verifier: Path) -> SampleStates:
    return bf16_states(verifier, LAYER_IDS)


def check(verifier: Path, stored: SampleStates, layer_ids: list[int] = LAYER_IDS) -> dict[int, float]:
    return check_parity(verifier, [stored], layer_ids, "bfloat16", False)


def with_slice(stored: SampleStates, index: int, states_TH: torch.Tensor) -> SampleStates:
    hidden_TAH = stored.hidden_TAH.clone()
    hidden_TAH[:, index] = states_TH
    return SampleStates(stored.sample_id, "train", 20, hidden_TAH, stored.input_ids_T, stored.loss_mask_T)


def test_states_of_the_right_layers_pass_within_the_rounding_of_their_dtype(
    verifier: Path, stored: SampleStates
) -> None:
    errors = check(verifier, stored)
    assert list(errors) == LAYER_IDS
    assert errors[0] == 0, "embeddings are not computed"
    assert 0 < max(errors.values()) < 0.08


def test_ids_that_are_one_off_are_told_by_the_nearer_layer(verifier: Path, stored: SampleStates) -> None:
    with pytest.raises(InvalidInput) as error:
        check(verifier, stored, [0, 2, 4, 6])
    places = [problem.where for problem in error.value.problems]
    assert places == ["extract: sample a, layer id 2", "extract: sample a, layer id 4"]
    assert "nearer to layer id 1" in error.value.problems[0].found


def test_a_normed_last_state_a_shifted_row_and_other_tokens_are_refused(verifier: Path, stored: SampleStates) -> None:
    last = stored.hidden_TAH[:, 3].float()
    faults = (last / last.square().mean(-1, keepdim=True).sqrt(), last.roll(1, 0), last * 1.2, last * float("nan"))
    for wrong in faults:
        with pytest.raises(InvalidInput, match=r"states-without-parity: extract: sample a, layer\s+id 6"):
            check(verifier, with_slice(stored, 3, wrong.to(torch.bfloat16)))


def test_states_of_other_weights_are_refused(stored: SampleStates, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="states-without-parity"):
        check(tiny_verifier(tmp_path / "other", seed=1), stored)


def test_the_first_token_does_not_hide_the_others() -> None:
    witness_TH = torch.ones(5, 4)
    witness_TH[0] = 1000
    stored_TH = witness_TH.clone()
    stored_TH[1:] = 1.5
    assert relative_error(stored_TH, witness_TH) == pytest.approx(0.5)
    assert relative_error(stored_TH[:1], witness_TH[:1]) == 0


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "kimi_k25"])  # kimi_k2: tests/test_reference_model.py
def test_other_shapes_of_verifiers_have_a_witness_too(name: str, tmp_path: Path) -> None:
    shaped_verifier(tmp_path, name)
    assert max(check(tmp_path, bf16_states(tmp_path, [1, 2, 6]), [1, 2, 6]).values()) < 0.08


def test_where_tokens_are_routed_one_that_went_elsewhere_is_not_the_error_of_all() -> None:
    witness_TH = torch.ones(8, 4)
    stored_TH = witness_TH * 1.01
    stored_TH[5] = 3
    assert relative_error(stored_TH, witness_TH) > 0.5
    assert relative_error(stored_TH, witness_TH, routed=True) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(witness_TH.flip(1) * 2, witness_TH, routed=True) == pytest.approx(1)


def test_the_neighbour_of_a_layer_is_refused_where_tokens_are_routed(tmp_path: Path) -> None:
    shaped_verifier(tmp_path, "deepseek_v3")
    stored = bf16_states(tmp_path, [1, 3, 6])
    with pytest.raises(InvalidInput, match=r"layer id 2\n.*nearer to layer"):
        check(tmp_path, stored, [1, 2, 6])


def test_a_verifier_without_a_witness_names_the_way_out(
    verifier: Path, stored: SampleStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(InvalidInput, match=r"extract\.parity_samples=0"):
        check(tmp_path, stored)
    monkeypatch.setattr(reference_model, "available_memory", lambda: 1_000_000)
    with pytest.raises(InvalidInput, match="GB of memory available"):
        check(verifier, stored)
