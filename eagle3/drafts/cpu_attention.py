"""Attention of a packed row on a CPU, document by document, with a gradient of its own.

N positions of the row, R of them with queries, D head size. At unrolled step s a query attends to its document's step-0
keys up to its own position, and to the keys that its own position drew at steps 1..s (speculators 0.9.0,
models/eagle3/attention.py, which says it with a mask [N, (s + 1) * N]):

    document of 3, queries at positions 1 and 2, step 2
    keys of       step 0: 0 1 2     step 1: 1 2     step 2: 1 2
    query 1               x x .             x .             x .
    query 2               x x x             . x             . x

so the later keys need no matrix product: each query has one per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Block:
    """A document: keys of positions begin..end, queries of first..end, which are rows row..row + end - first of R."""

    begin: int
    first: int
    end: int
    row: int

    @property
    def keys(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.first)

    def bias(self, window: int | None) -> torch.Tensor:
        """0 where a query may look at a step-0 key, -inf elsewhere, [queries, keys]."""
        distance = torch.arange(self.first, self.end).unsqueeze(1) - torch.arange(self.begin, self.end)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        return torch.zeros(distance.shape).masked_fill_(hidden, float("-inf"))


def document_attention(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    blocks: tuple[Block, ...],
    window: int | None,
) -> torch.Tensor:
    """[R, heads, D] over step-0 keys [N, kv heads, D] and later ones [R, kv heads, D]; [R, heads * D] in query's dtype.

    Computed in float32. `window`: step-0 keys at most window - 1 positions back; the own later keys always count.
    """
    with torch.autocast("cpu", enabled=False):
        return _DocumentAttention.apply(blocks, window, query, *keys, *values)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: tuple[Block, ...], window: int | None, *tensors: torch.Tensor) -> torch.Tensor:
        query, keys, values = _unpacked(tensors)
        out = torch.empty_like(query)
        shares = []
        for block in blocks:
            q, k, v = _Piece(query, block), _keys(keys, block), _keys(values, block)
            scores = torch.baddbmm(block.bias(window).repeat(q.group, 1), q.flat, k[0].transpose(1, 2), alpha=q.scale)
            own = [q.scale * (q.grouped * later).sum(-1) for later in k[1:]]
            share = torch.cat([scores, *(each.flatten(1).unsqueeze(2) for each in own)], dim=2).softmax(-1)
            attended = q.shaped(share[..., : block.end - block.begin] @ v[0])
            for step, later in enumerate(v[1:]):
                attended += q.shaped(share[..., block.end - block.begin + step].unsqueeze(2)) * later
            out[block.rows] = q.ungrouped(attended)
            shares.append(share)
        ctx.save_for_backward(*tensors, *shares)
        ctx.blocks = blocks
        return out.flatten(1).to(tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        count = len(ctx.saved_tensors) - len(ctx.blocks)
        tensors, shares = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        query, keys, values = _unpacked(tensors)
        slope = upstream[0].float().view_as(query)
        d_query = torch.empty_like(query)
        # positions outside every block get no gradient
        d_keys, d_values = ([torch.zeros_like(each) for each in every] for every in (keys, values))
        for block, share in zip(ctx.blocks, shares, strict=True):
            _block_backward(block, share, (query, keys, values, slope), (d_query, d_keys, d_values))
        return None, None, *(each.to(tensors[0].dtype) for each in (d_query.flatten(1, 2), *d_keys, *d_values))


def _block_backward(block: Block, share: torch.Tensor, given: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Softmax attention by the book: dS = P * (dP - sum(P * dP)), for the matrix of step 0 and the own later keys."""
    query, keys, values, slope = given
    d_query, d_keys, d_values = wanted
    q, d_out = _Piece(query, block), _Piece(slope, block)
    k, v = _keys(keys, block), _keys(values, block)
    width = block.end - block.begin
    own = [(d_out.grouped * later).sum(-1).flatten(1).unsqueeze(2) for later in v[1:]]
    d_share = torch.cat([d_out.flat @ v[0].transpose(1, 2), *own], dim=2)
    d_scores = share * (d_share - (share * d_share).sum(-1, keepdim=True)) * q.scale
    d_q = q.shaped(d_scores[..., :width] @ k[0])
    d_keys[0][block.keys] = (d_scores[..., :width].transpose(1, 2) @ q.flat).transpose(0, 1)
    d_values[0][block.keys] = (share[..., :width].transpose(1, 2) @ d_out.flat).transpose(0, 1)
    for step in range(1, len(k)):
        d_own, weight = (q.shaped(each[..., width + step - 1].unsqueeze(2)) for each in (d_scores, share))
        d_q += d_own * k[step]
        d_keys[step][block.rows] = (d_own * q.grouped).sum(1).transpose(0, 1)
        d_values[step][block.rows] = (weight * d_out.grouped).sum(1).transpose(0, 1)
    d_query[block.rows] = q.ungrouped(d_q)


class _Piece:
    """The rows of a block, queries of one kv head together.

    grouped [kv heads, group, rows, D]; flat [kv heads, group * rows, D].
    """

    def __init__(self, rows: torch.Tensor, block: Block) -> None:
        piece = rows[block.rows]
        self.rows, self.kv_heads, self.group, self.head_dim = piece.shape
        self.grouped = piece.permute(1, 2, 0, 3).contiguous()
        self.flat = self.grouped.flatten(1, 2)
        self.scale = self.head_dim**-0.5

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.kv_heads, self.group, self.rows, -1)

    @staticmethod
    def ungrouped(grouped: torch.Tensor) -> torch.Tensor:
        return grouped.permute(2, 0, 1, 3)


def _unpacked(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """query [R, kv, group, D], keys and values [., kv, D], in float32."""
    query, *rest = (each.float() for each in tensors)
    steps = len(rest) // 2
    kv_heads = rest[0].shape[1]
    return query.unflatten(1, (kv_heads, -1)), rest[:steps], rest[steps:]


def _keys(every: list[torch.Tensor], block: Block) -> list[torch.Tensor]:
    """Step 0 as [kv, keys, D], later steps as [kv, 1, rows, D]."""
    first = every[0][block.keys].transpose(0, 1)
    return [first, *(later[block.rows].transpose(0, 1).unsqueeze(1) for later in every[1:])]
