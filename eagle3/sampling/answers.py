"""The verifier's own answers: chunk by chunk through the engine, each finished chunk on disk, so a killed run resumes.

A chunk is started when the engine is idle and holds the same prompts in every run, so that its answers do not hang on
what was already there: batching changes bf16 bits, and so would a prefix cache.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic_files import sha256_of_json, write_json
from eagle3.problems import invalid
from eagle3.sampling.conversations import Conversation, Skipped
from eagle3.sampling.prompt_selection import Selection, count_by_reason
from eagle3.sampling.samples import FINISHED, Sample, count_samples

# Answers of one engine call for train and val, and of one file for eval, whose calls hold one prompt each.
BATCH = 128
EVAL_FILE = 8


@dataclass(frozen=True)
class Prompt:
    """What is asked: token ids of the rendered prompt, under the id that seeds its sampling at temperature > 0."""

    conversation_id: str
    input_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What was said: generated ids (the end-of-turn token included), and why it ended; error is set when it failed."""

    conversation_id: str
    output_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """How answers are made; with the prompts it is the key of a chunk."""

    verifier_sha256: str
    engine: dict[str, str]
    seed: int
    temperature: float
    max_new_tokens: int
    max_model_len: int


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

    def answers(self, prompts: Sequence[Prompt], together: bool, label: str) -> tuple[list[Answer], Rate]:
        """One answer for each prompt, in order; `together` batches them, else each is an engine call of its own."""
        from tqdm import tqdm

        rate = Rate()
        found: list[Answer] = []
        with tqdm(total=len(prompts), desc=label, unit="answer", mininterval=1.0) as bar:
            for chunk in _chunks(prompts, BATCH if together else EVAL_FILE):
                path = self._scratch / f"answers-{self._key(chunk, together)}.json"
                if not path.exists():
                    write_json(path, [asdict(answer) for answer in self._generate(chunk, together, rate)])
                found.extend(Answer(**raw) for raw in json.loads(path.read_text(encoding="utf-8")))
                bar.update(len(chunk))
                bar.set_postfix_str(f"{rate.per_second:.0f} tokens/s" if rate.tokens else "found from an earlier run")
        return found, rate

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
            Answer(prompt.conversation_id, list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason))
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
            max_tokens=how.max_new_tokens,
            seed=conversation_seed(how.seed, prompt.conversation_id) if how.temperature > 0 else None,
            detokenize=False,
        )


def answer_split(answering: Answering, selection: Selection, split: str) -> tuple[list[Sample | Skipped], Rate]:
    """One sample for each prompt of the split, or a `Skipped` (reason `failed`) where the engine gave no answer."""
    asked = selection.prompts[split]
    prompts = [Prompt(row.conversation_id, selection.input_ids[row.conversation_id]) for row in asked]
    answers, rate = answering.answers(prompts, together=split != "eval", label=f"{split} answers")
    made = [as_sample(row, prompt, answer, split) for row, prompt, answer in zip(asked, prompts, answers, strict=True)]
    return made, rate


def as_sample(row: Conversation, prompt: Prompt, answer: Answer, split: str) -> Sample | Skipped:
    """Prompt ids and generated ids as they are, never text tokenised again; supervised is what was generated."""
    if answer.finish_reason not in FINISHED or not answer.output_ids:
        detail = f"finish_reason {answer.finish_reason}, {len(answer.output_ids)} tokens"
        return Skipped(row.source, row.key, "failed", detail)
    return Sample(
        sample_id=f"{row.conversation_id}-0",
        conversation_id=row.conversation_id,
        turn=0,
        split=split,
        input_ids=[*prompt.input_ids, *answer.output_ids],
        loss_mask=[False] * len(prompt.input_ids) + [True] * len(answer.output_ids),
        finish_reason=answer.finish_reason,
    )


def closed_counts(
    read: int, samples: Sequence[Sample], skipped: Sequence[Skipped]
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts of the manifest, and rows skipped by reason; read = kept + skipped + failed, or a row was lost."""
    by_reason = count_by_reason(skipped)
    failed = by_reason.pop("failed", 0)
    counts = {"read": read, "kept": len(samples), "skipped": sum(by_reason.values()), "failed": failed}
    if read != counts["kept"] + counts["skipped"] + failed:
        raise invalid(
            "rows-lost",
            "sample",
            ", ".join(f"{name} {count}" for name, count in counts.items()),
            "read = kept + skipped + failed",
            "report this: a row was lost or counted twice, which is a fault of the stage",
        )
    return counts | count_samples(samples), by_reason


def conversation_seed(seed: int, conversation_id: str) -> int:
    """A 63-bit seed of its own for each conversation, so that its answer hangs on no other one."""
    return int(hashlib.sha256(f"{seed}:{conversation_id}".encode()).hexdigest()[:16], 16) >> 1


def _chunks(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
