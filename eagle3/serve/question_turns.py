"""Questions put to a server turn by turn: each further turn follows the server's own answer to the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from eagle3.problems import invalid
from eagle3.serve.questions import Question
from eagle3.serve.serving import Answer, Client, Prompt, blocks, let_idle
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

    question: Question
    prompt: Prompt
    answer: Answer
    other: Answer


def ask_questions(clients: Sequence[Client], asked: Asked, limit: int) -> tuple[list[Turn], list[str]]:
    """Every turn that fits into the window with `limit` tokens of answer, and the ids of those that did not.

    The first server's answers are those that further turns follow. A second server is asked the same turns after each
    block of questions, so that whatever else the machine does meets both alike; without it `other` is `answer`.
    """
    first, others = clients[0], clients[1:]
    turns: list[Turn] = []
    too_long: list[str] = []
    with tqdm(total=len(asked.questions), desc="questions", unit="question", disable=not asked.questions) as bar:
        for questions in blocks(asked.questions):
            if others:
                let_idle()
            led: list[Turn] = []
            for question in questions:
                led += _conversation(first, asked, question, limit, too_long)
                bar.update()
            for other in others:
                let_idle()
                led = _asked_again(other, led)
            turns += led
    return turns, too_long


def ask_again(client: Client, turns: Sequence[Turn]) -> list[Turn]:
    """The same turns, put to the other server."""
    return _asked_again(client, tqdm(turns, desc="questions, without draft", unit="turn", disable=not turns))


def _asked_again(client: Client, turns: Iterable[Turn]) -> list[Turn]:
    return [replace(turn, other=client.ask(turn.prompt)) for turn in turns]


def _conversation(client: Client, asked: Asked, question: Question, limit: int, too_long: list[str]) -> Iterator[Turn]:
    """The turns of one question, up to the first that does not fit: its id goes into `too_long`."""
    messages: Messages = []
    for number, text in enumerate(question.turns, start=1):
        messages.append({"role": "user", "content": text})
        name = f"{question.key}:{number}"
        prompt = Prompt(name, _rendered(asked, messages, name), limit)
        if len(prompt.input_ids) + limit > asked.window:
            too_long.append(name)
            return
        answer = client.ask(prompt)
        yield Turn(question, prompt, answer, answer)
        messages.append({"role": "assistant", "content": asked.read(answer.token_ids)})


def _rendered(asked: Asked, messages: Messages, name: str) -> list[int]:
    try:
        return asked.render(messages)
    except TemplateRefusal as error:
        fix = "remove the question, or its file from serve_test.questions"
        raise invalid("question-template", name, str(error), "a turn that the chat template takes", fix) from None
