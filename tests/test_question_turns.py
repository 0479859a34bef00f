"""Who is asked which turn of a question, and in which order, by one server and by two."""

from __future__ import annotations

import pytest

from eagle3.serve import serving
from eagle3.serve.question_turns import Asked, Messages, ask_again, ask_questions
from eagle3.serve.questions import Question
from eagle3.serve.serving import Answer, Prompt

# A character is a token. The third question, and the second turn of the fourth, leave no room for an answer.
TURNS = [("x", "y"), ("z",), ("w" * 30,), ("u", "v" * 30)]
QUESTIONS = [Question("q", f"q:{number}", "other", turns) for number, turns in enumerate(TURNS, start=1)]
TOO_LONG = ["q:3:1", "q:4:2"]


def render(messages: Messages) -> list[int]:
    return [ord(char) for message in messages for char in message["content"]]


def read(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


ASKED = Asked(QUESTIONS, render, read, 24)


class Server:
    """Answers its own name; notes name and prompt of every turn."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def ask(self, prompt: Prompt) -> Answer:
        self.asked.append(f"{self.name} {prompt.sample_id} {read(prompt.input_ids)}")
        return Answer(prompt.sample_id, render([{"content": self.name}]), [], "stop", 1.0, 0.1)


@pytest.fixture(autouse=True)
def blocks_of_two(monkeypatch):
    monkeypatch.setattr(serving, "TURN", 2)
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0)


def test_the_second_server_is_asked_the_turns_that_the_first_one_led_to_block_by_block():
    asked: list[str] = []
    turns, too_long = ask_questions([Server("a", asked), Server("b", asked)], ASKED, 4)
    first, second = ["q:1:1 x", "q:1:2 xay", "q:2:1 z"], ["q:4:1 u"]
    assert asked == [f"{name} {turn}" for block in (first, second) for name in "ab" for turn in block]
    assert [turn.prompt.sample_id for turn in turns] == ["q:1:1", "q:1:2", "q:2:1", "q:4:1"]
    assert {(read(turn.answer.token_ids), read(turn.other.token_ids)) for turn in turns} == {("a", "b")}
    assert too_long == TOO_LONG


def test_a_server_that_comes_later_is_asked_the_same_turns():
    asked: list[str] = []
    turns, too_long = ask_questions([Server("a", asked)], ASKED, 4)
    assert too_long == TOO_LONG
    assert all(turn.other is turn.answer for turn in turns)
    both = ask_again(Server("b", asked), turns)
    assert asked == [f"{name} {turn}" for name in "ab" for turn in ("q:1:1 x", "q:1:2 xay", "q:2:1 z", "q:4:1 u")]
    assert {(read(turn.answer.token_ids), read(turn.other.token_ids)) for turn in both} == {("a", "b")}
