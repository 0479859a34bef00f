"""Chosen conversations -> samples, block by block under a progress bar, with the accounting that has to close."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3.params import SampleParams
from eagle3.sampling.answers import Answering
from eagle3.sampling.conversations import Conversation, Skipped, SkippedFile
from eagle3.sampling.kept import keep
from eagle3.sampling.prompt_selection import Selection
from eagle3.sampling.regenerated import regenerate
from eagle3.sampling.samples import Sample
from eagle3.sampling.turns import TurnCounts, Unusable, keeps_answers, lost, usable_prompt
from eagle3.verifiers.chat_tokenizer import Chat, TemplateRefusal


def blocks(rows: Sequence[Conversation], size: int) -> Iterator[Sequence[Conversation]]:
    """About `size` rows each, in the order of their ids, ended by ids: one row more or less moves the ends next to it.

    So a conversation more leaves most batches, and with them the bits of their answers and the shards of their states,
    as they were. A block ends at the first id divisible by half the size (two at least) after half as many rows.
    """
    least, every, begin = max(1, size // 2), min(size, max(2, size // 2)), 0
    rows = sorted(rows, key=lambda row: row.conversation_id)
    for end, row in enumerate(rows, 1):
        if end == len(rows) or (end - begin >= least and int(row.conversation_id, 16) % every == 0):
            yield rows[begin:end]
            begin = end


class SampleMaking:
    """Makes the samples of one run. turns: those of the conversations that gave samples."""

    def __init__(self, answering: Answering, chat: Chat, sample: SampleParams, skipped: SkippedFile) -> None:
        self._answering, self._chat, self._sample, self._skipped = answering, chat, sample, skipped
        self.turns = TurnCounts()
        self._kept = 0

    def unusable(self, row: Conversation, split: str) -> Skipped | None:
        """Why the first turn of this conversation cannot be used in this split, before it takes a place in line."""
        if row.tools and (dropped := self._tools_dropped(row)):
            return dropped
        if keeps_answers(self._sample, split):
            kept = keep(row, self._chat, self._sample)
            return kept if isinstance(kept, Skipped) else None
        found = usable_prompt(self._chat, row.prompt, row, self._sample)
        return Skipped(row.source, row.key, found.reason, found.detail) if isinstance(found, Unusable) else None

    def _tools_dropped(self, row: Conversation) -> Skipped | None:
        try:
            if self._chat.prompt_ids(row.prompt, row.tools) == self._chat.prompt_ids(row.prompt):
                return Skipped(row.source, row.key, "template_drops", "tools")
        except TemplateRefusal as refusal:
            return Skipped(row.source, row.key, "template_refuses", str(refusal))
        return None

    def samples(self, rows: Sequence[Conversation], split: str) -> Iterator[Sample]:
        """The samples of a split; a conversation that failed is written down as skipped."""
        from tqdm import tqdm

        with tqdm(total=len(rows), desc=f"{split} answers", unit="conversation", mininterval=1.0) as bar:
            for block in blocks(rows, self._answering.chunk_size(split)):
                made: set[str] = set()
                for one in self._made(block, split):
                    if isinstance(one, Sample):
                        made.add(one.conversation_id)
                        yield one
                    else:
                        self._skipped.add(one)
                self._kept += len(made)
                bar.update(len(block))
                rate = self._answering.rates[split]
                bar.set_postfix_str(f"{rate.per_second:.0f} tokens/s" if rate.tokens else "nothing generated now")

    def _made(self, rows: Sequence[Conversation], split: str) -> Iterator[Sample | Skipped]:
        if not keeps_answers(self._sample, split):
            yield from regenerate(rows, split, self._answering, self._chat, self._sample, self.turns)
            return
        for row in rows:
            kept = keep(row, self._chat, self._sample)
            assert not isinstance(kept, Skipped), "looked at before it was chosen"
            samples, turns = kept
            self.turns.add(turns)
            yield from samples

    def closed_counts(self, selection: Selection) -> tuple[dict[str, int], dict[str, int]]:
        """Counts of the manifest, and rows skipped by reason.

        read = kept + skipped + failed, in conversations, and turns read = answered + left; else `InvalidInput`: a row
        or a turn was lost, which is a fault of the stage.
        """
        by_reason = dict(sorted(self._skipped.by_reason.items()))
        failed = by_reason.pop("failed", 0)
        counts = {"read": selection.read, "kept": self._kept, "skipped": sum(by_reason.values()), "failed": failed}
        if selection.read != self._kept + counts["skipped"] + failed:
            raise lost("rows", ", ".join(f"{name} {count}" for name, count in counts.items()))
        self.turns.require_closed()
        return counts, by_reason
