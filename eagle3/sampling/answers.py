"""The verifier's own answers: chunk by chunk through the engine, each finished chunk on disk, so a killed run resumes.

A chunk is started when the engine is idle and holds the same prompts in every run, so that its answers do not hang on
what was already there: batching changes bf16 bits, and so would a prefix cache.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic_files import sha256_of_json, write_json

# Answers of one file for eval, whose engine calls hold one prompt each.
EVAL_FILE = 8


@dataclass(frozen=True)
class Prompt:
    """What is asked: token ids of the rendered prompt, under the id that seeds its sampling at temperature > 0."""

    sample_id: str
    input_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What was said: generated ids (the end-of-turn token included), and why it ended."""

    sample_id: str
    output_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """How answers are made; with the prompts it is the key of a chunk."""

    verifier_sha256: str
    engine: dict[str, str]
    seed: int
    temperature: float
    top_p: float
    max_new_tokens: int
    max_model_len: int
    max_num_seqs: int


@dataclass
class Rate:
    """Tokens generated in this run, and the seconds that took; chunks found on disk count in neither."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Answering:
    """Answers prompts under one `Generation`, keeping finished chunks in `scratch`.

    start: returns the engine; called at the first chunk that is not on disk yet.
    """

    def __init__(self, generation: Generation, scratch: Path, start: Callable[[], Any]) -> None:
        self._generation = generation
        self._scratch = scratch
        self._start = start
        self._engine: Any = None
        self.rates: dict[str, Rate] = defaultdict(Rate)

    def answers(self, prompts: Sequence[Prompt], split: str) -> list[Answer]:
        """One answer for each prompt, in order: a chunk, from disk where an earlier run has finished it."""
        together = split != "eval"
        path = self._scratch / f"answers-{self._key(prompts, together)}.json"
        if not path.exists():
            write_json(path, [asdict(answer) for answer in self._generate(prompts, together, self.rates[split])])
        return [Answer(**raw) for raw in json.loads(path.read_text(encoding="utf-8"))]

    def chunk_size(self, split: str) -> int:
        """About so many prompts make one chunk: for train and val as many as the engine answers at once."""
        return EVAL_FILE if split == "eval" else self._generation.max_num_seqs

    def _key(self, chunk: Sequence[Prompt], together: bool) -> str:
        return sha256_of_json([asdict(self._generation), together, [asdict(prompt) for prompt in chunk]])[:32]

    def _generate(self, chunk: Sequence[Prompt], together: bool, rate: Rate) -> list[Answer]:
        from eagle3.states.vllm_engine import generate

        if self._engine is None:
            self._engine = self._start()
        sampling = [self._sampling(prompt) for prompt in chunk]
        started = time.monotonic()
        if together:
            outputs = generate(self._engine, [prompt.input_ids for prompt in chunk], sampling)
        else:
            outputs = [
                generate(self._engine, [prompt.input_ids], [one])[0]
                for prompt, one in zip(chunk, sampling, strict=True)
            ]
        answers = [
            Answer(prompt.sample_id, list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason))
            for prompt, output in zip(chunk, outputs, strict=True)
        ]
        rate.seconds += time.monotonic() - started
        rate.tokens += sum(len(answer.output_ids) for answer in answers)
        return answers

    def _sampling(self, prompt: Prompt) -> Any:
        from vllm import SamplingParams

        how = self._generation
        return SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            max_tokens=how.max_new_tokens,
            seed=answer_seed(how.seed, prompt.sample_id) if how.temperature > 0 else None,
            detokenize=False,
        )


def answer_seed(seed: int, sample_id: str) -> int:
    """A 63-bit seed of its own for each turn of each conversation, so that its answer hangs on no other one."""
    return int(hashlib.sha256(f"{seed}:{sample_id}".encode()).hexdigest()[:16], 16) >> 1
