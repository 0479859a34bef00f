"""Which conversations are asked: rows -> prompts by split, within length and budget, every other row counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle3.params import SampleParams
from eagle3.problems import InvalidInput, Problem
from eagle3.sampling.conversations import (
    SPLITS,
    Conversation,
    Row,
    Skipped,
    split_of,
    within_budget,
    without_duplicates,
)
from eagle3.verifiers.chat_tokenizer import TemplateRefusal

Render = Callable[[list[dict[str, str]]], list[int]]


@dataclass(frozen=True)
class Selection:
    """read = rows in prompts + counts of skipped. prompts: split -> conversations, lowest hash first."""

    read: int
    prompts: dict[str, list[Conversation]]
    input_ids: dict[str, list[int]]
    skipped: list[Skipped]

    @property
    def skipped_by_reason(self) -> dict[str, int]:
        return count_by_reason(self.skipped)


def count_by_reason(skipped: Iterable[Skipped]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for entry in skipped:
        counts[entry.reason] += entry.count
    return dict(sorted(counts.items()))


def select(rows: list[Row], sample: SampleParams, vocab_size: int, render: Render) -> Selection:
    """Duplicates go first, then what cannot be rendered or is too long, then the surplus over each split's budget.

    render: messages -> token ids, `TemplateRefusal` where the chat template refuses. input_ids of the result are by
    conversation_id. `InvalidInput` when a split is left with too few prompts.
    """
    skipped = [row for row in rows if isinstance(row, Skipped)]
    distinct, repeated = without_duplicates(row for row in rows if isinstance(row, Conversation))
    skipped += repeated
    by_split: dict[str, list[Conversation]] = {split: [] for split in SPLITS}
    input_ids: dict[str, list[int]] = {}
    for row in distinct:
        ids = _rendered(row, sample, vocab_size, render)
        if isinstance(ids, Skipped):
            skipped.append(ids)
        else:
            input_ids[row.conversation_id] = ids
            by_split[split_of(row.opening_sha256, sample.val_percent, sample.eval_percent)].append(row)
    maxima = {"train": sample.max_train, "val": sample.max_val, "eval": sample.max_eval}
    for split in SPLITS:
        by_split[split], surplus = within_budget(by_split[split], split, maxima[split])
        skipped += surplus
    selection = Selection(len(rows), by_split, input_ids, skipped)
    if problems := _shortages(selection, {"train": 1, "val": 1, "eval": sample.min_eval}):
        raise InvalidInput(*problems)
    return selection


def _rendered(row: Conversation, sample: SampleParams, vocab_size: int, render: Render) -> list[int] | Skipped:
    """Token ids that the engine takes for certain: one it refused would fail the whole call."""
    try:
        ids = render(row.prompt)
    except TemplateRefusal as refusal:
        return Skipped(row.source, row.key, "template_refuses", str(refusal))
    room = sample.max_model_len - sample.max_new_tokens
    if len(ids) > room:
        return Skipped(row.source, row.key, "too_long", f"{len(ids)} tokens, room for {room}")
    if max(ids) >= vocab_size:
        return Skipped(row.source, row.key, "token_out_of_vocabulary", f"token id {max(ids)} of {vocab_size}")
    return ids


def _shortages(selection: Selection, minima: dict[str, int]) -> list[Problem]:
    reasons = ", ".join(f"{reason} {count}" for reason, count in selection.skipped_by_reason.items())
    return [
        Problem(
            "too-few-prompts",
            f"sample: the {split} split",
            f"{len(selection.prompts[split])} prompts of {selection.read} rows (skipped: {reasons or 'none'})",
            f"at least {minimum}",
            "add conversations (sample.sources)"
            + (", raise sample.eval_percent, or lower sample.min_eval" if split == "eval" else ""),
        )
        for split, minimum in minima.items()
        if len(selection.prompts[split]) < minimum
    ]
