"""Questions put to a server turn by turn: each further turn follows the server's own answer to the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from eagle3.problems import invalid
from eagle3.serve.questions import Question
from eagle3.serve.serving import Answer, Client, Prompt
from eagle3.verifiers.chat_tokenizer import TemplateRefusal

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Asked:
    """What is asked. render: messages -> prompt ids; read: token ids -> text; window: tokens, answer included."""

    questions: Sequence[Question]
    render: Callable[[Messages], list[int]]
    read: Callable[[list[int]], str]
    window: int


@dataclass(frozen=True)
class Turn:
    """One turn as it was asked, and its answers by both servers. prompt's id: `FILE:QUESTION:TURN`, turns from 1."""

    category: str
    prompt: Prompt
    answer: Answer
    other: Answer


def ask_questions(client: Client, asked: Asked, limit: int) -> tuple[list[Turn], list[str]]:
    """Every turn that fits into the window with `limit` tokens of answer, and the ids of those that did not.

    `other` is the same answer until the other server has been asked.
    """
    turns: list[Turn] = []
    too_long: list[str] = []
    for question in tqdm(asked.questions, desc="questions", unit="question", disable=not asked.questions):
        messages: Messages = []
        for number, text in enumerate(question.turns, start=1):
            messages.append({"role": "user", "content": text})
            name = f"{question.key}:{number}"
            prompt = Prompt(name, _rendered(asked, messages, name), limit)
            if len(prompt.input_ids) + limit > asked.window:
                too_long.append(prompt.sample_id)
                break
            answer = client.ask(prompt)
            turns.append(Turn(question.category, prompt, answer, answer))
            messages.append({"role": "assistant", "content": asked.read(answer.token_ids)})
    return turns, too_long


def _rendered(asked: Asked, messages: Messages, name: str) -> list[int]:
    try:
        return asked.render(messages)
    except TemplateRefusal as error:
        fix = "remove the question, or its file from serve_test.questions"
        raise invalid("question-template", name, str(error), "a turn that the chat template takes", fix) from None
