"""Conversations with the answers that they came with: masks from rendered prefixes, never by searching text.

For the answer at position i the chat template renders the messages before it, with the generation prompt, and the
messages up to and with it. The first must be a prefix of the second, token by token; what comes after it, up to the
end-of-turn token, is what the verifier would have had to generate, and is supervised. What the template adds behind
the end of the turn (a line break in ChatML) is not.
"""

from __future__ import annotations

import json

from eagle3.params import SampleParams
from eagle3.problems import invalid
from eagle3.sampling.conversations import Conversation, Skipped
from eagle3.sampling.samples import Sample
from eagle3.sampling.turns import TurnCounts, Unusable, add_turn, fitting, turn_places
from eagle3.verifiers.chat_tokenizer import Chat, TemplateRefusal

# Fields of an answer that are generated beside its content; a template may leave them out without a word.
GENERATED = ("tool_calls", "reasoning_content")


def keep(row: Conversation, chat: Chat, sample: SampleParams) -> tuple[list[Sample], TurnCounts] | Skipped:
    """The train rows of one conversation, and its turns; `Skipped` where the first answer cannot be used."""
    samples: list[Sample] = []
    places, turns = turn_places(row, sample, "train")
    if not places:
        reason = next(iter(turns.left))
        return Skipped(row.source, row.key, reason, "no answer that could be used")
    for turn, place in enumerate(places):
        found = given_answer(row, place, chat, sample)
        if isinstance(found, Unusable):
            if not turn:
                return Skipped(row.source, row.key, found.reason, found.detail)
            turns.left[found.reason] += len(places) - turn
            break
        new = Sample(f"{row.conversation_id}-{turn}", row.conversation_id, turn, "train", [], [], "stop")
        add_turn(samples, *found, new)
        turns.answered += 1
    return samples, turns


def given_answer(
    row: Conversation, place: int, chat: Chat, sample: SampleParams
) -> tuple[list[int], list[int]] | Unusable:
    """(prompt, answer) as token ids, the end-of-turn token included, or why they cannot be told apart."""
    before = list(row.messages[:place])
    answer = dict(row.messages[place])
    try:
        prompt = chat.prompt_ids(before, row.tools)
        through = chat.history_ids([*before, answer], row.tools)
        for name in GENERATED:
            bare = {key: value for key, value in answer.items() if key != name and (name, key) != REASONING_TWIN}
            if name in answer and chat.history_ids([*before, bare], row.tools) == through:
                return Unusable("template_drops", name)
    except TemplateRefusal as refusal:
        return Unusable("template_refuses", str(refusal))
    spelled = chat.tokenizer(json.dumps(answer, ensure_ascii=False), add_special_tokens=False)["input_ids"]
    if not chat.end_ids.isdisjoint(spelled):
        return Unusable("end_of_turn_inside", f"one of the ids {sorted(chat.end_ids)} spelled in the answer")
    if through[: len(prompt)] != prompt:
        return Unusable("not_nested", _departure(prompt, through, chat))
    said = through[len(prompt) :]
    end = next((index for index, token in enumerate(said) if token in chat.end_ids), None)
    if end is None:
        return Unusable("no_end_of_turn", f"none of the ids {sorted(chat.end_ids)} after the answer")
    fits = fitting([*prompt, *said[: end + 1]], sample.max_model_len, chat.vocab_size)
    return fits if isinstance(fits, Unusable) else (prompt, said[: end + 1])


# vLLM gives a template the reasoning under both names, and so do we: they are one thing
REASONING_TWIN = ("reasoning_content", "reasoning")


def require_nesting(chat: Chat) -> None:
    """`InvalidInput` for a template of whose answers the supervised tokens cannot be told."""
    row = Conversation(
        "the probe",
        "",
        ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day! How can I help?"}),
    )
    try:
        prompt, through = chat.prompt_ids(row.messages[:1]), chat.history_ids(row.messages)
        nested = through[: len(prompt)] == prompt
        found = "" if nested else _departure(prompt, through, chat)
    except TemplateRefusal as refusal:
        nested, found = False, str(refusal)
    ended = nested and not chat.end_ids.isdisjoint(through[len(prompt) :])
    if not nested or not ended:
        raise invalid(
            "template-prefixes",
            "sample.mode keep: the verifier's chat template",
            found or "no end-of-turn token after an answer",
            "the rendered prompt, then the answer, then the end of the turn",
            "dvc exp run -S sample.mode=regenerate, where the verifier answers and no mask has to be found",
            "tokens would be supervised that the verifier never generates",
        )


def _departure(prompt: list[int], through: list[int], chat: Chat) -> str:
    same = next((i for i, (a, b) in enumerate(zip(prompt, through, strict=False)) if a != b), len(through))
    asked, given = (chat.tokenizer.decode(ids[same : same + 8]) for ids in (prompt, through))
    return f"from token {same} on the prompt goes on with {asked!r}, the answered conversation with {given!r}"
