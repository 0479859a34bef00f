"""data/draft, data/samples -> data/release, reports/serve_test.json; by hand: python -m stages.serve_test

Serves the draft with the real server, with it and without, and releases it if every gate is passed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from eagle3.atomic_files import write_json, write_text
from eagle3.drafts.walk_files import read_walks
from eagle3.engines import require_engine
from eagle3.machine import read_machine
from eagle3.manifests import read_manifest, verify_files
from eagle3.problems import invalid
from eagle3.sampling.samples import Sample, read_samples
from eagle3.serve.greedy_ties import first_difference, judge
from eagle3.serve.release import Release, read_passed_checks, require_one_lineage, write_release
from eagle3.serve.serve_report import Measured, acceptance_csv, build_report, require_gates, walked
from eagle3.serve.serving import GREETING, Prompt, ask_server
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

    window, trusted = samples.params["sample"]["max_model_len"], stage.params.verifier.trust_remote_code
    greeting = prompt_ids(load_tokenizer(verifier, trusted), [{"role": "user", "content": GREETING}])
    server = ServerSettings(verifier.path, window, read_machine(), trusted, DRAFT, k)
    measured = measure(stage, server, eval_samples(params.num_prompts), samples.decisions["max_new_tokens"], greeting)
    report = build_report(measured, walked(draft, k), walked(draft, k, loops=False))
    complete = require_gates(report, params, stage.scratch / "serve_test.json")
    write_json(stage.out("reports/serve_test.json"), complete)
    write_text(stage.out("reports/acceptance.csv"), acceptance_csv(complete))
    write_release(stage.out("data/release"), DRAFT, Release(draft, samples, complete, checks, stage.values, engines))
    print(f"serve-test: {len(complete['gates'])} gates passed; the checkpoint is data/release")


def eval_samples(num_prompts: int) -> list[Sample]:
    """The first of the eval split by sample id; ids are digests, so that any number of them is a random choice."""
    chosen = [sample for sample in read_samples(SAMPLES) if sample.split == "eval"][:num_prompts]
    if not chosen:
        raise invalid("no-eval-samples", "data/samples", "none in the split eval", "some", "raise sample.eval_percent")
    return chosen


def measure(stage: Stage, server: ServerSettings, asked: list[Sample], limit: int, greeting: list[int]) -> Measured:
    """Every prompt with the draft and without it, by two servers one after the other, and what parts their answers."""
    prompts = [Prompt(sample.sample_id, sample.input_ids[: sample.num_prompt], limit) for sample in asked]
    alone = replace(server, draft=None, num_speculative_tokens=0)
    one = ask_server(server, stage.scratch / "with_draft.log", prompts, greeting)
    other = ask_server(alone, stage.scratch / "without_draft.log", prompts, greeting)
    for name, served in (("with_draft", one), ("without_draft", other)):
        stage.figures[f"server_start_seconds_{name}"] = round(served.start_seconds, 1)
        stage.figures[f"asking_seconds_{name}"] = round(sum(answer.seconds for answer in served.answers), 1)
    answers = zip(prompts, other.answers, one.answers, strict=True)
    parted = (
        first_difference(prompt.sample_id, prompt.input_ids, (a.token_ids, b.token_ids)) for prompt, a, b in answers
    )
    judgements = judge(server.verifier, filter(None, parted), server.trust_remote_code)
    sampled = [sample.input_ids[sample.num_prompt :] for sample in asked]
    right, k = read_walks(DRAFT), server.num_speculative_tokens
    return Measured(prompts, one.answers, other.answers, sampled, judgements, one.counted, right, k)


if __name__ == "__main__":
    sys.exit(run_stage("serve-test", run))
