"""What the draft in training would be accepted for: its predictions over known answers, walked as a server would.

K draft vocabulary, S unrolled steps, T positions of a row (see eagle3.drafts.training_data), n0 = length of the prompt.

    tokens          x0  x1 | x2  x3  x4          prompt x0 x1, the verifier's greedy answer x2 x3 x4, n0 = 2
    position j       0   1    2   3              holds hidden state j and token j + 1
    step 0 at j     x2  x3   x4   -              proposed from state j and token j + 1        = predictions[0][j]
    step 1 at j     x3  x4    -   -              ... and token j + 2                          = predictions[1][j]

    round at n = 2 (x2 is known: the verifier gave it): looks at j = n - 1 = 1, proposes x3, then x4.

Step s at position j attends to the document's step-0 entries up to j and to its own entries of the steps before, in
training (speculators 0.9.0 models/eagle3/attention.py) as in a server, which has rewritten all earlier positions from
the verifier's states. Proposals are compared in verifier ids (i + d2t[i]): a token outside the draft vocabulary is
never right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.acceptance import Acceptance, acceptance_of, right_drafts, walk, without_loops
from eagle3.drafts.training_data import PackedRows

# params allow up to this many draft tokens per round (serve_test.num_speculative_tokens).
MAX_DRAFT_TOKENS = 8
WALKED_SPLITS = ("val", "eval")

# What the model draws at each step, in draft ids: a list of S tensors [1, T].
Draft = Callable[[dict[str, torch.Tensor], int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Walked:
    """One sample: its tokens and how many drafts each round over its answer would have right (`right_drafts`)."""

    sample_id: str
    split: str
    tokens_T: list[int]
    num_prompt: int
    right_n: list[int]

    def acceptance(self, k: int, loops: bool = True) -> Acceptance:
        """Counts of a server that drafts k tokens; without `loops`, rounds inside a repeated 8-gram are left out."""
        rounds = walk(self.right_n, self.num_prompt, k)
        return acceptance_of(rounds if loops else without_loops(rounds, self.tokens_T), k)


def predict(draft: Draft, rows: PackedRows, d2t_K: torch.Tensor | None) -> list[Walked]:
    """Every document of `rows`, walked, in the order of the rows.

    d2t_K: offsets int64, verifier id = i + d2t[i]; None where both vocabularies are one. `draft` gets the batch without
    targets, and in `loss_mask` the positions at which a round can look; it may leave all others undrafted.
    """
    walked = []
    for row in rows.rows(rows.epoch):
        batch = _untargeted(rows.batch(row))
        for placed in row:
            first, end = rows.states.get(placed.document.sample_id).num_prompt - 1, placed.document.positions
            batch["loss_mask"][0, placed.start + first : placed.start + end] = True
        drafted_ST = torch.cat([step.cpu() for step in draft(batch, MAX_DRAFT_TOKENS)])
        if d2t_K is not None:
            drafted_ST = drafted_ST + d2t_K[drafted_ST]
        for placed in row:
            sample = rows.states.get(placed.document.sample_id)
            tokens = sample.input_ids_T[: placed.document.positions + 1].tolist()
            proposed = drafted_ST[:, placed.start : placed.start + placed.document.positions].tolist()
            right = right_drafts(proposed, tokens, sample.num_prompt)
            walked.append(Walked(sample.sample_id, sample.split, tokens, sample.num_prompt, right))
    return walked


def _untargeted(batch: dict[str, Any]) -> dict[str, Any]:
    left_out = ("verifier_last_hidden_states", "error_records")
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    return {name: value for name, value in batch.items() if name not in left_out}


def walk_table(walked: Iterable[Walked], loops: bool = True) -> dict[str, dict[str, Any]]:
    """`{split: {"1": Acceptance.as_dict(), … "8": …}}` for val and eval, the counts of a split's samples added up."""
    lengths = range(1, MAX_DRAFT_TOKENS + 1)
    table = {split: {k: Acceptance(0, (0,) * k) for k in lengths} for split in WALKED_SPLITS}
    for sample in walked:
        for k in lengths:
            table[sample.split][k] += sample.acceptance(k, loops)
    return {split: {str(k): found.as_dict() for k, found in rows.items()} for split, rows in table.items()}
