"""Asking a real server whose every answer and every drafting round is known by hand."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.acceptance import Acceptance, acceptance_of, right_drafts, walk
from eagle3.machine import DEFAULT
from eagle3.problems import InvalidInput
from eagle3.serve.serving import Answer, Client, Prompt, ask_in_turns, parse_counters, tokens_per_second
from eagle3.serve.vllm_command import ServerSettings
from eagle3.serve.vllm_server import vllm_server, vllm_servers
from eagle3.verifiers.chat_tokenizer import prompt_ids
from tests.counting import (
    END,
    answer_to,
    counting_draft,
    counting_verifier,
    first_step,
    next_number,
    reading_draft,
)
from tests.tiny import tiny_tokenizer

K = 3
METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="x"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="x"} 5.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="x"} 45.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="x"} 9.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="x",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="x",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="x",position="2"} 1.0
"""


def test_counters_are_summed_over_engines():
    counters = parse_counters(METRICS, 3)
    assert (counters.drafted, counters.acceptance) == (45, Acceptance(15, (6, 2, 1)))
    assert (counters - counters).acceptance == Acceptance(0, (0, 0, 0))


@pytest.mark.parametrize(("k", "missing"), [(2, "position beyond 2"), (4, "accepted_tokens_per_pos_total3")])
def test_counters_of_another_number_of_drafts_are_refused(k, missing):
    with pytest.raises(KeyError, match=missing):
        parse_counters(METRICS, k)


@given(st.data())
def test_the_rounds_of_an_answer_are_those_of_the_walk(data):
    """A server that knows the verifier's words beyond the end of the answer counts more; the answer's rounds do not."""
    ids = st.integers(0, 2)
    num_prompt, num_answer = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    words = data.draw(st.lists(ids, min_size=num_prompt + num_answer + K, max_size=num_prompt + num_answer + K))
    rows = [data.draw(st.lists(ids, min_size=len(words), max_size=len(words))) for _ in range(K)]
    end = num_prompt + num_answer
    right = right_drafts(rows, words[:end], num_prompt)
    rounds = walk(right, num_prompt, K)
    unbounded = {one.position: one.accepted for one in walk(right_drafts(rows, words, num_prompt), num_prompt, K)}
    answer = Answer("a", words[num_prompt:end], [unbounded[one.position] for one in rounds], "length", 1.0, 0.1)
    assert answer.rounds(num_prompt) == rounds
    shared = data.draw(st.integers(1, num_answer))
    assert answer.rounds(num_prompt, shared) == walk(right[: shared - 1], num_prompt, K)


def test_speed_counts_every_new_token():
    answers = [Answer("a", [5] * 10, [], "length", 2.0, 0.1), Answer("b", [5] * 20, [], "length", 1.0, 0.1)]
    assert tokens_per_second(answers) == 10.0


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    verifier = counting_verifier(folder / "verifier")
    # vLLM guesses a method from such names, were it not told
    draft = counting_draft(folder / "mtp-dflash-eagle-draft", verifier)
    settings = ServerSettings(verifier, 256, DEFAULT, False, draft, K)
    with vllm_server(settings, folder / "server.log") as server:
        yield Client(server, K)


def ask(client: Client, last: int, max_new_tokens: int) -> Answer:
    return client.ask(Prompt(f"after-{last}", [1, 60, 61, last], max_new_tokens))


pytestmark = pytest.mark.timeout(600)


@pytest.mark.engine
@pytest.mark.parametrize(("last", "length"), [(40, 12), (40, 13), (41, 12), (5, 60), (310, 40), (318, 5), (319, 5)])
def test_answers_and_rounds_are_those_one_can_write_down(client, last, length):
    answer = ask(client, last, length)
    assert answer.token_ids == answer_to(last, length)
    assert answer.finish_reason == ("stop" if answer.token_ids[-1] == END else "length")
    tokens = [1, 60, 61, last, *answer.token_ids]
    predictions = [[first_step(token) for token in tokens], *[[-1] * len(tokens)] * 2]
    assert answer.rounds(num_prompt=4) == walk(right_drafts(predictions, tokens, 4), 4, K)
    assert 0 < answer.first_token_seconds <= answer.seconds


@pytest.mark.engine
def test_the_servers_counters_are_the_sum_of_its_answers(client):
    prompts = [Prompt(str(last), [1, 60, last], 30) for last in (5, 80, 160, 200, 301)]
    [(answers, counters)] = ask_in_turns([client], prompts, "asking")
    assert [answer.sample_id for answer in answers] == [prompt.sample_id for prompt in prompts]
    assert counters.drafted == K * counters.acceptance.rounds
    rounds = [one for answer in answers for one in answer.rounds(3)]
    assert counters.acceptance == acceptance_of(rounds, K)
    assert 1.2 < counters.acceptance.length < 1.6


@pytest.mark.engine
def test_the_chat_endpoint_answers_and_renders_the_template_as_sampling_does(client):
    tokenizer = tiny_tokenizer()
    rendered = prompt_ids(tokenizer, [{"role": "user", "content": "Hello"}])
    client.check_chat("Hello", rendered)
    with pytest.raises(InvalidInput, match="other-template"):
        client.check_chat("Hello", [1, *rendered])


@pytest.mark.engine
def test_a_prompt_without_room_is_refused_by_name_and_the_server_lives(client):
    with pytest.raises(InvalidInput) as caught:
        client.ask(Prompt("too-long", [5] * 300, 30))
    assert caught.value.problems[0].code == "server-error"
    assert caught.value.problems[0].where == "prompt too-long"
    assert ask(client, 40, 3).token_ids == [41, 42, 43]


@pytest.mark.engine
def test_an_answer_may_end_with_the_window(client):
    answer = client.ask(Prompt("to-the-end", [1, *[60] * 235, 61], 19))
    assert answer.token_ids == answer_to(61, 19)


@pytest.mark.engine
def test_a_server_killed_in_the_middle_of_an_answer_is_reported_as_dead(client, monkeypatch):
    """The last but one, for the others share the server."""
    stream = client._stream

    def killing(*asked):
        for event in stream(*asked):
            yield event
            os.killpg(client.server.process.pid, signal.SIGKILL)

    monkeypatch.setattr(client, "_stream", killing)
    with pytest.raises(InvalidInput) as caught:
        client.ask(Prompt("half", [1, 60, 61], 200))
    assert (caught.value.problems[0].code, caught.value.problems[0].where) == ("server-died", "prompt half")


@pytest.mark.engine
def test_a_draft_without_its_embedding_is_served_with_the_verifiers(tmp_path):
    """Both drafts propose what the embedding says, so that another one in its place would be seen in every round."""
    verifier = counting_verifier(tmp_path / "verifier")
    drafts = [reading_draft(tmp_path / str(own), verifier, embedding=own) for own in (True, False)]
    settings = [ServerSettings(verifier, 256, DEFAULT, False, draft, K) for draft in drafts]
    with vllm_servers([(one, one.draft.with_suffix(".log")) for one in settings]) as servers:
        for last in (5, 80, 160, 301):
            one, other = (ask(Client(server, K), last, 30) for server in servers)
            tokens = [1, 60, 61, last, *answer_to(last, 30)]
            said = [next_number(token) for token in tokens] + [-1] * K
            expected = walk(right_drafts([said[1 + step :] for step in range(K)], tokens, 4), 4, K)
            assert one.token_ids == other.token_ids == answer_to(last, 30)
            assert one.rounds(4) == other.rounds(4) == expected
            assert last > 255 or acceptance_of(expected, K).length > 2.5


@pytest.fixture
def other_client(tmp_path):
    verifier = counting_verifier(tmp_path / "verifier")
    with vllm_server(ServerSettings(verifier, 256, DEFAULT), tmp_path / "server.log") as server:
        yield Client(server, 0)


@pytest.mark.engine
def test_a_server_killed_under_requests_at_once_is_reported_once(other_client, monkeypatch, capsys):
    stream, prompts = other_client._stream, [Prompt(str(last), [1, 60, last], 200) for last in range(5, 21)]
    assert [one.sample_id for one in other_client.ask_at_once(prompts[:3], 8, 0.0)] == ["5", "6", "7"]

    def killing(prompt, temperature):
        for event in stream(prompt, temperature):
            yield event
            if prompt.sample_id == "12":
                os.killpg(other_client.server.process.pid, signal.SIGKILL)

    monkeypatch.setattr(other_client, "_stream", killing)
    with pytest.raises(InvalidInput) as caught:
        other_client.ask_at_once(prompts, 8, 0.0)
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("server-died", "8 requests at once")
    assert capsys.readouterr().err.count("last lines of") == 1


@pytest.mark.engine
def test_a_server_killed_between_two_prompts_is_reported_as_dead(client):
    """The last test of this module: the others share the server."""
    os.killpg(client.server.process.pid, signal.SIGKILL)
    with pytest.raises(InvalidInput) as caught:
        ask(client, 40, 3)
    problem = caught.value.problems[0]
    assert (problem.code, problem.where) == ("server-died", "prompt after-40")
    assert "killed by signal 9" in problem.found
