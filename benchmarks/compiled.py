"""What vLLM's compilation gives: the draft in data/draft served as serve-test does, eager, and compiled.

    python -m benchmarks.compiled [PROMPTS]

Four servers, eager and compiled, without the draft and with it, asked the eval prompts in turns. Run it in a repository
whose pipeline has run, alone, where a C++ compiler is found. Whether compiled answers are those of data/samples is
counted too: serve-test needs them to be, for only over those can rounds be compared with the walk of training.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from eagle3.acceptance import acceptance_of_counts
from eagle3.machine import read_machine
from eagle3.manifests import read_manifest
from eagle3.params import read_params
from eagle3.sampling.samples import read_samples
from eagle3.serve import vllm_command
from eagle3.serve.serving import GREETING, Answer, Prompt, ask_in_turns, opened_clients, tokens_per_second
from eagle3.serve.vllm_command import ServerSettings
from eagle3.verifiers.chat_tokenizer import load_tokenizer, prompt_ids
from eagle3.verifiers.verifier import resolve_verifier

DRAFT, SAMPLES = Path("data/draft"), Path("data/samples")
EAGER = vllm_command.measured_flags


def main(num_prompts: int = 32) -> int:
    params, made = read_params(), read_manifest(SAMPLES, "sample")
    verifier, k = resolve_verifier(params.verifier), params.serve_test.num_speculative_tokens
    chosen = [sample for sample in read_samples(SAMPLES) if sample.split == "eval"][:num_prompts]
    sampled = [list(sample.input_ids[sample.num_prompt :]) for sample in chosen]
    limit = made.decided_size("max_new_tokens")
    prompts = [Prompt(one.sample_id, list(one.input_ids[: one.num_prompt]), limit) for one in chosen]
    greeting = prompt_ids(load_tokenizer(verifier, False), [{"role": "user", "content": GREETING}])

    served = ServerSettings(verifier.path, made.used_size("sample", "max_model_len"), read_machine(), draft=DRAFT)
    both = {"without the draft": replace(served, draft=None), "with it": replace(served, num_speculative_tokens=k)}
    with tempfile.TemporaryDirectory() as folder:
        wanted = {f"{mode}, {name}": one for mode in ("eager", "compiled") for name, one in both.items()}
        logs = [(one, Path(folder) / f"{number}.log") for number, one in enumerate(wanted.values())]
        with (
            opened_clients(logs[:2], greeting) as eager,
            patch.object(vllm_command, "measured_flags", compiled_flags),
            opened_clients(logs[2:], greeting) as compiled,
        ):
            clients = [*eager, *compiled]
            answers = [answers for answers, _ in ask_in_turns(clients, prompts, "asked")]
            starts = [client.server.start_seconds for client in clients]
    rates = [tokens_per_second(one) for one in answers]
    for name, given, rate, start in zip(wanted, answers, rates, starts, strict=True):
        same = sum(answer.token_ids == one for answer, one in zip(given, sampled, strict=True))
        print(
            f"{name:<27} {rate:5.1f} tokens/s{length(given, k)}, {same} of {len(given)} as sampled, up in {start:.0f} s"
        )
    for mode, (alone, drafted) in {"eager": rates[:2], "compiled": rates[2:]}.items():
        print(f"{mode}: {drafted / alone:.2f} times the tokens/s with the draft")
    return 0


def compiled_flags(max_model_len: int) -> list[str]:
    return [flag for flag in EAGER(max_model_len) if flag != "--enforce-eager"]


def length(answers: list[Answer], k: int) -> str:
    rounds = [count for answer in answers for count in answer.accepted or ()]
    return f", acceptance length {acceptance_of_counts(rounds, k).length:.3f}" if rounds else ""


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
