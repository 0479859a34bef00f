"""The turns of a conversation as samples: which are used, what each is asked with, how rows are joined, all counted.

A turn's prompt is the history as a client of the server would send it, rendered anew. Where that begins with the
tokens of the turn before, its answer included, a train row goes on; where it does not (the template drops earlier
reasoning, an answer is tokenised otherwise when it comes back as text), a new row begins. Either way every supervised
token stands after exactly the tokens that the server would have before it:

    p0 p1 a0 a1 E | \\n u0 u1 g | b0 b1 E        p, u: rendered; g: generation prompt; E: end of turn
    -  -  x  x  x   -  -  -  -   x  x  x        x: supervised, what the verifier says (or, in mode keep, what is given)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from eagle3.params import SampleParams
from eagle3.problems import InvalidInput, invalid
from eagle3.sampling.conversations import Conversation, Message
from eagle3.sampling.samples import Sample
from eagle3.verifiers.chat_tokenizer import Chat, TemplateRefusal


@dataclass(frozen=True)
class Unusable:
    """Why a prompt or a turn cannot be used: one of the reasons of data/conversations/README.md, and a detail."""

    reason: str
    detail: str


@dataclass
class TurnCounts:
    """Turns of the conversations that gave samples: read = answered + those left, by reason."""

    read: int = 0
    answered: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def add(self, other: TurnCounts) -> None:
        self.read, self.answered = self.read + other.read, self.answered + other.answered
        self.left.update(other.left)

    def as_dict(self) -> dict[str, object]:
        return {"read": self.read, "answered": self.answered, "left": dict(sorted(self.left.items()))}

    def require_closed(self) -> None:
        if self.read != self.answered + self.left.total():
            raise lost("turns", f"read {self.read}, answered {self.answered}, left {self.left.total()}")


def lost(what: str, found: str) -> InvalidInput:
    return invalid(
        f"{what}-lost",
        "sample",
        found,
        "read = what was used + what was left out, by reason",
        f"report this: {what} were lost or counted twice, which is a fault of the stage",
    )


def turn_places(row: Conversation, sample: SampleParams, split: str) -> tuple[list[int], TurnCounts]:
    """Positions of the answers that are used, from the first on, and counts in which the others are left.

    Turns end at sample.max_turns; before a blank message of the user; in regenerated conversations before the result
    of a tool, which belongs to the given call and not to the verifier's; in kept ones before a blank answer.
    """
    places = row.answer_places
    kept = keeps_answers(sample, split)
    for number, place in enumerate(places):
        if number == sample.max_turns:
            reason = "max_turns"
        elif not kept and number and row.messages[places[number - 1] + 1]["role"] == "tool":
            reason = "tool_result"
        elif kept and place == len(row.messages):
            reason = "no_answer"
        elif _blank(row.messages[place - 1]) or (kept and _blank(row.messages[place])):
            reason = "empty"
        else:
            continue
        return places[:number], TurnCounts(len(places), 0, Counter({reason: len(places) - number}))
    return places, TurnCounts(len(places))


def _blank(message: Message) -> bool:
    """A tool may return nothing; a person or a model that says nothing ends what can be used."""
    return message["role"] != "tool" and not message["content"].strip() and not message.get("tool_calls")


def keeps_answers(sample: SampleParams, split: str) -> bool:
    """Val and eval always hold the verifier's own answers: they stand for what the server will say."""
    return sample.mode == "keep" and split == "train"


def usable_prompt(
    chat: Chat, messages: Sequence[Message], row: Conversation, sample: SampleParams
) -> list[int] | Unusable:
    """Token ids that the engine takes for certain: one it refused would fail the whole call."""
    try:
        ids = chat.prompt_ids(messages, row.tools)
    except TemplateRefusal as refusal:
        return Unusable("template_refuses", str(refusal))
    return fitting(ids, sample.max_model_len - sample.max_new_tokens, chat.vocab_size)


def fitting(ids: list[int], room: int, vocab_size: int) -> list[int] | Unusable:
    if len(ids) > room:
        return Unusable("too_long", f"{len(ids)} tokens, room for {room}")
    if max(ids) >= vocab_size:
        return Unusable("token_out_of_vocabulary", f"token id {max(ids)} of {vocab_size}")
    return ids


def add_turn(samples: list[Sample], prompt: list[int], answer: list[int], new: Sample) -> None:
    """Append the turn as the row `new`, whose ids and mask are set here, or join it to the last row of train."""
    ids = [*prompt, *answer]
    mask = [0] * len(prompt) + [1] * len(answer)
    if samples and new.split == "train" and prompt[: len(samples[-1].input_ids)] == list(samples[-1].input_ids):
        before = samples.pop()
        mask[: len(before.loss_mask)] = before.loss_mask
        new = replace(new, sample_id=before.sample_id, turn=before.turn)
    samples.append(replace(new, input_ids=ids, loss_mask=mask))
