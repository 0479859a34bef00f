"""data/draft, data/samples -> data/release, reports/serve_test.json; by hand: python -m stages.serve_test

Serves the draft with the real server, with it and without, and releases it if every gate is passed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from eagle3.atomic_files import write_json, write_text
from eagle3.drafts.walk_files import read_walks
from eagle3.engines import require_engine
from eagle3.machine import read_machine
from eagle3.manifests import read_manifest, verify_files
from eagle3.problems import invalid
from eagle3.sampling.samples import Sample, read_samples
from eagle3.serve.measuring import Plan, measure
from eagle3.serve.question_turns import Asked
from eagle3.serve.questions import read_questions
from eagle3.serve.release import Release, read_passed_checks, require_one_lineage, write_release
from eagle3.serve.serve_groups import context_csv, speed_csv
from eagle3.serve.serve_report import acceptance_csv, build_report, require_gates, walked
from eagle3.serve.serving import GREETING
from eagle3.serve.suite import TOOL_PARSER
from eagle3.serve.vllm_command import ServerSettings
from eagle3.stage_guard import Stage, run_stage
from eagle3.verifiers.chat_tokenizer import load_tokenizer, prompt_ids
from eagle3.verifiers.verifier import resolve_verifier

DRAFT, SAMPLES = Path("data/draft"), Path("data/samples")


def run(stage: Stage) -> None:
    params, k = stage.params.serve_test, stage.params.serve_test.num_speculative_tokens
    engines = require_engine("vllm", stage.params.engines.vllm)
    draft, samples = read_manifest(DRAFT, "flatten"), read_manifest(SAMPLES, "sample")
    verifier = resolve_verifier(stage.params.verifier)
    require_one_lineage(draft, samples, verifier.identity())
    checks = read_passed_checks()
    verify_files(DRAFT, draft)

    window, trusted = samples.used_size("sample", "max_model_len"), stage.params.verifier.trust_remote_code
    tokenizer = load_tokenizer(verifier, trusted)
    render = partial(prompt_ids, tokenizer)
    questions = Asked(
        read_questions(params.questions), render, partial(tokenizer.decode, skip_special_tokens=True), window
    )
    greeting = render([{"role": "user", "content": GREETING}])
    limit, sweep = samples.decided_size("max_new_tokens"), [number for number in params.sweep if number != k]
    full = params.suite == "full"
    plan = Plan(eval_samples(params.num_prompts), questions, limit, greeting, sweep, full)
    parser = TOOL_PARSER if full else ""
    server = ServerSettings(verifier.path, window, read_machine(), trusted, DRAFT, k, tool_parser=parser)
    measured = measure(server, plan, read_walks(DRAFT), stage.scratch)
    stage.figures.update(measured.figures)
    report = build_report(measured, walked(draft, k), walked(draft, k, loops=False))
    complete = require_gates(report, params, stage.scratch / "serve_test.json")
    write_json(stage.out("reports/serve_test.json"), complete)
    write_text(stage.out("reports/acceptance.csv"), acceptance_csv(complete))
    write_text(stage.out("reports/context.csv"), context_csv(complete))
    write_text(stage.out("reports/speed.csv"), speed_csv(complete))
    write_release(stage.out("data/release"), DRAFT, Release(draft, samples, complete, checks, stage.values, engines))
    print(f"serve-test: {len(complete['gates'])} gates passed; the checkpoint is data/release")


def eval_samples(num_prompts: int) -> list[Sample]:
    """The first of the eval split by sample id; ids are digests, so that any number of them is a random choice."""
    chosen = [sample for sample in read_samples(SAMPLES) if sample.split == "eval"][:num_prompts]
    if not chosen:
        raise invalid("no-eval-samples", "data/samples", "none in the split eval", "some", "raise sample.eval_percent")
    return chosen


if __name__ == "__main__":
    sys.exit(run_stage("serve-test", run))
