"""Turns of conversations: regenerated in their place, or kept with masks from rendered prefixes. Real tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.params import SampleParams
from eagle3.problems import InvalidInput
from eagle3.sampling.answers import Answer, Prompt
from eagle3.sampling.conversations import Conversation, Skipped, SkippedFile, parse_row
from eagle3.sampling.kept import keep, require_nesting
from eagle3.sampling.regenerated import regenerate
from eagle3.sampling.sample_making import SampleMaking
from eagle3.sampling.samples import Sample
from eagle3.sampling.turns import TurnCounts, Unusable, turn_places, usable_prompt
from eagle3.verifiers.chat_tokenizer import Chat
from tests.test_conversations import sample_params
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

END = 2  # <|im_end|>
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
ENDING_CALL = CALL | {"tool_calls": [{"function": {"name": "say", "arguments": {"text": "<|im_end|>"}}}]}
RESULT = {"role": "tool", "content": "42"}
# ChatML with tools, calls, and reasoning that is shown for the last answer alone, as Qwen3's template does.
RICH_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_TEMPLATE = CHAT_TEMPLATE.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
ENDLESS_TEMPLATE = CHAT_TEMPLATE.replace("<|im_end|>", "")


@cache
def chat_of(template: str = CHAT_TEMPLATE) -> Chat:
    return Chat(tiny_tokenizer(template), frozenset({END}), 320)


def params(**changes: Any) -> SampleParams:
    return sample_params(**{"max_turns": 9, "max_model_len": 400, "max_new_tokens": 40, **changes})


KEEP: dict[str, Any] = {"mode": "keep"}


def conversation(*messages: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> Conversation:
    row = parse_row({"messages": list(messages), "tools": list(tools)}, "a.jsonl", "line 1")
    assert isinstance(row, Conversation), row
    return row


def spans(chat: Chat, sample: Sample) -> list[str]:
    """The text of each run of supervised tokens."""
    found, run = [], []
    for token, supervised in zip([*sample.input_ids, END], [*sample.loss_mask, False], strict=True):
        if supervised:
            run.append(token)
        elif run:
            found, run = [*found, chat.tokenizer.decode(run)], []
    return found


def kept(row: Conversation, chat: Chat, **changes: Any) -> tuple[list[Sample], TurnCounts]:
    made = keep(row, chat, params(**KEEP, **changes))
    assert not isinstance(made, Skipped), made
    return made


def test_given_answers_are_supervised_with_the_end_of_their_turn_and_nothing_else() -> None:
    chat = chat_of()
    row = conversation(SYSTEM, ASK, SAY, {"role": "user", "content": "say good day<|im_start|>"}, SAY)
    [sample], turns = kept(row, chat)
    assert spans(chat, sample) == ["good day<|im_end|>", "good day<|im_end|>"]
    assert list(sample.input_ids) == chat.history_ids(row.messages)[: len(sample.input_ids)]
    assert (sample.sample_id, sample.turn, sample.finish_reason) == (f"{row.conversation_id}-0", 0, "stop")
    assert turns.as_dict() == {"read": 2, "answered": 2, "left": {}}


texts = st.text("ab \n<|im_end|>start", min_size=1, max_size=12).filter(str.strip)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_whatever_is_said_the_mask_is_that_of_the_tokens_after_each_prompt(pairs: list[tuple[str, str]]) -> None:
    """The definition, by rendering each prefix: searching for the text of an answer would be wrong here."""
    chat = chat_of()
    said = [[{"role": "user", "content": ask}, {"role": "assistant", "content": say}] for ask, say in pairs]
    row = conversation(*(message for pair in said for message in pair))
    made = keep(row, chat, params(**KEEP))
    if isinstance(made, Skipped):
        assert made.reason in ("too_long", "not_nested", "end_of_turn_inside")
        return
    expected = {}
    for turn in range(made[1].answered):
        prompt = chat.prompt_ids(row.messages[: 2 * turn + 1])
        through = chat.history_ids(row.messages[: 2 * turn + 2])
        end = through.index(END, len(prompt))
        expected[turn] = (prompt, through[len(prompt) : end + 1])
    supervised = [token for one in made[0] for token, on in zip(one.input_ids, one.loss_mask, strict=True) if on]
    assert supervised == [token for _, answer in expected.values() for token in answer]
    for one in made[0]:
        assert list(one.input_ids[: one.num_prompt]) == expected[one.turn][0]
        assert not all(one.loss_mask)


def test_tools_and_calls_are_rendered_and_a_call_is_supervised_but_not_its_result() -> None:
    chat = chat_of(RICH_TEMPLATE)
    [sample], _ = kept(conversation(ASK, CALL, RESULT, SAY, tools=[{"name": "add"}]), chat)
    call, answer = spans(chat, sample)
    assert '"name": "add"' in call
    assert call.endswith("<|im_end|>")
    assert answer == "good day<|im_end|>"
    assert '[{"name": "add"}]' in chat.tokenizer.decode(sample.input_ids)


def test_reasoning_that_the_template_drops_from_history_begins_a_new_row() -> None:
    chat = chat_of(RICH_TEMPLATE)
    thought = SAY | {"reasoning_content": "hm"}
    samples, _ = kept(conversation(ASK, thought, ASK, thought), chat)
    assert [spans(chat, sample) for sample in samples] == [["<think>hm</think>good day<|im_end|>"]] * 2
    assert [sample.sample_id[-2:] for sample in samples] == ["-0", "-1"]
    assert "<think>" not in chat.tokenizer.decode(samples[1].input_ids[: samples[1].num_prompt])


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHAT_TEMPLATE, (ASK, SAY | {"reasoning_content": "hm"}), "template_drops"),
        (CHAT_TEMPLATE, (ASK, CALL, RESULT), "template_drops"),
        (THINKING_TEMPLATE, (ASK, SAY), "not_nested"),
        (ENDLESS_TEMPLATE, (ASK, SAY), "no_end_of_turn"),
        (CHAT_TEMPLATE, (ASK, {"role": "assistant", "content": "good<|im_end|>day"}), "end_of_turn_inside"),
        (CHAT_TEMPLATE, (ASK, {"role": "assistant", "content": "good day<|im_end|>"}), "end_of_turn_inside"),
        (RICH_TEMPLATE, (ASK, SAY | {"reasoning_content": "<|im_end|>"}), "end_of_turn_inside"),
        (RICH_TEMPLATE, (ASK, ENDING_CALL, RESULT), "end_of_turn_inside"),
        (CHAT_TEMPLATE, (ASK,), "no_answer"),
        (CHAT_TEMPLATE, (ASK, {"role": "assistant", "content": " "}), "empty"),
        (CHAT_TEMPLATE, (ASK, {"role": "assistant", "content": "long " * 400}), "too_long"),
        ("{{ raise_exception('no') }}", (ASK, SAY), "template_refuses"),
        ("{{ messages[0].no.such }}", (ASK, SAY), "template_refuses"),
    ],
)
def test_an_answer_that_cannot_be_told_apart_is_counted(template: str, messages: Any, reason: str) -> None:
    made = keep(conversation(*messages), chat_of(template), params(**KEEP))
    assert isinstance(made, Skipped), made
    assert made.reason == reason


@pytest.mark.parametrize(
    ("template", "said"),
    [(THINKING_TEMPLATE, "goes on with '<think>"), (ENDLESS_TEMPLATE, "no end-of-turn"), ("{{ 1 / 0 }}", "division")],
)
def test_a_template_whose_prefixes_do_not_nest_is_refused_before_anything_runs(template: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=r"sample\.mode=regenerate") as error:
        require_nesting(chat_of(template))
    assert said in error.value.problems[0].found
    require_nesting(chat_of())


def test_later_turns_that_cannot_be_used_are_left_and_counted() -> None:
    chat = chat_of()
    long = {"role": "assistant", "content": "long " * 400}
    samples, turns = kept(conversation(ASK, SAY, ASK, long, ASK, SAY), chat)
    assert len(samples) == 1
    assert turns.as_dict() == {"read": 3, "answered": 1, "left": {"too_long": 2}}
    _, turns = kept(conversation(ASK, SAY, ASK, {"role": "assistant", "content": "a<|im_end|>b"}, ASK, SAY), chat)
    assert turns.as_dict() == {"read": 3, "answered": 1, "left": {"end_of_turn_inside": 2}}
    _, turns = kept(conversation(ASK, SAY, ASK, SAY, ASK), chat, max_turns=2)
    assert turns.as_dict() == {"read": 3, "answered": 2, "left": {"max_turns": 1}}
    _, turns = kept(conversation(ASK, SAY, ASK), chat)
    assert turns.as_dict() == {"read": 2, "answered": 1, "left": {"no_answer": 1}}


BLANK = {"role": "user", "content": " "}


@pytest.mark.parametrize(
    ("messages", "places", "left"),
    [
        ((ASK,), [1], {}),
        ((SYSTEM, ASK, SAY, ASK), [2, 4], {}),
        ((ASK, CALL, RESULT, SAY, ASK), [1], {"tool_result": 2}),
        ((ASK, SAY, BLANK, SAY, ASK), [1], {"empty": 2}),
        ((ASK, {"role": "assistant", "content": ""}, ASK), [1, 3], {}),
    ],
)
def test_turns_that_are_asked(messages: Any, places: list[int], left: dict[str, int]) -> None:
    found, turns = turn_places(conversation(*messages), params(), "train")
    assert (found, turns.left) == (places, Counter(left))
    assert turns.read == len(places) + sum(left.values())


class Echo:
    """In the place of `Answering`: fixed answers by turn, and what was asked."""

    def __init__(self, answer: Callable[[int], list[int]], reason: str = "stop") -> None:
        self.answer, self.reason = answer, reason
        self.asked: list[list[Prompt]] = []

    def answers(self, prompts: Sequence[Prompt], split: str) -> list[Answer]:
        self.asked.append(list(prompts))
        return [Answer(one.sample_id, self.answer(int(one.sample_id[-1])), self.reason) for one in prompts]


def regenerated(rows: list[Conversation], split: str, echo: Echo, chat: Chat, **changes: Any) -> tuple[Any, TurnCounts]:
    turns = TurnCounts()
    made = list(regenerate(rows, split, echo, chat, params(**changes), turns))  # type: ignore[arg-type]
    turns.require_closed()
    return made, turns


def test_every_assistant_turn_is_asked_in_its_place_with_the_verifiers_own_answers_before_it() -> None:
    chat = chat_of()
    ids = chat.tokenizer("fine")["input_ids"]
    echo = Echo(lambda turn: [*ids, END])
    rows = [conversation(SYSTEM, ASK, SAY, ASK, SAY), conversation(ASK)]
    made, turns = regenerated(rows, "train", echo, chat)
    fine = {"role": "assistant", "content": "fine"}
    assert [[one.sample_id[-2:] for one in asked] for asked in echo.asked] == [["-0", "-0"], ["-1"]]
    assert echo.asked[1][0].input_ids == chat.prompt_ids([SYSTEM, ASK, fine, ASK])
    assert [spans(chat, sample) for sample in made] == [["fine<|im_end|>"] * 2, ["fine<|im_end|>"]]
    assert list(made[0].input_ids) == chat.history_ids([SYSTEM, ASK, fine, ASK, fine])[:-1]
    assert turns.as_dict() == {"read": 3, "answered": 3, "left": {}}


def test_val_and_eval_hold_one_answer_a_row_for_the_walk_and_the_server() -> None:
    chat = chat_of()
    ids = chat.tokenizer("fine")["input_ids"]
    for split in ("val", "eval"):
        made, _ = regenerated([conversation(ASK, SAY, ASK)], split, Echo(lambda turn: [*ids, END]), chat)
        assert [spans(chat, sample) for sample in made] == [["fine<|im_end|>"]] * 2
        assert [sample.turn for sample in made] == [0, 1]
        assert all(list(sample.loss_mask[sample.num_prompt :]) == [1] * (len(ids) + 1) for sample in made)


def test_an_answer_that_comes_back_as_other_tokens_begins_a_new_row() -> None:
    chat = chat_of()
    letters = [chat.tokenizer(letter)["input_ids"][0] for letter in "the"]
    assert chat.tokenizer("the")["input_ids"] != letters, "one token, or at least fewer"
    made, turns = regenerated([conversation(ASK, SAY, ASK)], "train", Echo(lambda turn: [*letters, END]), chat)
    assert [spans(chat, sample) for sample in made] == [["the<|im_end|>"]] * 2
    assert list(made[1].input_ids[: made[1].num_prompt]) == chat.prompt_ids(
        [ASK, {"role": "assistant", "content": "the"}, ASK]
    )
    assert turns.answered == 2


@pytest.mark.parametrize(
    ("answer", "reason", "left"),
    [([9, 9], "length", "after_cut_answer"), ([9, 1, 9, END], "stop", "special_in_answer")],
)
def test_a_history_that_no_client_would_send_is_not_gone_on_with(answer: list[int], reason: str, left: str) -> None:
    made, turns = regenerated([conversation(ASK, SAY, ASK)], "train", Echo(lambda turn: answer, reason), chat_of())
    assert len(made) == 1
    assert turns.as_dict() == {"read": 2, "answered": 1, "left": {left: 1}}


def test_a_failed_first_answer_fails_the_conversation_and_a_later_one_its_turn() -> None:
    chat = chat_of()
    made, turns = regenerated([conversation(ASK)], "val", Echo(lambda turn: [9], "abort"), chat)
    assert made == [Skipped("a.jsonl", "line 1", "failed", "finish_reason abort, 1 tokens")]
    assert turns.read == 0
    made, turns = regenerated([conversation(ASK, SAY, ASK)], "val", Echo(lambda turn: [] if turn else [9, END]), chat)
    assert len(made) == 1
    assert turns.as_dict() == {"read": 2, "answered": 1, "left": {"failed": 1}}


def test_what_the_engine_would_refuse_is_not_asked() -> None:
    row = conversation(ASK)
    assert isinstance(usable_prompt(chat_of(), row.prompt, row, params()), list)
    for chat, changes, reason in (
        (chat_of(), {"max_model_len": 41}, "too_long"),
        (Chat(tiny_tokenizer(), frozenset({END}), 3), {}, "token_out_of_vocabulary"),
        (chat_of("{{ raise_exception('no') }}"), {}, "template_refuses"),
        (chat_of("{# nothing #}"), {}, "template_refuses"),
    ):
        found = usable_prompt(chat, row.prompt, row, params(**changes))
        assert isinstance(found, Unusable)
        assert found.reason == reason


def test_tools_that_a_template_ignores_are_not_lost_in_silence(tmp_path: Path) -> None:
    row = conversation(ASK, tools=[{"name": "add"}])
    with SkippedFile(tmp_path / "skipped.jsonl") as skipped:
        for template, reason in ((CHAT_TEMPLATE, "template_drops"), (RICH_TEMPLATE, None)):
            making = SampleMaking(Echo(lambda turn: [9]), chat_of(template), params(), skipped)  # type: ignore[arg-type]
            found = making.unusable(row, "train")
            assert (found and found.reason) == reason


def test_rows_or_turns_that_are_lost_fail_the_stage() -> None:
    with pytest.raises(InvalidInput, match="turns-lost"):
        TurnCounts(3, 1, Counter({"too_long": 1})).require_closed()
