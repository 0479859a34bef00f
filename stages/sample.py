"""data/conversations, packages, verifier -> data/samples; by hand, in the root: python -m stages.sample."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from eagle3.engines import require_engine
from eagle3.machine import read_machine
from eagle3.manifests import Manifest, write_manifest
from eagle3.sampling.answers import BATCH, Answering, Generation, answer_split, closed_counts
from eagle3.sampling.conversation_sources import read_sources
from eagle3.sampling.conversations import SPLITS, Skipped, write_skipped
from eagle3.sampling.prompt_selection import select
from eagle3.sampling.samples import Sample, write_samples
from eagle3.stage_guard import Stage, run_stage
from eagle3.states.vllm_engine import start_engine
from eagle3.verifiers.chat_tokenizer import load_tokenizer, prompt_ids, special_token_ids
from eagle3.verifiers.verifier import require_window, resolve_verifier

# A prefix cache would let the bits of an answer hang on the prompts before it, so on where a killed run resumed.
ENGINE_OPTIONS: dict[str, Any] = {"max_num_seqs": BATCH, "enable_prefix_caching": False}


def run(stage: Stage) -> None:
    sample, trust_remote_code = stage.params.sample, stage.params.verifier.trust_remote_code
    engines = require_engine("vllm", stage.params.engines.vllm)
    machine = read_machine()
    rows = read_sources(sample.sources)
    verifier = resolve_verifier(stage.params.verifier)
    require_window(verifier, sample.max_model_len)
    tokenizer = load_tokenizer(verifier, trust_remote_code)
    vocab_size = verifier.text_config["vocab_size"]
    selection = select(rows, sample, vocab_size, partial(prompt_ids, tokenizer))

    start = partial(start_engine, verifier.path, machine, sample.max_model_len, trust_remote_code, **ENGINE_OPTIONS)
    how = (stage.params.seed, sample.temperature, sample.max_new_tokens, sample.max_model_len)
    answering = Answering(Generation(verifier.sha256, engines, *how), stage.scratch, start)
    made: list[Sample | Skipped] = []
    for split in SPLITS:
        answered, rate = answer_split(answering, selection, split)
        made += answered
        if rate.tokens:
            stage.figures[f"{split}_tokens_per_second"] = round(rate.per_second, 1)

    folder = stage.out("data/samples")
    samples = write_samples(folder, (one for one in made if isinstance(one, Sample)))
    skipped = [*selection.skipped, *(one for one in made if isinstance(one, Skipped))]
    write_skipped(folder / "skipped.jsonl", skipped)
    counts, by_reason = closed_counts(selection.read, samples, skipped)
    decisions = {
        "vocab_size": vocab_size,
        "special_token_ids": special_token_ids(tokenizer, verifier),
        "skipped_by_reason": by_reason,
        "max_new_tokens": sample.max_new_tokens,
        "generation": {
            **{"train": f"in batches of {BATCH}", "val": f"in batches of {BATCH}", "eval": "one prompt at a time"},
            **{"dtype": "bfloat16", "enforce_eager": True, **ENGINE_OPTIONS},
            "temperature": sample.temperature,
        },
    }
    identity = verifier.identity()
    write_manifest(folder, Manifest("sample", stage.values, {}, identity, engines, counts, decisions))
    listed = ", ".join(f"{name} {count}" for name, count in (counts | by_reason).items())
    print(f"sample: {listed}", flush=True)


if __name__ == "__main__":
    sys.exit(run_stage("sample", run))
