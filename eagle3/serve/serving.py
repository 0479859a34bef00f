"""Asking a running server: prompts as exact token ids, one answer at a time, every drafting round as the server saw it.

With `--per-request-spec-decode-metrics detailed` vLLM 0.32.0 reports for each answer how many drafts every round
accepted. Streamed chunks would not tell: two steps can reach the client as one chunk. The Prometheus counters, read
around all prompts, must give the same sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openai import APIError, DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from eagle3.acceptance import Acceptance, Round, acceptance_of_counts
from eagle3.problems import InvalidInput, invalid
from eagle3.serve.vllm_command import ServerSettings
from eagle3.serve.vllm_server import Server, vllm_servers

Item = TypeVar("Item")
COUNTER_PREFIX = "vllm:spec_decode_num_"
REQUEST_TIMEOUT_SECONDS = 600.0
CHAT_TOKENS = 8
GREETING = "Hello"
# The front end counts a step just after it has passed its tokens on.
COUNTERS_SETTLE_SECONDS = 5.0
# Prompts that a server answers before the other one does, and the pause between them: vLLM 0.32.0's workers look for
# work without a rest for a second after their last step (shm_broadcast.py, SpinCondition), then cost nothing.
TURN, IDLE_SECONDS = 8, 1.1


@dataclass(frozen=True)
class Prompt:
    """One question: its id, its token ids, and how many tokens the answer may have."""

    sample_id: str
    input_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """One answer, its end token included. accepted: per drafting round, the drafts that the verifier agreed with."""

    sample_id: str
    token_ids: list[int]
    accepted: list[int]
    finish_reason: str
    seconds: float
    first_token_seconds: float

    def rounds(self, num_prompt: int, length: int | None = None) -> list[Round]:
        """The rounds as the walk counts them, over the first `length` tokens of the answer (all of them).

        A draft past that end is no accepted token; the server counts before it looks for the end (vLLM 0.32.0,
        v1/core/sched/scheduler.py update_from_output).

        >>> Answer("a", [7, 8, 9, 5, 6], [1, 3], "length", 1.0, 0.5).rounds(num_prompt=10)
        [Round(position=10, accepted=1), Round(position=12, accepted=2)]
        """
        rounds = []
        n, last = num_prompt, num_prompt + (len(self.token_ids) if length is None else length) - 1
        for accepted in self.accepted:
            if n >= last:
                break
            rounds.append(Round(n, min(accepted, last - n)))
            n += accepted + 1
        return rounds


@dataclass(frozen=True)
class Counters:
    """What the server has counted since it started."""

    drafted: int
    acceptance: Acceptance

    def __sub__(self, earlier: Counters) -> Counters:
        mine, other = self.acceptance, earlier.acceptance
        pairs = zip(mine.accepted_per_position, other.accepted_per_position, strict=True)
        return Counters(
            self.drafted - earlier.drafted, Acceptance(mine.rounds - other.rounds, tuple(a - b for a, b in pairs))
        )


def parse_counters(metrics: str, k: int) -> Counters:
    """`vllm:spec_decode_*` of a Prometheus text, k tokens drafted, summed over engines; `KeyError`: one is absent."""
    totals: dict[str, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(COUNTER_PREFIX):
                key = sample.name.removeprefix(COUNTER_PREFIX) + sample.labels.get("position", "")
                totals[key] = totals.get(key, 0) + int(sample.value)
    accepted = tuple(totals[f"accepted_tokens_per_pos_total{s}"] for s in range(k))
    if sum(accepted) != totals["accepted_tokens_total"]:
        raise KeyError(f"position beyond {k}")
    return Counters(totals["draft_tokens_total"], Acceptance(totals["drafts_total"], accepted))


class Client:
    """Requests to one server. k = the number of drafted tokens, 0 without a draft."""

    def __init__(self, server: Server, k: int) -> None:
        self.server, self.k = server, k
        # no proxy of the environment, and no retry: a second try would be counted by the server
        http = DefaultHttpxClient(trust_env=False, timeout=REQUEST_TIMEOUT_SECONDS)
        self.openai = OpenAI(base_url=server.base_url, api_key="none", max_retries=0, http_client=http)

    def ask(self, prompt: Prompt, temperature: float = 0.0) -> Answer:
        """Stream the answer to `prompt.input_ids`; `InvalidInput` if the server dies, refuses, or read other ids."""
        try:
            return self._answer(prompt, temperature)
        except (APIError, OSError) as error:
            raise self.server.failure(f"prompt {prompt.sample_id}", error) from error

    def ask_at_once(self, prompts: Sequence[Prompt], concurrency: int, temperature: float) -> list[Answer]:
        """Answers in the order of the prompts, `concurrency` requests at a time; one `InvalidInput` if some fail."""
        try:
            with ThreadPoolExecutor(concurrency) as pool:
                return list(pool.map(lambda prompt: self._answer(prompt, temperature), prompts))
        except (APIError, OSError) as error:
            raise self.server.failure(f"{concurrency} requests at once", error) from error

    def next_logits(self, context: Sequence[int], tokens: Sequence[int]) -> tuple[float, list[float]]:
        """The top logit of the token after `context`, and the logits of `tokens`, in the server's own dtype.

        Of a server without a draft alone: it was started to answer with logits where log-probabilities are asked for.
        """
        try:
            reply = self.openai.completions.create(
                model=self.server.name,
                prompt=list(context),
                max_tokens=1,
                temperature=0.0,
                logprobs=0,
                extra_body={"logprob_token_ids": list(tokens), "return_tokens_as_token_ids": True},
            )
        except (APIError, OSError) as error:
            raise self.server.failure(f"the logits after {len(context)} tokens", error) from error
        found = reply.model_dump()["choices"][0]["logprobs"]
        logits = found["top_logprobs"][0]
        return found["token_logprobs"][0], [logits[f"token_id:{token}"] for token in tokens]

    def _answer(self, prompt: Prompt, temperature: float) -> Answer:
        start = time.perf_counter()
        tokens: list[int] = []
        first, echoed, finish, accepted = 0.0, None, "", None
        for event in self._stream(prompt, temperature):
            for choice in event["choices"]:
                echoed = choice.get("prompt_token_ids") or echoed
                tokens += choice.get("token_ids") or []
                finish = choice["finish_reason"] or finish
                first = first or time.perf_counter() - start
            accepted = _accepted(event) or accepted
        seconds = time.perf_counter() - start
        answer = Answer(prompt.sample_id, tokens, accepted or [], finish, seconds, first)
        self._check(prompt, answer, echoed)
        return answer

    def _stream(self, prompt: Prompt, temperature: float) -> Any:
        stream = self.openai.completions.create(
            model=self.server.name,
            prompt=prompt.input_ids,
            max_tokens=prompt.max_new_tokens,
            temperature=temperature,
            stream=True,
            # the last event, after the usage, carries the rounds
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        return (event.model_dump() for event in stream)

    def _check(self, prompt: Prompt, answer: Answer, echoed: list[int] | None) -> None:
        """The server read our ids, and its rounds make up the answer: the prefill's token, then a + 1 for each."""
        if echoed != prompt.input_ids:
            found = f"the server read {len(echoed or [])} other token ids"
            raise _no_rounds(f"prompt {prompt.sample_id}", found, f"the {len(prompt.input_ids)} ids that were sent")
        told, emitted = 1 + sum(accepted + 1 for accepted in answer.accepted), len(answer.token_ids)
        # the last round may have gone past the end of the answer; at the end of the window steps draft nothing
        if not emitted or (self.k and not -self.k - 1 <= told - emitted <= self.k):
            found = f"{emitted} tokens, in rounds that make up {told}"
            raise _no_rounds(f"prompt {prompt.sample_id}", found, "as many tokens as the rounds say")

    def warm_up(self, prompt: Prompt) -> Counters:
        """What the server had counted after one answer that is not measured."""
        self.ask(prompt)
        return self._counters(at_least=0)

    def counted(self, answers: Sequence[Answer], before: Counters) -> Counters:
        """What the server has counted since; `InvalidInput` unless it is the sum of `answers`."""
        told = acceptance_of_counts([count for answer in answers for count in answer.accepted], self.k)
        counted = self._counters(at_least=before.acceptance.rounds + told.rounds) - before
        if counted.acceptance != told:
            raise _no_rounds("/metrics of the server", f"{counted.acceptance}", f"the sum of all answers, {told}")
        return counted

    def _counters(self, at_least: int) -> Counters:
        if not self.k:
            return Counters(0, Acceptance(0, ()))
        deadline = time.monotonic() + COUNTERS_SETTLE_SECONDS
        try:
            while True:
                counters = parse_counters(self.server.get("/metrics")[1], self.k)
                if counters.acceptance.rounds >= at_least or time.monotonic() > deadline:
                    return counters
                time.sleep(0.02)
        except KeyError as error:
            raise _no_rounds("/metrics of the server", f"no counter {error}") from None

    def check_chat(self, content: str, rendered: list[int]) -> None:
        """One chat completion: it is answered, and the server renders `content` to the ids that sampling rendered."""
        try:
            reply = self.openai.chat.completions.create(
                model=self.server.name,
                messages=[{"role": "user", "content": content}],
                max_tokens=CHAT_TOKENS,
                temperature=0.0,
                extra_body={"return_token_ids": True},
            )
        except (APIError, OSError) as error:
            raise self.server.failure("a chat completion", error) from error
        served = reply.model_dump().get("prompt_token_ids")
        if served != rendered:
            raise invalid(
                "other-template",
                f"the chat template, for {content!r}",
                f"the server renders {served}",
                f"{rendered}, as the stage sample does",
                "look for a second template among the verifier's files (chat_template.jinja, tokenizer_config.json)",
                "the draft would be served on prompts that it was not trained for",
            )


@contextmanager
def opened_clients(wanted: Sequence[tuple[ServerSettings, Path]], greeting: list[int]) -> Iterator[list[Client]]:
    """A client for each server with its log. greeting: the ids to which the chat template renders `GREETING`."""
    with vllm_servers(wanted) as servers:
        clients = [
            Client(one, settings.num_speculative_tokens) for one, (settings, _) in zip(servers, wanted, strict=True)
        ]
        for client in clients:
            client.check_chat(GREETING, greeting)
        yield clients


def blocks(asked: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """`TURN` of `asked` at a time: what one server answers before the other one does."""
    return (asked[first : first + TURN] for first in range(0, len(asked), TURN))


def let_idle() -> None:
    """Wait until the server that has just answered costs nothing."""
    time.sleep(IDLE_SECONDS)


def in_turns(servers: int, asked: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
    """Each block to each server, 0 1, 1 0, 0 1 ...: whatever else the machine does meets all of them alike.

    A server that has just answered is waited for before the next one is asked; the last one has been warmed up.
    """
    busy = servers - 1
    for number, block in enumerate(blocks(asked)):
        order = range(servers)
        for turn in reversed(order) if number % 2 else order:
            if turn != busy:
                let_idle()
            busy = turn
            yield turn, block


def ask_in_turns(
    clients: Sequence[Client], prompts: Sequence[Prompt], label: str
) -> list[tuple[list[Answer], Counters]]:
    """Per client: one answer per prompt, in order, after a warm-up; and what its server counted meanwhile.

    Several take turns, in the order 0 1, 1 0, 0 1 ....
    """
    before = [client.warm_up(prompts[0]) for client in clients]
    answers: list[list[Answer]] = [[] for _ in clients]
    with tqdm(total=len(clients) * len(prompts), desc=label, unit="prompt") as bar:
        for turn, block in in_turns(len(clients), prompts):
            for prompt in block:
                answers[turn].append(clients[turn].ask(prompt))
                bar.update()
    counted = [client.counted(given, start) for client, given, start in zip(clients, answers, before, strict=True)]
    return list(zip(answers, counted, strict=True))


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """New tokens per second for a client that waits for each answer, prefill included."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)


def _accepted(event: dict[str, Any]) -> list[int] | None:
    rounds = (event.get("metrics") or {}).get("speculative_decoding") or {}
    return rounds.get("per_step_accepted")


def _no_rounds(where: str, found: str, expected: str = "the rounds of speculative decoding") -> InvalidInput:
    return invalid(
        "server-counts",
        where,
        found,
        expected,
        "declare the vLLM version that this pipeline was written for (engines.vllm)",
        "acceptance cannot be measured",
    )
