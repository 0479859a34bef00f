"""serve_test.suite full: what clients do with a server beyond one greedy prompt at a time.

Probes are chat requests at temperature 0: each is asked whole and streamed, which must give the same tokens; the server
with the draft and the one without it must agree as for any greedy answer. Loads are completions of eval prompts, some
at once, at temperature 0 and 1: measured and not judged, since batches round bf16 otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from openai import APIError
from tqdm import tqdm

from eagle3.acceptance import acceptance_of_counts
from eagle3.serve.greedy_ties import Difference, first_difference
from eagle3.serve.serving import Answer, Client, Prompt

QUESTION = {"role": "user", "content": "Why is the sky blue? Answer in two sentences."}
SEVERAL_TURNS = [
    QUESTION,
    {
        "role": "assistant",
        "content": "Air scatters blue light more than red. So blue comes from everywhere.",
    },
    {"role": "user", "content": "And why is it red in the evening?"},
]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# vLLM's parser for the verifier's own calls; with tool_choice required the grammar writes them, whatever the parser
TOOL_PARSER = "hermes"
PROBE_TOKENS = 64
# A proposal of the draft's likeliest token is accepted with the verifier's probability of it: less often than greedily,
# but not hardly ever, as in vLLM 0.32.0's CPU build, whose expand kernel never writes the temperatures.
MIN_SHARE_AT_TEMPERATURE = 0.2
CONCURRENCIES, TEMPERATURES, LOAD_PROMPTS = (1, 8), (0.0, 1.0), 16


@dataclass(frozen=True)
class Reply:
    """A chat completion. tool_calls: (name, arguments) each."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    tool_calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Load:
    """Prompts asked `concurrency` at a time; seconds: from the first request to the last answer."""

    concurrency: int
    temperature: float
    answers: list[Answer]
    seconds: float

    def as_dict(self, k: int, alone: Load) -> dict[str, Any]:
        """alone: the same prompts one at a time at temperature 0."""
        equal = sum(one.token_ids == other.token_ids for one, other in zip(self.answers, alone.answers, strict=True))
        rounds = [count for answer in self.answers for count in answer.accepted]
        return {
            "concurrency": self.concurrency,
            "temperature": self.temperature,
            "prompts": len(self.answers),
            "tokens_per_second": round(sum(len(one.token_ids) for one in self.answers) / self.seconds, 2),
            "first_token_seconds": round(median(one.first_token_seconds for one in self.answers), 4),
            "acceptance_length": round(acceptance_of_counts(rounds, k).length, 6) if k else None,
            "equal_to_one_at_a_time": equal,
        }


@dataclass(frozen=True)
class Suite:
    """What one server answered: each probe whole and streamed, and the loads."""

    probes: dict[str, tuple[Reply, Reply]]
    loads: list[Load]
    stop: str


def run_suite(client: Client, prompts: Sequence[Prompt], stop: str = "") -> Suite:
    """stop: where the probe of stop strings ends; a word of this server's own answer if none is given."""
    probes = {
        "chat": _both(client, [QUESTION]),
        "several_turns": _both(client, SEVERAL_TURNS),
        "tool_call": _both(client, [QUESTION], tools=[WEATHER_TOOL], tool_choice="required"),
    }
    stop = stop or stop_string(probes["chat"][0].text)
    probes["stop_string"] = _both(client, [QUESTION], stop=[stop])
    settings = [(number, temperature) for temperature in TEMPERATURES for number in CONCURRENCIES]
    asked = prompts[:LOAD_PROMPTS]
    loads = [_load(client, asked, *one) for one in tqdm(settings, desc="requests at once", unit="setting")]
    return Suite(probes, loads, stop)


def stop_string(text: str) -> str:
    """A word from the middle of what the server says, so that stopping there leaves something before and after it.

    >>> stop_string("Air scatters blue light more than red.")
    'light'
    """
    words = text.split()
    return words[len(words) // 2] if words else "."


def _both(client: Client, messages: list[dict[str, str]], **options: Any) -> tuple[Reply, Reply]:
    request = {
        "model": client.server.name,
        "messages": messages,
        "max_tokens": PROBE_TOKENS,
        "temperature": 0.0,
        "extra_body": {"return_token_ids": True},
        **options,
    }
    try:
        whole = client.openai.chat.completions.create(**request).model_dump()
        events = [event.model_dump() for event in client.openai.chat.completions.create(stream=True, **request)]
    except (APIError, OSError) as error:
        raise client.server.failure("a chat completion", error) from error
    return _whole(whole), _streamed(events)


def _whole(reply: dict[str, Any]) -> Reply:
    [choice] = reply["choices"]
    calls = tuple(
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"] or ()
    )
    text = choice["message"]["content"] or ""
    return Reply(reply["prompt_token_ids"], choice["token_ids"], text, choice["finish_reason"], calls)


def _streamed(events: Sequence[dict[str, Any]]) -> Reply:
    prompt_ids: list[int] = []
    tokens: list[int] = []
    text, finish = "", ""
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            text += choice["delta"]["content"] or ""
            finish = choice["finish_reason"] or finish
            for part in choice["delta"]["tool_calls"] or ():
                name, arguments = calls.get(part["index"], ("", ""))
                function = part["function"]
                calls[part["index"]] = (name + (function["name"] or ""), arguments + (function["arguments"] or ""))
    return Reply(prompt_ids, tokens, text, finish, tuple(calls[index] for index in sorted(calls)))


def _load(client: Client, prompts: Sequence[Prompt], concurrency: int, temperature: float) -> Load:
    start = time.perf_counter()
    answers = client.ask_at_once(prompts, concurrency, temperature)
    return Load(concurrency, temperature, answers, time.perf_counter() - start)


def suite_report(one: Suite, other: Suite, k: int) -> dict[str, Any]:
    """Faults of both servers, and their loads: `with_draft`, `without_draft`."""
    loads = [load.as_dict(k, one.loads[0]) for load in one.loads]
    return {
        "warnings": temperature_warnings(loads),
        "faults": [*faults(one, "with the draft"), *faults(other, "without the draft")],
        "answers": {name: reply.text for name, (reply, _) in one.probes.items()},
        "tool_calls": [list(call) for call in one.probes["tool_call"][0].tool_calls],
        "with_draft": loads,
        "without_draft": [load.as_dict(0, other.loads[0]) for load in other.loads],
    }


def temperature_warnings(loads: Sequence[dict[str, Any]]) -> list[str]:
    """Loads at a temperature at which hardly any draft was accepted, measured against the greedy ones."""
    greedy = min(load["acceptance_length"] for load in loads if not load["temperature"])
    return [
        f"at temperature {load['temperature']:g}, {load['concurrency']} at once, the acceptance length is "
        f"{load['acceptance_length']:.3f} against {greedy:.3f} greedily: the server does not sample as it says"
        for load in loads
        if load["temperature"] and load["acceptance_length"] - 1 < MIN_SHARE_AT_TEMPERATURE * (greedy - 1)
    ]


def suite_lines(report: dict[str, Any]) -> list[str]:
    """The loads with and without the draft, side by side, for a person."""
    lines = [f"WARNING: {warning}" for warning in report["warnings"]]
    for one, other in zip(report["with_draft"], report["without_draft"], strict=True):
        speeds = f"{one['tokens_per_second']} against {other['tokens_per_second']} tokens/s"
        lines.append(
            f"  {one['concurrency']} at once, temperature {one['temperature']:g}   acceptance length "
            f"{one['acceptance_length']:.3f}, {speeds}, {one['equal_to_one_at_a_time']} of {one['prompts']} as alone"
        )
    return lines


def differences(one: Suite, other: Suite) -> list[Difference]:
    """Where the probes' answers with the draft (`one`) and without it (`other`) part."""
    parted = []
    for name, (reply, _) in one.probes.items():
        pair = (other.probes[name][0].token_ids, reply.token_ids)
        found = first_difference(f"suite:{name}", reply.prompt_ids, pair)
        if found:
            parted.append(replace(found, constrained=name == "tool_call"))
    return parted


def faults(served: Suite, name: str) -> list[str]:
    """What is wrong with the answers of one server, as words; none if all is well."""
    found = []
    for probe, (whole, streamed) in served.probes.items():
        if whole != streamed:
            found.append(f"{name}, {probe}: the streamed answer is not the whole one")
    stopped, chat = served.probes["stop_string"][0], served.probes["chat"][0]
    # a server whose own answer parts from the other's before that word goes on to the end of it
    if stopped.text != chat.text.partition(served.stop)[0]:
        found.append(f"{name}, stop_string: {served.stop!r} did not cut the answer where it first stands")
    if served.stop in chat.text and stopped.finish_reason != "stop":
        found.append(f"{name}, stop_string: {served.stop!r} did not end the answer ({stopped.finish_reason})")
    if not served.probes["tool_call"][0].tool_calls:
        found.append(f"{name}, tool_call: no call, though one is required")
    return found
