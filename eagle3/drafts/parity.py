"""What the draft in training says of a few positions, kept beside its checkpoint: the server has to say the same.

The logits come from speculators' own forward (0.9.0, models/eagle3/core.py), on a CPU too, where training uses ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eagle3.drafts.training_data import Document, PackedRows
from eagle3.formats.parity_probe import ParityProbe
from eagle3.states.hidden_states import HiddenStates

MAX_DOCUMENTS, MAX_POSITIONS, STARTS = 4, 192, 8


def probe_rows(states: HiddenStates, documents: Iterable[Document], total_seq_len: int, steps: int) -> PackedRows:
    """One row with the beginnings of the first documents that are long enough for a round of `steps`."""
    chosen: list[Document] = []
    room = total_seq_len
    for document in documents:
        size = min(document.positions, MAX_POSITIONS, room)
        if size >= steps and len(chosen) < MAX_DOCUMENTS:
            chosen.append(replace(document, positions=size))
            room -= size
    assert chosen, "a document with a target has a position for every step"
    return PackedRows(states, chosen, total_seq_len)


def probe_of(model: Eagle3DraftModel, rows: PackedRows, d2t_K: torch.Tensor | None, steps: int) -> ParityProbe:
    """The probe of `model` as it is now, from the row of `probe_rows`; d2t_K as in `eagle3.drafts.draft_walk`."""
    [row] = rows.rows(0)
    batch = rows.batch(row)
    sizes = [placed.document.positions for placed in row]
    used = sum(sizes)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    starts = torch.cat(
        [begin + _spread(size - steps + 1) for begin, size in zip(offsets.tolist(), sizes, strict=False)]
    )
    logits_STK = trained_logits(model, batch, steps)
    rows_K = torch.arange(logits_STK.shape[-1])
    return ParityProbe(
        batch["hidden_states"][0, :used],
        batch["input_ids"][0, :used],
        model.embed_tokens.weight.data.cpu()[batch["input_ids"][0, :used]].bfloat16(),
        offsets,
        starts,
        logits_STK[:, starts].to("cpu", torch.float32),
        rows_K if d2t_K is None else rows_K + d2t_K,
    )


def trained_logits(model: Eagle3DraftModel, batch: dict[str, Any], steps: int) -> torch.Tensor:
    """What the head gives at every position and unrolled step, [S, T, K]: caught where the library reads it.

    In float32, without training's autocast: what the server rounds is then all that may differ.
    """
    place = next(model.parameters()).device
    given = {name: batch[name].to(place) for name in ("input_ids", "document_ids", "position_ids")}
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _given, logits: seen.append(logits[0]))
    try:
        with torch.no_grad():
            states = batch["hidden_states"].to(place, torch.float32)
            Eagle3DraftModel.forward(model.eval(), states, **given, ttt_steps=steps)
    finally:
        hook.remove()
    return torch.stack(seen)


def _spread(count: int) -> torch.Tensor:
    """At most STARTS of 0 .. count - 1, evenly, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, STARTS)).round().long()
