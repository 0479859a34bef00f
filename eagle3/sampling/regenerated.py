"""Conversations with the verifier's own answers: turn by turn, each earlier answer in its place as a client sends it.

A block of conversations goes through its turns together, so a chunk of answers (`eagle3.sampling.answers`) holds one
turn of one block, and a killed run resumes at the turn it was in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3.params import SampleParams
from eagle3.sampling.answers import Answer, Answering, Prompt
from eagle3.sampling.conversations import Conversation, Message, Skipped
from eagle3.sampling.samples import FINISHED, Sample
from eagle3.sampling.turns import TurnCounts, Unusable, add_turn, turn_places, usable_prompt
from eagle3.verifiers.chat_tokenizer import Chat


class Dialogue:
    """One conversation while it is answered. samples: what it has given so far."""

    def __init__(self, row: Conversation, split: str, sample: SampleParams, chat: Chat) -> None:
        self.row = row
        self.samples: list[Sample] = []
        self.failure: Skipped | None = None
        self._split, self._sample, self._chat = split, sample, chat
        self._places, self.turns = turn_places(row, sample, split)
        self._history: list[Message] = []
        self._prompt: list[int] = []

    def ask(self, turn: int) -> Prompt | None:
        """The prompt of this turn; None where the conversation has ended."""
        if self.failure or turn >= len(self._places):
            return None
        begin = self._places[turn - 1] + 1 if turn else 0
        self._history += self.row.messages[begin : self._places[turn]]
        prompt = usable_prompt(self._chat, self._history, self.row, self._sample)
        if isinstance(prompt, Unusable):
            self._end(turn, prompt.reason, prompt.detail)
            return None
        self._prompt = prompt
        return Prompt(f"{self.row.conversation_id}-{turn}", prompt)

    def take(self, turn: int, answer: Answer) -> None:
        """The answer as a sample: generated ids as they are, never text tokenised again."""
        if answer.finish_reason not in FINISHED or not answer.output_ids:
            self._end(turn, "failed", f"finish_reason {answer.finish_reason}, {len(answer.output_ids)} tokens")
            return
        new = Sample(
            answer.sample_id, self.row.conversation_id, turn, self._split, [], [], finish_reason=answer.finish_reason
        )
        add_turn(self.samples, self._prompt, answer.output_ids, new)
        self.turns.answered += 1
        content = self._chat.said(answer.output_ids)
        if answer.finish_reason == "length":
            self._end(turn + 1, "after_cut_answer", "")  # nobody goes on talking after half an answer
        elif content is None:
            self._end(turn + 1, "special_in_answer", "")
        else:
            self._history.append({"role": "assistant", "content": content})

    def _end(self, turn: int, reason: str, detail: str) -> None:
        if not turn:
            self.failure = Skipped(self.row.source, self.row.key, reason, detail)
        elif left := len(self._places) - turn:
            self.turns.left[reason] += left
        self._places = self._places[:turn]


def regenerate(
    rows: Sequence[Conversation], split: str, answering: Answering, chat: Chat, sample: SampleParams, turns: TurnCounts
) -> Iterator[Sample | Skipped]:
    """The samples of one block, or a `Skipped` for a conversation without a first answer; turns are added up."""
    dialogues = [Dialogue(row, split, sample, chat) for row in rows]
    for turn in range(sample.max_turns):
        asked = [(dialogue, prompt) for dialogue in dialogues if (prompt := dialogue.ask(turn))]
        if not asked:
            break
        answers = answering.answers([prompt for _, prompt in asked], split)
        for (dialogue, _), answer in zip(asked, answers, strict=True):
            dialogue.take(turn, answer)
    for dialogue in dialogues:
        if dialogue.failure:
            yield dialogue.failure
        else:
            turns.add(dialogue.turns)
            yield from dialogue.samples
