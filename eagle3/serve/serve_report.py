"""What serve-test measured: the report, the gates it must pass, and the lines a person reads.

Acceptance is what the server counted. Beside it stands the walk of training over the eval answers; the two are compared
over the tokens that both saw: each served answer up to where it parts from the one in data/samples.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from eagle3.acceptance import Acceptance, acceptance_of, acceptance_of_counts, bootstrap_interval, walk, without_loops
from eagle3.atomic_files import write_json
from eagle3.manifests import Manifest
from eagle3.params import ServeTestParams
from eagle3.problems import InvalidInput, Problem
from eagle3.serve.greedy_ties import Judgement
from eagle3.serve.serving import Answer, Prompt, tokens_per_second

# Below this share of reproduced answers, the verifier that is served is not the one that was sampled.
MIN_REPRODUCED = 0.9
Report = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One run: prompts, their answers by both servers and in data/samples, and the judged differences between servers.

    counted: what the server with the draft counted for all prompts, k drafts a round. right: what training found right
    in each sampled answer (`eagle3.drafts.walk_files`).
    """

    prompts: list[Prompt]
    with_draft: list[Answer]
    without_draft: list[Answer]
    sampled: list[list[int]]
    judgements: list[Judgement]
    counted: Acceptance
    right: dict[str, list[int]]
    k: int

    def acceptances(self, loops: bool = True) -> list[Acceptance]:
        """Per prompt, counted as the walk counts; without `loops`, rounds inside a repeated 8-gram are left out."""
        found = []
        for prompt, answer in zip(self.prompts, self.with_draft, strict=True):
            rounds = answer.rounds(len(prompt.input_ids))
            kept = rounds if loops else without_loops(rounds, [*prompt.input_ids, *answer.token_ids])
            found.append(acceptance_of(kept, self.k))
        return found

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


def walked(draft: Manifest, k: int, loops: bool = True) -> Report:
    """The walk over eval of the epoch in data/draft, as train recorded it: `Acceptance.as_dict()` for k drafts."""
    epochs = draft.inputs["checkpoints"]["decisions"]["epochs"]
    record = next(record for record in epochs if record["epoch"] == draft.decisions["epoch"])
    return dict(record["walk" if loops else "walk_without_loops"]["eval"][str(k)])


def build_report(measured: Measured, walk: Report, walk_without_loops: Report) -> Report:
    """The content of reports/serve_test.json, without gates.

    walk, walk_without_loops: `Acceptance.as_dict()` of the served epoch over the eval split, at k.
    """
    num_prompts = len(measured.prompts)
    reproduced = measured.num_reproduced()
    per_prompt = [acceptance_of_counts(answer.accepted, measured.k) for answer in measured.with_draft]
    rates = tokens_per_second(measured.with_draft), tokens_per_second(measured.without_draft)
    return {
        "prompts": num_prompts,
        "new_tokens": sum(len(answer.token_ids) for answer in measured.with_draft),
        "num_speculative_tokens": measured.k,
        "served": _with_interval(measured.counted, per_prompt),
        "served_without_loops": _with_interval(None, measured.acceptances(loops=False)),
        "walk": walk,
        "walk_without_loops": walk_without_loops,
        "against_walk": _against_walk(measured.against_walk()),
        "samples_reproduced": {"prompts": reproduced, "share": round(reproduced / num_prompts, 6)},
        "greedy": _greedy(measured.judgements, num_prompts),
        "speed": {
            "tokens_per_second_with_draft": round(rates[0], 2),
            "tokens_per_second_without_draft": round(rates[1], 2),
            "speed_up": round(rates[0] / rates[1], 3),
            "first_token_seconds_with_draft": round(median(one.first_token_seconds for one in measured.with_draft), 4),
            "first_token_seconds_without_draft": round(
                median(one.first_token_seconds for one in measured.without_draft), 4
            ),
        },
    }


def _with_interval(total: Acceptance | None, per_prompt: Sequence[Acceptance]) -> Report:
    low, high = bootstrap_interval(per_prompt)
    return {**(total or _sum(per_prompt)).as_dict(), "interval_95": [round(low, 6), round(high, 6)]}


def _against_walk(pairs: Sequence[tuple[Acceptance, Acceptance]]) -> Report:
    served, walked = (_sum([pair[side] for pair in pairs]) for side in (0, 1))
    gap = round(abs(served.length - walked.length), 6) if served.rounds else None
    return {
        "prompts": sum(pair[0].rounds > 0 for pair in pairs),
        "rounds": served.rounds,
        "acceptance_length": round(served.length, 6),
        "walk_acceptance_length": round(walked.length, 6),
        "gap": gap,
    }


def _greedy(judgements: Sequence[Judgement], num_prompts: int) -> Report:
    ties = sum(judgement.is_tie for judgement in judgements)
    return {
        "equal": num_prompts - len(judgements),
        "ties": ties,
        "faults": len(judgements) - ties,
        "tie_fraction": round(ties / num_prompts, 6),
        "differences": [judgement.as_dict() for judgement in judgements],
    }


def _sum(parts: Sequence[Acceptance]) -> Acceptance:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


@dataclass(frozen=True)
class Gate:
    """A bound on one number of the report: at least `bound` if `lower`, else at most."""

    name: str
    where: str
    value: float | None
    lower: bool
    bound: float
    fix: str

    @property
    def passed(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.lower else self.value <= self.bound

    def as_dict(self) -> Report:
        return {"value": self.value, "at_least" if self.lower else "at_most": self.bound, "passed": self.passed}

    def problem(self) -> Problem:
        side = "at least" if self.lower else "at most"
        return Problem("gate-missed", self.where, f"{self.name} = {self.value}", f"{side} {self.bound}", self.fix)


TRAIN_MORE = "train on more samples (sample.max_train) or longer (train.epochs), or lower the bound on purpose"
ASK_MORE = "ask more prompts: sample.max_eval and serve_test.num_prompts"
LOOK_BETWEEN = (
    "look for what differs between training and serving: layer ids, norms, rope, vocabulary map, head, chat template"
)
SAME_VERIFIER = "sample and serve with one vLLM, one verifier and sample.temperature 0: dvc repro sample"
ENGINE_FAULT = "report it: a draft may change the speed of answers, never their words"


def gates(report: Report, params: ServeTestParams) -> list[Gate]:
    """Every gate of the release, in the order in which a person wants to read them."""
    section, minimum = "serve_test", params.min_acceptance_length
    served, free, greedy = report["served"], report["served_without_loops"], report["greedy"]
    length, ties = f"{section}.min_acceptance_length", f"{section}.max_tie_fraction"
    return [
        Gate("rounds", f"{section}.min_rounds", served["rounds"], True, params.min_rounds, ASK_MORE),
        Gate("acceptance_length", length, served["acceptance_length"], True, minimum, TRAIN_MORE),
        Gate("acceptance_length_without_loops", length, free["acceptance_length"], True, minimum, TRAIN_MORE),
        Gate(
            "gap_to_walk",
            f"{section}.max_gap_to_walk",
            report["against_walk"]["gap"],
            False,
            params.max_gap_to_walk,
            LOOK_BETWEEN,
        ),
        Gate(
            "samples_reproduced",
            "data/samples",
            report["samples_reproduced"]["share"],
            True,
            MIN_REPRODUCED,
            SAME_VERIFIER,
        ),
        Gate("greedy_faults", "greedy answers", greedy["faults"], False, 0, ENGINE_FAULT),
        Gate("tie_fraction", ties, greedy["tie_fraction"], False, params.max_tie_fraction, ASK_MORE),
    ]


def require_gates(report: Report, params: ServeTestParams, keep: Path) -> Report:
    """The report with its gates, printed and kept at `keep`; `InvalidInput` with every gate that was missed."""
    found = gates(report, params)
    complete = {**report, "gates": {gate.name: gate.as_dict() for gate in found}}
    print(report_lines(complete), flush=True)
    write_json(keep, complete)
    if missed := [gate.problem() for gate in found if not gate.passed]:
        print(f"every number measured: {keep}", flush=True)
        raise InvalidInput(*missed)
    return complete


def acceptance_csv(report: Report) -> str:
    """reports/acceptance.csv: position, served, walk; one row per drafted position."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["position", "served", "walk"])
    rates = zip(report["served"]["rate_per_position"], report["walk"]["rate_per_position"], strict=True)
    writer.writerows([position, served, walk] for position, (served, walk) in enumerate(rates))
    return text.getvalue()


def report_lines(report: Report) -> str:
    """The measured numbers on a few terminal lines."""
    against, greedy, speed = report["against_walk"], report["greedy"], report["speed"]
    gap = "no token in common" if against["gap"] is None else f"gap {against['gap']:.4f}"
    return "\n".join(
        [
            f"asked                 {report['prompts']} prompts, {report['new_tokens']} new tokens, "
            f"{report['num_speculative_tokens']} drafted a round",
            f"acceptance length     {acceptance_line(report['served'])}",
            f"  without loops       {acceptance_line(report['served_without_loops'])}",
            f"  walk of training    {acceptance_line(report['walk'])}",
            f"  over the same       {against['rounds']} rounds of {against['prompts']} answers: served "
            f"{against['acceptance_length']:.3f}, walk {against['walk_acceptance_length']:.3f}, {gap}",
            f"greedy answers        {greedy['equal']} equal with and without the draft, {greedy['ties']} near-ties, "
            f"{greedy['faults']} faults; {report['samples_reproduced']['prompts']} as in data/samples",
            f"tokens/s              {speed['tokens_per_second_with_draft']} with the draft, "
            f"{speed['tokens_per_second_without_draft']} without: {speed['speed_up']} times",
        ]
    )


def acceptance_line(acceptance: Report) -> str:
    """`1.830 (95%: 1.762 to 1.901), 3420 rounds, at position 0.457 0.239 0.136`."""
    interval = acceptance.get("interval_95")
    between = f" (95%: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    rates = " ".join(f"{rate:.3f}" for rate in acceptance["rate_per_position"])
    return f"{acceptance['acceptance_length']:.3f}{between}, {acceptance['rounds']} rounds, at position {rates}"
