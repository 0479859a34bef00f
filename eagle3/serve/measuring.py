"""One measurement of a draft: the same prompts to servers with it and without it, and what parts their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from eagle3.acceptance import Acceptance, Round, acceptance_of, walk, without_loops
from eagle3.gpus import num_gpus
from eagle3.machine import available_memory
from eagle3.sampling.samples import Sample
from eagle3.serve.greedy_ties import Difference, Judgement, Logits, first_difference, judge, reference_logits
from eagle3.serve.question_turns import Asked, Turn, ask_again, ask_questions
from eagle3.serve.serving import TURN, Answer, Client, Counters, Prompt, ask_in_turns, opened_clients
from eagle3.serve.suite import Suite, differences, run_suite
from eagle3.serve.vllm_command import ServerSettings, num_ranks, server_memory
from eagle3.verifiers.reference_model import NoReference

NAMES = "with_draft", "without_draft"
Wanted = tuple[ServerSettings, Path]
Parted = list[tuple[Difference, Logits]]


@dataclass(frozen=True)
class Plan:
    """What is asked: the eval samples, questions, and how many tokens an answer may have.

    greeting: the ids to which sampling renders `serving.GREETING`. sweep: further numbers of drafted tokens. full: the
    suite too.
    """

    samples: list[Sample]
    questions: Asked
    limit: int
    greeting: list[int]
    sweep: list[int]
    full: bool

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(one.sample_id, list(one.input_ids[: one.num_prompt]), self.limit) for one in self.samples]


@dataclass(frozen=True)
class Judged:
    """Where the two servers' greedy answers part, and who computed the logits that judge it, as words."""

    differences: list[Judgement]
    by: str


@dataclass(frozen=True)
class Measured:
    """One run: prompts, their answers by both servers and in data/samples, and the judged differences between servers.

    counted: what the server with the draft counted for all prompts, k drafts a round. right: what training found right
    in each sampled answer (`eagle3.drafts.walk_files`). turns: the questions with both servers' answers;
    too_long: ids of turns that do not fit. sweep: number of drafted tokens -> answers. suites: with the draft and
    without it. figures: seconds by name. order: how the two servers were measured, as words.
    """

    prompts: list[Prompt]
    with_draft: list[Answer]
    without_draft: list[Answer]
    sampled: list[list[int]]
    judged: Judged
    counted: Acceptance
    right: dict[str, list[int]]
    k: int
    turns: list[Turn]
    too_long: list[str]
    sweep: dict[int, list[Answer]]
    suites: tuple[Suite, Suite] | None
    figures: dict[str, float]
    order: str

    @property
    def num_compared(self) -> int:
        """Greedy answers that both servers gave."""
        return len(self.prompts) + len(self.turns) + (len(self.suites[0].probes) if self.suites else 0)

    def rounds(self) -> list[list[Round]]:
        """Per prompt, counted as the walk counts."""
        pairs = zip(self.prompts, self.with_draft, strict=True)
        return [answer.rounds(len(prompt.input_ids)) for prompt, answer in pairs]

    def without_loops(self) -> list[Acceptance]:
        """Per prompt, rounds inside a repeated 8-gram left out."""
        rows = zip(self.prompts, self.with_draft, self.rounds(), strict=True)
        kept = (without_loops(rounds, [*prompt.input_ids, *answer.token_ids]) for prompt, answer, rounds in rows)
        return [acceptance_of(rounds, self.k) for rounds in kept]

    def num_reproduced(self) -> int:
        pairs = zip(self.without_draft, self.sampled, strict=True)
        return sum(answer.token_ids == sampled for answer, sampled in pairs)

    def against_walk(self) -> list[tuple[Acceptance, Acceptance]]:
        """Per prompt, what the server and what the walk of training accepted, over the tokens that both saw."""
        pairs = []
        for prompt, answer, sampled in zip(self.prompts, self.with_draft, self.sampled, strict=True):
            shared = sum(takewhile(bool, map(int.__eq__, answer.token_ids, sampled)))
            right_n, n0 = self.right.get(prompt.sample_id, [])[: max(0, shared - 1)], len(prompt.input_ids)
            rounds = answer.rounds(n0, len(right_n) + 1), walk(right_n, n0, self.k)
            pairs.append((acceptance_of(rounds[0], self.k), acceptance_of(rounds[1], self.k)))
        return pairs


@dataclass(frozen=True)
class Served:
    """What one server gave: the eval answers, what it counted meanwhile, its answers to questions, its suite."""

    answers: list[Answer]
    counters: Counters
    turns: list[Turn]
    too_long: list[str]
    suite: Suite | None


def measure(settings: ServerSettings, plan: Plan, right: dict[str, list[int]], logs: Path) -> Measured:
    """The server with the draft and the one without it, in turns where both fit; then one for each number of drafts."""
    figures: dict[str, float] = {}
    alone = replace(settings, draft=None, num_speculative_tokens=0)
    both = (settings, logs / "with_draft.log"), (alone, logs / "without_draft.log")
    why_apart = apart(settings)
    served, other, parted = _one_by_one(both, plan, figures) if why_apart else _in_turns(both, plan, figures)
    sweep = {}
    for k in plan.sweep:
        more = replace(settings, num_speculative_tokens=k), logs / f"{k}_drafts.log"
        with opened_clients([more], plan.greeting) as clients:
            [(sweep[k], _)] = _ask(clients, plan, [f"{k}_drafts"], figures)
    sampled = [list(one.input_ids[one.num_prompt :]) for one in plan.samples]
    return Measured(
        prompts=plan.prompts,
        with_draft=served.answers,
        without_draft=other.answers,
        sampled=sampled,
        judged=judged(settings, parted),
        counted=served.counters.acceptance,
        right=right,
        k=settings.num_speculative_tokens,
        turns=other.turns,
        too_long=served.too_long,
        sweep=sweep,
        suites=(served.suite, other.suite) if served.suite and other.suite else None,
        figures=figures,
        order=f"one after the other ({why_apart})" if why_apart else f"in turns of {TURN} prompts",
    )


def apart(settings: ServerSettings) -> str:
    """Why the two servers cannot run at once on this machine; "" if they can."""
    if num_gpus():
        return "each takes a GPU's memory"
    if settings.machine.port:
        return "machine.yaml gives one port"
    if num_ranks(settings.machine) > 1:
        return "several ranks"
    return "" if 2 * server_memory(settings) <= available_memory() else "two do not fit into memory"


def _in_turns(both: tuple[Wanted, Wanted], plan: Plan, figures: dict[str, float]) -> tuple[Served, Served, Parted]:
    with opened_clients(both, plan.greeting) as clients:
        (answers, counters), (others, _) = _ask(clients, plan, NAMES, figures)
        turns, too_long = ask_questions(clients, plan.questions, plan.limit)
        served = Served(answers, counters, turns, too_long, _suite(clients[0], plan))
        other = replace(served, answers=others, suite=_suite(clients[1], plan, served.suite))
        return served, other, _parted(clients[1], plan.prompts, served, other)


def _one_by_one(both: tuple[Wanted, Wanted], plan: Plan, figures: dict[str, float]) -> tuple[Served, Served, Parted]:
    with opened_clients(both[:1], plan.greeting) as clients:
        [(answers, counters)] = _ask(clients, plan, NAMES[:1], figures)
        turns, too_long = ask_questions(clients, plan.questions, plan.limit)
        served = Served(answers, counters, turns, too_long, _suite(clients[0], plan))
    with opened_clients(both[1:], plan.greeting) as clients:
        [(others, _)] = _ask(clients, plan, NAMES[1:], figures)
        turns = ask_again(clients[0], turns)
        other = replace(served, answers=others, turns=turns, suite=_suite(clients[0], plan, served.suite))
        return served, other, _parted(clients[0], plan.prompts, served, other)


def _suite(client: Client, plan: Plan, served: Suite | None = None) -> Suite | None:
    """served: the suite of the server with the draft, whose stop string the other one is given too."""
    return run_suite(client, plan.prompts, served.stop if served else "") if plan.full else None


def _ask(
    clients: Sequence[Client], plan: Plan, names: Sequence[str], figures: dict[str, float]
) -> list[tuple[list[Answer], Counters]]:
    """`ask_in_turns`; each server's times go into `figures` under its name."""
    found = ask_in_turns(clients, plan.prompts, f"asked {' and '.join(names).replace('_', ' ')}")
    for client, name, (answers, _) in zip(clients, names, found, strict=True):
        figures[f"server_start_seconds_{name}"] = round(client.server.start_seconds, 1)
        figures[f"asking_seconds_{name}"] = round(sum(answer.seconds for answer in answers), 1)
    return found


def _parted(alone: Client, prompts: Sequence[Prompt], served: Served, other: Served) -> Parted:
    """Where greedy answers part, each with what the server without a draft computes there."""
    asked = [
        *zip(prompts, other.answers, served.answers, strict=True),
        *((turn.prompt, turn.other, turn.answer) for turn in other.turns),
    ]
    of_answers = (
        first_difference(prompt.sample_id, prompt.input_ids, (without.token_ids, with_it.token_ids))
        for prompt, without, with_it in asked
    )
    of_suites = differences(served.suite, other.suite) if served.suite and other.suite else []
    return [(one, alone.next_logits(one.context, one.said)) for one in (*filter(None, of_answers), *of_suites)]


def judged(settings: ServerSettings, parted: Parted) -> Judged:
    """By the server's own logits where there is no reference: 1T weights in float32 are 4 TB."""
    if not parted:
        return Judged([], "")
    places, logits = [one for one, _ in parted], [own for _, own in parted]
    try:
        logits = reference_logits(settings.verifier, settings.trust_remote_code, places)
        by = "transformers, float32"
    except NoReference as why:
        by = f"the server without the draft, for there is no reference: {why}"
    return Judged(judge(places, logits), by)
