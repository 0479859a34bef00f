"""The witness of stored hidden states: a float32 forward of transformers over tiny verifiers of several shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.problems import InvalidInput
from eagle3.states import witness
from eagle3.states.hidden_states import SampleStates
from eagle3.states.witness import check_parity, relative_error
from tests.tiny import tiny_verifier

LAYER_IDS = [0, 1, 3, 6]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"))


def bf16_states(folder: Path, layer_ids: list[int]) -> SampleStates:
    """What an engine would store: a bf16 forward, taken from transformers' own outputs, not by the witness's hooks."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
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


def shape(name: str) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    common |= {"num_attention_heads": 4, "initializer_range": 0.2, "max_position_embeddings": 128}
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=2, head_dim=32))
    mla = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    sizes = {"moe_intermediate_size": 32, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**common, **mla, **experts, **sizes))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_other_shapes_of_verifiers_have_a_witness_too(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape(name).to(torch.bfloat16).save_pretrained(tmp_path)
    assert max(check(tmp_path, bf16_states(tmp_path, [1, 2, 4]), [1, 2, 4]).values()) < 0.08


def test_a_verifier_without_a_witness_names_the_way_out(
    verifier: Path, stored: SampleStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(InvalidInput, match=r"extract\.parity_samples=0"):
        check(tmp_path, stored)
    monkeypatch.setattr(witness, "_available_memory", lambda: 1_000_000)
    with pytest.raises(InvalidInput, match="GB of memory available"):
        check(verifier, stored)
