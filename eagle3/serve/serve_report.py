"""What serve-test measured: the report, the gates it must pass, and the lines a person reads.

Acceptance is what the server counted. Beside it stands the walk of training over the eval answers; the two are compared
over the tokens that both saw: each served answer up to where it parts from the one in data/samples.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.acceptance import Acceptance, acceptance_of_counts, spread
from eagle3.atomic_files import write_json
from eagle3.manifests import Manifest
from eagle3.params import ServeTestParams
from eagle3.problems import InvalidInput, Problem
from eagle3.serve.measuring import Judged, Measured
from eagle3.serve.serve_groups import (
    by_context_length,
    detail_lines,
    questions_report,
    speed_by_drafts,
    speed_report,
    total_of,
    with_intervals,
)
from eagle3.serve.suite import suite_lines, suite_report

# Below this share of reproduced answers, the verifier that is served is not the one that was sampled.
MIN_REPRODUCED = 0.9
Report = dict[str, Any]


def walked(draft: Manifest, k: int, loops: bool = True) -> Report:
    """The walk over eval of the epoch in data/draft, as train recorded it: `Acceptance.as_dict()` for k drafts."""
    epochs = draft.inputs["checkpoints"]["decisions"]["epochs"]
    record = next(record for record in epochs if record["epoch"] == draft.decisions["epoch"])
    return dict(record["walk" if loops else "walk_without_loops"]["eval"][str(k)])


def build_report(measured: Measured, walk: Report, walk_without_loops: Report) -> Report:
    """The content of reports/serve_test.json, without gates.

    walk, walk_without_loops: `Acceptance.as_dict()` of the served epoch over the eval split, at k.
    """
    num_prompts, k = len(measured.prompts), measured.k
    reproduced = measured.num_reproduced()
    per_prompt = [acceptance_of_counts(answer.accepted, k) for answer in measured.with_draft]
    return {
        "prompts": num_prompts,
        "new_tokens": sum(len(answer.token_ids) for answer in measured.with_draft),
        "num_speculative_tokens": k,
        "served": {**with_intervals(per_prompt), **measured.counted.as_dict()},
        "served_without_loops": with_intervals(measured.without_loops()),
        "walk": walk,
        "walk_without_loops": walk_without_loops,
        "against_walk": _against_walk(measured.against_walk()),
        "by_context_length": by_context_length(measured.rounds(), k),
        "samples_reproduced": {"prompts": reproduced, "share": round(reproduced / num_prompts, 6)},
        "greedy": _greedy(measured.judged, measured.num_compared),
        "questions": questions_report(measured.turns, measured.too_long, k),
        "suite": suite_report(*measured.suites, k) if measured.suites else None,
        "speed": speed_report(measured.with_draft, measured.without_draft, measured.order),
        "speed_by_drafts": speed_by_drafts(measured),
    }


def _against_walk(pairs: Sequence[tuple[Acceptance, Acceptance]]) -> Report:
    served, walked = (total_of([pair[side] for pair in pairs]) for side in (0, 1))
    gap = round(abs(served.length - walked.length), 6) if served.rounds else None
    return {
        "prompts": sum(pair[0].rounds > 0 for pair in pairs),
        "rounds": served.rounds,
        "acceptance_length": round(served.length, 6),
        "walk_acceptance_length": round(walked.length, 6),
        "gap": gap,
    }


def _greedy(judged: Judged, num_answers: int) -> Report:
    parted, ties = len(judged.differences), sum(one.is_tie for one in judged.differences)
    return {
        "answers": num_answers,
        "equal": num_answers - parted,
        "ties": ties,
        "faults": parted - ties,
        "tie_fraction": round(ties / num_answers, 6),
        "judged_by": judged.by,
        "differences": [one.as_dict() for one in judged.differences],
    }


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
    first = f"{section}.min_position_0_rate"
    return [
        Gate("rounds", f"{section}.min_rounds", served["rounds"], True, params.min_rounds, ASK_MORE),
        Gate("acceptance_length", length, served["acceptance_length"], True, minimum, TRAIN_MORE),
        Gate("acceptance_length_without_loops", length, free["acceptance_length"], True, minimum, TRAIN_MORE),
        Gate("position_0_rate", first, served["rate_per_position"][0], True, params.min_position_0_rate, TRAIN_MORE),
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
        *_suite_gates(report["suite"]),
    ]


def _suite_gates(suite: Report | None) -> list[Gate]:
    if suite is None:
        return []
    fix = f"{ENGINE_FAULT}: {'; '.join(suite['faults'])}"
    return [Gate("suite_faults", "serve_test.suite", len(suite["faults"]), False, 0, fix)]


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
    """reports/acceptance.csv: the rate at each drafted position, served (with its 95% interval) and walked."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["position", "served", "served_low", "served_high", "walk"])
    served, walked_rates = report["served"], report["walk"]["rate_per_position"]
    intervals = served["rate_interval_95_per_position"] or [(None, None)] * len(walked_rates)
    rows = zip(served["rate_per_position"], intervals, walked_rates, strict=True)
    writer.writerows([position, rate, *interval, walk] for position, (rate, interval, walk) in enumerate(rows))
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
            *([f"  judged by           {greedy['judged_by']}"] if greedy["judged_by"] else []),
            f"tokens/s              {speed['tokens_per_second_with_draft']} with the draft, "
            f"{speed['tokens_per_second_without_draft']} without: {speed['speed_up']} times"
            f"{spread(speed['speed_up_interval_95'], 2)}",
            f"  per prompt          {speed['speed_up_per_prompt']} times"
            f"{spread(speed['speed_up_per_prompt_interval_95'], 2)}, the median",
            f"  both servers asked  {speed['order']}",
            f"first token           {speed['first_token_seconds_with_draft']} s with the draft, "
            f"{speed['first_token_seconds_without_draft']} s without (medians)",
            *detail_lines(report),
            *(suite_lines(report["suite"]) if report["suite"] else []),
        ]
    )


def acceptance_line(acceptance: Report) -> str:
    """`1.830 (95%: 1.762 to 1.901), 3420 rounds, at position 0.457 0.239 0.136`."""
    rates = " ".join(f"{rate:.3f}" for rate in acceptance["rate_per_position"])
    between = spread(acceptance.get("interval_95"))
    return f"{acceptance['acceptance_length']:.3f}{between}, {acceptance['rounds']} rounds, at position {rates}"
