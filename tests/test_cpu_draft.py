"""The CPU forward against the library's own, on the same weights and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from transformers.models.llama.modeling_llama import rotate_half

from eagle3.drafts import draft_model
from eagle3.drafts.cpu_attention import Block, document_attention
from eagle3.drafts.cpu_draft import CpuEagle3DraftModel, layout_of
from eagle3.drafts.cpu_head import head_argmax, head_loss
from eagle3.drafts.cpu_norm import rms_norm, rotated
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.params import DraftParams, VerifierParams, read_params
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier
from tests.training_inputs import AUX_LAYER_IDS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
DRAFT = read_params(ROOT / "params.yaml").draft
K, T, H = 128, 96, 64
WITH_OTHER_NORMS = replace(DRAFT, norm_before_residual=False, norm_before_fc=False, fc_norm=True, norm_output=False)
ARCHITECTURES = {
    "default": DRAFT,
    "other norms": WITH_OTHER_NORMS,
    "two layers": replace(DRAFT, num_hidden_layers=2),
    "three layers, other norms": replace(WITH_OTHER_NORMS, num_hidden_layers=3),
    "one query per key head": replace(DRAFT, num_key_value_heads=4, head_dim=16),
    "window": replace(DRAFT, sliding_window=7),
    "biases": replace(DRAFT, attention_bias=True, mlp_bias=True),
    "yarn": replace(
        DRAFT,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    path = tiny_verifier(tmp_path_factory.mktemp("verifier"))
    return resolve_verifier(VerifierParams(str(path), None, None, False))


def pair(monkeypatch: pytest.MonkeyPatch, verifier: Verifier, params: DraftParams) -> list[Any]:
    """The library's model and ours with the same weights."""
    ids = torch.arange(K) * 2
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[ids] = True
    architecture = resolve_architecture(params, verifier.text_config, K, AUX_LAYER_IDS)
    models = []
    for kind in (Eagle3DraftModel, CpuEagle3DraftModel):
        monkeypatch.setattr(draft_model, "draft_class", lambda shards, kind=kind: kind)
        models.append(draft_model.build_draft(architecture, verifier, (ids - torch.arange(K), t2d), 3, 0))
    for (name, tensor), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if tensor.requires_grad:
            with torch.no_grad():  # norms away from one, weights wide enough for clear preferences
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
                other.copy_(tensor)
    return models


def row(seed: int, lengths: tuple[int, ...] = (30, 9, 40), prompts: tuple[int, ...] = (5, 9, 12)) -> dict[str, Any]:
    """Three documents, the second without a target, and padding."""
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "hidden_states": torch.randn(1, T, 3 * H, generator=generator).bfloat16() * 3,
        "verifier_last_hidden_states": torch.randn(1, T, H, generator=generator).bfloat16() * 3,
        "input_ids": torch.randint(0, 320, (1, T), generator=generator),
        "document_ids": torch.full((1, T), -1),
        "position_ids": torch.zeros(1, T, dtype=torch.int64),
        "loss_mask": torch.zeros(1, T, dtype=torch.bool),
        "error_records": 0,
    }
    begin = 0
    for number, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        end = begin + length
        batch["document_ids"][0, begin:end] = number
        batch["position_ids"][0, begin:end] = torch.arange(1, length + 1)
        batch["loss_mask"][0, begin + prompt : end] = True
        begin = end
    return batch


def training_call(loss: str = "kl_div", decay: float = 1.0) -> dict[str, Any]:
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn=loss, loss_implementation="eager", ttt_steps=3, ttt_step_loss_decay=decay
    )
    return call


def step(model: Any, batch: dict[str, Any], call: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Forward and backward as the Trainer does them."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, loss, metrics = model(**batch, **call)
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_gradients_and_accuracy_are_the_librarys(monkeypatch, verifier, name):
    library, ours = pair(monkeypatch, verifier, ARCHITECTURES[name])
    call = training_call(decay=0.8)
    (loss, metrics), (our_loss, our_metrics) = (step(model, row(0), call) for model in (library, ours))
    assert our_loss == pytest.approx(loss, rel=1e-3)
    for key, value in our_metrics.items():
        assert value == pytest.approx(metrics[key], rel=2e-3, abs=2 if "acc" in key else 0), key
    for (name, tensor), other in zip(library.named_parameters(), ours.parameters(), strict=True):
        if tensor.requires_grad:
            assert other.grad is not None, name
            assert float((other.grad - tensor.grad).norm() / tensor.grad.norm()) < 0.03, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_proposals_are_the_librarys_wherever_a_round_can_look(monkeypatch, verifier, name):
    library, ours = pair(monkeypatch, verifier, ARCHITECTURES[name])
    batch = {
        name: value for name, value in row(1).items() if name not in ("verifier_last_hidden_states", "error_records")
    }
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        drafted, expected = (torch.cat(model.eval()(**batch, ttt_steps=8)) for model in (ours, library))
    wanted = torch.zeros_like(drafted, dtype=torch.bool)
    for index in range(8):
        wanted[index, batch["loss_mask"][0].roll(-index) & batch["loss_mask"][0]] = True
    # logits of a random model tie in bfloat16 now and then
    assert float((drafted == expected)[wanted].float().mean()) > 0.97


def test_fifty_steps_have_the_librarys_losses(monkeypatch, verifier):
    models = pair(monkeypatch, verifier, DRAFT)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for number in range(50):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            losses.append(step(model, row(number), training_call())[0])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert losses[1] == pytest.approx(losses[0], rel=1e-3), number


def test_the_residual_is_float32_from_the_first_layer_on(monkeypatch, verifier):
    """The library puts embeddings in float32 beside the combined states, and so gets these in float32 too."""
    library, ours = pair(monkeypatch, verifier, WITH_OTHER_NORMS)
    entered = []
    library.layers[0].register_forward_pre_hook(lambda layer, inputs: entered.append(inputs[0].chunk(2, dim=-1)[1][0]))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        library(**row(0), **training_call())
        combined = ours._combined(row(0)["hidden_states"][0])
    torch.testing.assert_close(combined, entered[0])


def test_other_losses_take_the_librarys_forward(monkeypatch, verifier):
    library, ours = pair(monkeypatch, verifier, DRAFT)
    assert step(ours, row(0), training_call("tv"))[0] == step(library, row(0), training_call("tv"))[0]


def test_the_layout_leaves_out_prompts_and_padding():
    document_ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, -1])
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]).bool()
    layout = layout_of(document_ids, mask, 3)
    assert layout.used == 10
    assert layout.blocks == (Block(0, 1, 5, 0), Block(7, 7, 10, 4))
    assert layout.positions_R.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert layout.targets_U.tolist() == [3, 4, 8, 9]
    assert layout.row_SU.tolist() == [[2, 3, 5, 6], [1, 2, 4, 5], [0, 1, 0, 4]]
    assert layout.valid_SU.tolist() == [[True] * 4, [True] * 4, [True, True, False, True]]


def test_attention_has_the_gradient_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    blocks = (Block(0, 1, 4, 0), Block(4, 4, 6, 3))

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, 4, generator=generator).requires_grad_()

    query, keys, values = draw(5, 4), [draw(6, 2), draw(5, 2)], [draw(6, 2), draw(5, 2)]
    out = document_attention(query, keys, values, blocks, None)
    expected = torch.cat([dense(query, keys, values, block) for block in blocks])
    torch.testing.assert_close(out, expected)
    leaves = [query, *keys, *values]
    slope = torch.randn(out.shape, generator=generator)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, slope), torch.autograd.grad(expected, leaves, slope), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def dense(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], block: Block) -> torch.Tensor:
    """The mask of the drawing, written out."""
    q = query[block.rows].transpose(0, 1)
    k, v = (
        torch.cat([each[0][block.keys], *(later[block.rows] for later in each[1:])])
        .transpose(0, 1)
        .repeat_interleave(2, 0)
        for each in (keys, values)
    )
    own = torch.zeros(q.shape[1], q.shape[1]).fill_(float("-inf")).fill_diagonal_(0)
    scores = q @ k.transpose(1, 2) / 2 + torch.cat([block.bias(None), own], 1)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def test_the_head_has_the_divergence_and_gradient_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 150, 8, generator=generator).requires_grad_()
    targets, head = torch.randn(150, 8, generator=generator), torch.randn(40, 8, generator=generator).bfloat16()
    weights = torch.rand(2, 150, generator=generator)
    losses, correct = head_loss(hidden, targets, head, head, weights)
    logits = hidden.bfloat16() @ head.t()
    wanted = (targets.bfloat16() @ head.t()).float()
    divergence = torch.nn.functional.kl_div(logits.float().log_softmax(-1), wanted.softmax(-1), reduction="none").sum(
        -1
    )
    expected = (divergence * weights).sum(1)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(correct, logits.argmax(-1) == wanted.argmax(-1))
    assert torch.equal(head_argmax(hidden.detach(), head), logits.argmax(-1))
    [found] = torch.autograd.grad(losses.sum(), hidden)
    [slope] = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(found, slope, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradient_are_the_librarys(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator).to(dtype).requires_grad_()
    norm = LlamaRMSNorm(16, 1e-5)
    torch.nn.init.normal_(norm.weight, generator=generator)
    slope = torch.randn(5, 16, generator=generator)
    found, wanted = rms_norm(x, norm), norm(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # rounded where it rounds
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    leaves = [x, norm.weight]
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, slope), torch.autograd.grad(wanted, leaves, slope), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **close)


def test_turning_back_is_the_gradient_of_turning():
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(5, 2, 8, generator=generator).bfloat16().requires_grad_()
    angles = torch.rand(5, 1, 4, generator=generator).repeat(1, 1, 2)
    out = rotated(heads, angles.cos(), angles.sin())
    wanted = heads.float() * angles.cos() + rotate_half(heads.float()) * angles.sin()
    torch.testing.assert_close(out, wanted.bfloat16())
    slope = torch.randn(out.shape, generator=generator)
    [found], [expected] = torch.autograd.grad(out, heads, slope.bfloat16()), torch.autograd.grad(wanted, heads, slope)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
