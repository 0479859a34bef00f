"""data/conversations, packages, datasets, verifier -> data/samples; by hand, in the root: python -m stages.sample."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from eagle3.engines import require_engine
from eagle3.machine import read_machine
from eagle3.manifests import Manifest, write_manifest
from eagle3.params import SampleParams
from eagle3.sampling.answers import Answering, Generation
from eagle3.sampling.conversation_sources import Sources
from eagle3.sampling.conversations import SPLITS, SkippedFile
from eagle3.sampling.kept import require_nesting
from eagle3.sampling.prompt_selection import select
from eagle3.sampling.sample_making import SampleMaking
from eagle3.sampling.samples import write_samples
from eagle3.sampling.turns import keeps_answers
from eagle3.stage_guard import Stage, run_stage
from eagle3.states.vllm_engine import start_engine
from eagle3.verifiers.chat_tokenizer import load_chat, special_token_ids, template_token_ids
from eagle3.verifiers.verifier import require_window, resolve_verifier

# A prefix cache would let the bits of an answer hang on the prompts before it, so on where a killed run resumed.
NO_PREFIX_CACHE: dict[str, Any] = {"enable_prefix_caching": False}


def run(stage: Stage) -> None:
    sample, trust_remote_code = stage.params.sample, stage.params.verifier.trust_remote_code
    engines = require_engine("vllm", stage.params.engines.vllm)
    machine = read_machine()
    sources = Sources(sample.sources)
    verifier = resolve_verifier(stage.params.verifier)
    require_window(verifier, sample.max_model_len)
    chat = load_chat(verifier, trust_remote_code)
    if sample.mode == "keep":
        require_nesting(chat)

    options = {"max_num_seqs": sample.max_num_seqs, **NO_PREFIX_CACHE}
    start = partial(start_engine, verifier.path, machine, sample.max_model_len, trust_remote_code, **options)
    how = (sample.temperature, sample.top_p, sample.max_new_tokens, sample.max_model_len, sample.max_num_seqs)
    answering = Answering(Generation(verifier.sha256, engines, stage.params.seed, *how), stage.scratch, start)
    folder = stage.out("data/samples")
    with SkippedFile(folder / "skipped.jsonl") as skipped:
        making = SampleMaking(answering, chat, sample, skipped)
        selection = select(sources, sample, making.unusable, skipped)
        found = write_samples(
            folder, (one for split in SPLITS for one in making.samples(selection.prompts[split], split))
        )
    counts, by_reason = making.closed_counts(selection)
    for split, rate in answering.rates.items():
        stage.figures[f"{split}_tokens_per_second"] = round(rate.per_second, 1)

    decisions = {
        "vocab_size": chat.vocab_size,
        "special_token_ids": special_token_ids(chat.tokenizer, verifier),
        "template_token_ids": template_token_ids(chat),
        "skipped_by_reason": by_reason,
        "sources": sources.read,
        "turns": making.turns.as_dict(),
        "max_new_tokens": sample.max_new_tokens,
        "greedy_splits": [] if sample.temperature else [one for one in SPLITS if not keeps_answers(sample, one)],
        "generation": {
            **_generated(sample),
            **{"dtype": "bfloat16", "enforce_eager": True, **options},
            "temperature": sample.temperature,
        },
    }
    write_manifest(
        folder, Manifest("sample", stage.values, {}, verifier.identity(), engines, counts | found, decisions)
    )
    listed = ", ".join(f"{name} {count}" for name, count in (counts | found | by_reason).items())
    print(f"sample: {listed}", flush=True)


def _generated(sample: SampleParams) -> dict[str, str]:
    together = f"in batches of {sample.max_num_seqs}"
    train = "not generated: the given answers" if sample.mode == "keep" else together
    return {"train": train, "val": together, "eval": "one prompt at a time"}


if __name__ == "__main__":
    sys.exit(run_stage("sample", run))
