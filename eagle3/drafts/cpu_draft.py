"""speculators' EAGLE-3 forward for a CPU: the same weights, loss and proposals, without the work that leads nowhere.

T positions of a row, R positions drafted from, U positions with a target, S unrolled steps, H hidden, K draft
vocabulary.

The library (0.9.0, models/eagle3/core.py) computes every layer, logits [T, K], the loss and an argmax for every
position and step, and attends through dense masks [T, S*T]. But only a position with a target s places to its right
needs step s, and what it attends to lies in its own document. So here

- the last layer draws queries, and the head logits, from the R positions that have a target at some step; the others
  give the keys and values of step 0 and nothing else;
- attention runs per document: all its step-0 keys up to the position, and the position's own later ones;
- the embedding's half of the first projection, the same at every step but for a shift, is computed once;
- head, softmax, KL divergence, its gradient and the accuracy go together, a few rows at a time, so that no tensor
  [U, K] is written to memory; the targets are computed once for all steps.

`tests/test_cpu_draft.py` compares losses, gradients and proposals with the library's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from speculators.losses import LossConfig
from speculators.model import SpeculatorModel
from speculators.models.eagle3 import Eagle3DraftModel

from eagle3.drafts.cpu_attention import Block, document_attention
from eagle3.drafts.cpu_head import head_argmax, head_loss
from eagle3.drafts.cpu_norm import rms_norm, rotated

LOSS_EPSILON = 1e-5  # speculators 0.9.0, losses/utils.py _LOSS_REDUCTION_EPS


@dataclass(frozen=True)
class Layout:
    """Which positions of a row are worth computing.

    whole: every document with queries at all its positions. row_SU: the row of R that proposes target u at step s;
    valid_SU: False where that lies before its document.
    """

    blocks: tuple[Block, ...]
    whole: tuple[Block, ...]
    used: int
    positions_R: torch.Tensor
    targets_U: torch.Tensor
    row_SU: torch.Tensor
    valid_SU: torch.Tensor


def layout_of(document_ids_T: torch.Tensor, loss_mask_T: torch.Tensor, steps: int) -> Layout:
    """The layout of a packed row; documents lie side by side from position 0, padding (-1) behind them.

    A document without a target has no queries: nobody needs it.
    """
    used = int((document_ids_T >= 0).sum())
    assert bool((document_ids_T[:used] >= 0).all()), "padding between documents"
    blocks: list[Block] = []
    whole: list[Block] = []
    begins_T = torch.zeros(len(document_ids_T), dtype=torch.int64)
    begin = row = 0
    for length in document_ids_T[:used].unique_consecutive(return_counts=True)[1].tolist():
        end = begin + length
        begins_T[begin:end] = begin
        whole.append(Block(begin, begin, end, begin))
        supervised = loss_mask_T[begin:end].nonzero()
        if len(supervised):
            first = max(begin, begin + int(supervised[0]) - (steps - 1))
            blocks.append(Block(begin, first, end, row))
            row += end - first
        begin = end
    positions_R = torch.cat([torch.arange(0), *(torch.arange(block.first, block.end) for block in blocks)])
    row_T = torch.zeros(len(document_ids_T), dtype=torch.int64)
    row_T[positions_R] = torch.arange(len(positions_R))
    targets_U = loss_mask_T.nonzero().squeeze(1)
    from_SU = targets_U - torch.arange(steps).unsqueeze(1)
    valid_SU = from_SU >= begins_T[targets_U]
    return Layout(tuple(blocks), tuple(whole), used, positions_R, targets_U, row_T[from_SU.clamp(min=0)], valid_SU)


@SpeculatorModel.register("eagle3-cpu")  # the Trainer refuses a class that the registry does not know
class CpuEagle3DraftModel(Eagle3DraftModel):
    """Same parameters, checkpoint and arguments; losses other than `kl_div` take the library's own forward."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        document_ids: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        verifier_last_hidden_states: torch.Tensor | None = None,
        ttt_steps: int = 3,
        ttt_step_loss_decay: float = 1.0,
        loss_config: LossConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """The library's arguments. Without targets: draft ids [1, T] per step, 0 where a step is not needed.

        With them: (no draft ids, loss, metrics), the metrics without the library's conditional accuracies.
        """
        if loss_config is not None and list(loss_config) != ["kl_div"]:
            return super().forward(
                hidden_states, input_ids, document_ids, loss_mask, position_ids, verifier_last_hidden_states,
                ttt_steps, ttt_step_loss_decay, loss_config, **kwargs,
            )  # fmt: skip
        assert loss_mask is not None
        assert position_ids is not None
        layout = layout_of(document_ids[0], loss_mask[0], ttt_steps)
        unrolled_SRH = self._unroll(hidden_states[0], input_ids[0], position_ids[0], layout)
        flat_SU = layout.row_SU + len(layout.positions_R) * torch.arange(ttt_steps).unsqueeze(1)
        hidden_SUH = unrolled_SRH.flatten(0, 1).index_select(0, flat_SU.flatten()).view(*flat_SU.shape, -1)
        if verifier_last_hidden_states is None:
            return self._proposals(hidden_SUH, layout, document_ids.shape[1])
        targets_UH = rms_norm(verifier_last_hidden_states[0, layout.targets_U], self.verifier_norm)
        counts_S = layout.valid_SU.sum(1, keepdim=True)
        decay_S = ttt_step_loss_decay ** torch.arange(ttt_steps).unsqueeze(1)
        weights_SU = layout.valid_SU * decay_S / (counts_S + LOSS_EPSILON)
        losses_S, correct_SU = head_loss(hidden_SUH, targets_UH, *self._heads(), weights_SU)
        return [], losses_S.sum(), _metrics(losses_S.detach(), correct_SU, layout, loss_mask[0])

    def _unroll(
        self, aux_TX: torch.Tensor, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        """What the head reads, [S, R, H], from the aux states side by side."""
        used, steps = layout.used, len(layout.row_SU)
        ids = F.pad(input_ids_T, (0, steps))[: used + steps]
        embeds = rms_norm(self.embed_tokens(ids), self.layers[0].input_layernorm).bfloat16()
        rope = [
            self._rope(position_ids_T[:used]),
            *(self._rope(position_ids_T[layout.positions_R] + s) for s in range(steps)),
        ]
        runs = [_LayerRun(self, index, layout, embeds, rope) for index in range(len(self.layers))]
        hidden = self._combined(aux_TX[:used])
        outputs = []
        for step in range(steps):
            for run in runs:
                hidden = run(hidden, step)
            normed = rms_norm(hidden, self.norm)
            outputs.append(normed)
            hidden = normed if self.config.norm_output else hidden
        return torch.stack(outputs)

    def _combined(self, aux_TX: torch.Tensor) -> torch.Tensor:
        """The aux states, normed as configured, through fc: [T, H] in float32, as beside the library's embeddings."""
        if self.input_norm is not None:
            aux_TX = rms_norm(aux_TX, self.input_norm)
        if self.fc_norm is not None:
            parts = aux_TX.chunk(len(self.fc_norm), dim=-1)
            aux_TX = torch.cat([rms_norm(part, norm) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        combined: torch.Tensor = self.fc(aux_TX).float()
        return combined

    def _heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft's and the verifier's head in bfloat16, cast once: both are frozen."""
        weights = self.lm_head.weight, self.verifier_lm_head.weight
        versions = [(weight.data_ptr(), weight._version) for weight in weights]
        if getattr(self, "_head_versions", None) != versions:
            self._head_versions = versions
            self._bfloat16_heads = tuple(weight.detach().bfloat16() for weight in weights)
        return self._bfloat16_heads

    def _rope(self, position_ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [N, 1, D] in float32."""
        cos, sin = self.rotary_emb(torch.empty(0), position_ids_N.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def _proposals(self, hidden_SUH: torch.Tensor, layout: Layout, total: int) -> list[torch.Tensor]:
        drafted_ST = torch.zeros(len(hidden_SUH), total, dtype=torch.int64)
        found_SU = head_argmax(hidden_SUH, self._heads()[0])
        for step, (found_U, valid_U) in enumerate(zip(found_SU, layout.valid_SU, strict=True)):
            drafted_ST[step, layout.targets_U[valid_U] - step] = found_U[valid_U]
        return list(drafted_ST.unsqueeze(1))


class _LayerRun:
    """One decoder layer over a row: keys and values of step 0 at every position, those of later steps at R positions.

    `rope`: tables for every position, then for the R positions at each step. Called once per step, in order.
    """

    def __init__(
        self, model: CpuEagle3DraftModel, index: int, layout: Layout, embeds: torch.Tensor, rope: list[Any]
    ) -> None:
        self.layer, self.layout, self.rope = model.layers[index], layout, rope
        self.first, self.last = index == 0, index == len(model.layers) - 1
        self.normed_residual = self.first and model.config.norm_before_residual
        self.window = model.sliding_window if index in model.sliding_window_indices else None
        attention = self.layer.self_attn
        self.head_dim, self.query_width = attention.head_dim, attention.q_proj.out_features
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.weight = torch.cat([each.weight for each in projections]).bfloat16()
        self.bias = (
            torch.cat([each.bias for each in projections]).bfloat16() if attention.q_proj.bias is not None else None
        )
        if self.first:
            self._project_embeddings(embeds, len(rope) - 1)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def _project_embeddings(self, embeds: torch.Tensor, steps: int) -> None:
        """The embedding's half: of all positions, and of the R ones, which see a later token at each step."""
        of_embeds, self.weight = self.weight.chunk(2, dim=1)
        products = F.linear(embeds, of_embeds, self.bias)
        shifted = self.layout.positions_R + torch.arange(steps).unsqueeze(1)
        self.of_all = products[: self.layout.used]
        self.of_steps = products.index_select(0, shifted.flatten()).view(*shifted.shape, -1)

    def __call__(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """hidden: of every position at step 0, else of R; so is the result, but for R from the last layer at step 0."""
        layer, rows_R = self.layer, self.layout.positions_R
        normed = rms_norm(hidden, layer.hidden_norm if self.first else layer.input_layernorm)
        residual = normed if self.normed_residual else hidden
        normed = normed.bfloat16()
        narrow = step > 0 or self.last
        rope = self.rope[1 + step if narrow else 0]
        if step > 0:
            query, key_value = self._project(normed, step).split([self.query_width, self.key_width], dim=1)
            self._remember(key_value, rope)
        else:
            self._remember(self._project(normed, None, slice(self.query_width, None)), self.rope[0])
            if narrow:
                normed, residual = normed.index_select(0, rows_R), residual.index_select(0, rows_R)
            query = self._project(normed, 0 if narrow else None, slice(self.query_width))
        blocks = self.layout.blocks if narrow else self.layout.whole
        query = rotated(query.unflatten(1, (-1, self.head_dim)), *rope)
        hidden = residual + layer.self_attn.o_proj(
            document_attention(query, self.keys, self.values, blocks, self.window)
        )
        return hidden + layer.mlp(rms_norm(hidden, layer.post_attention_layernorm).bfloat16())

    @property
    def key_width(self) -> int:
        """Keys and values together."""
        return self.weight.shape[0] - self.query_width

    def _project(self, normed: torch.Tensor, step: int | None, columns: slice = slice(None)) -> torch.Tensor:
        """Queries, keys and values, or some columns; `step`: that of R positions, None for every position at step 0."""
        weight = self.weight[columns]
        if not self.first:
            return F.linear(normed, weight, None if self.bias is None else self.bias[columns])
        of_embeds = self.of_all if step is None else self.of_steps[step]
        return torch.addmm(of_embeds[:, columns], normed, weight.t())

    def _remember(self, projected: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        key, value = projected.unflatten(1, (-1, self.head_dim)).chunk(2, dim=1)
        self.keys.append(rotated(key, *rope))
        self.values.append(value)


def _metrics(
    losses_S: torch.Tensor, correct_SU: torch.Tensor, layout: Layout, loss_mask_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The library's sums and totals: loss per step, and steps 0..s all right among the positions with a target."""
    one = torch.tensor(1.0)
    metrics = {"loss_sum": losses_S.sum(), "loss_total": one}
    alive_T = loss_mask_T.clone()
    for step, (loss, correct_U, valid_U) in enumerate(zip(losses_S, correct_SU, layout.valid_SU, strict=True)):
        right_T = torch.zeros_like(alive_T)
        right_T[layout.targets_U[valid_U & correct_U] - step] = True
        alive_T &= right_T
        metrics |= {f"loss_{step}_sum": loss, f"loss_{step}_total": one}
        metrics |= {f"full_acc_{step}_sum": alive_T.sum().float(), f"full_acc_{step}_total": valid_U.sum().float()}
    return metrics
