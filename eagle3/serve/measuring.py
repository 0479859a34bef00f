"""One measurement of a draft: the same prompts to servers with it and without it, and what parts their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from eagle3.acceptance import Acceptance, Round, acceptance_of, walk, without_loops
from eagle3.sampling.samples import Sample
from eagle3.serve.greedy_ties import Difference, Judgement, first_difference, judge
from eagle3.serve.question_turns import Asked, Turn, ask_questions
from eagle3.serve.serving import Answer, Client, Counters, Prompt, opened_client
from eagle3.serve.suite import Suite, differences, run_suite
from eagle3.serve.vllm_command import ServerSettings


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
        return [Prompt(one.sample_id, one.input_ids[: one.num_prompt], self.limit) for one in self.samples]


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
    judgements: list[Judgement]
    counted: Acceptance
    right: dict[str, list[int]]
    k: int
    turns: list[Turn]
    too_long: list[str]
    sweep: dict[int, list[Answer]]
    suites: tuple[Suite, Suite] | None
    figures: dict[str, float]
    order: str = "one after the other"

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


def measure(settings: ServerSettings, plan: Plan, right: dict[str, list[int]], logs: Path) -> Measured:
    """Servers one after the other: with the draft, without it, then one for each further number of drafted tokens."""
    figures: dict[str, float] = {}
    with opened_client(settings, logs / "with_draft.log", plan.greeting) as client:
        answers, counters = _ask(client, plan.prompts, "with_draft", figures)
        turns, too_long = ask_questions(client, plan.questions, plan.limit)
        suite = run_suite(client, plan.prompts) if plan.full else None
    alone = replace(settings, draft=None, num_speculative_tokens=0)
    with opened_client(alone, logs / "without_draft.log", plan.greeting) as client:
        others, _ = _ask(client, plan.prompts, "without_draft", figures)
        turns = [replace(turn, other=client.ask(turn.prompt)) for turn in turns]
        suites = (suite, run_suite(client, plan.prompts, suite.stop)) if suite else None
    sweep = {}
    for k in plan.sweep:
        more = replace(settings, num_speculative_tokens=k)
        with opened_client(more, logs / f"{k}_drafts.log", plan.greeting) as client:
            sweep[k], _ = _ask(client, plan.prompts, f"{k}_drafts", figures)
    sampled = [one.input_ids[one.num_prompt :] for one in plan.samples]
    pairs = [
        *zip(plan.prompts, others, answers, strict=True),
        *((turn.prompt, turn.other, turn.answer) for turn in turns),
    ]
    parted = [*filter(None, map(_parting, pairs)), *(differences(*suites) if suites else [])]
    judgements = judge(settings.verifier, parted, settings.trust_remote_code)
    k, counted = settings.num_speculative_tokens, counters.acceptance
    return Measured(
        plan.prompts, answers, others, sampled, judgements, counted, right, k, turns, too_long, sweep, suites, figures
    )


def _ask(
    client: Client, prompts: Sequence[Prompt], name: str, figures: dict[str, float]
) -> tuple[list[Answer], Counters]:
    answers, counters = client.ask_all(prompts, f"asked {name.replace('_', ' ')}")
    figures[f"server_start_seconds_{name}"] = round(client.server.start_seconds, 1)
    figures[f"asking_seconds_{name}"] = round(sum(answer.seconds for answer in answers), 1)
    return answers, counters


def _parting(asked: tuple[Prompt, Answer, Answer]) -> Difference | None:
    prompt, other, answer = asked
    return first_difference(prompt.sample_id, prompt.input_ids, (other.token_ids, answer.token_ids))
