"""The engine at work on one shard: every sample run as a prompt, its states written into the shard, then checked.

A shard is a batch of its own with an empty prefix cache, so that the engine's batches, and with them the bits of the
states, do not depend on which other shards a run has to make.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle3.layer_ids import aux_layer_id_problems
from eagle3.machine import Machine
from eagle3.manifests import Manifest
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.states.hidden_states import map_shard, read_states
from eagle3.states.shard_file import ShardFile, state_faults
from eagle3.states.shard_plan import Shard
from eagle3.states.shard_scratch import require_room
from eagle3.states.vllm_engine import engine_errors, prepare_environment, start_engine
from eagle3.verifiers.verifier import Verifier

# Writers only copy into the page cache, and a failed one ends the engine: silence for so long is a fault of ours.
SECONDS_WITHOUT_A_WRITE = 120.0
# Positions of a shard at which the verifier's head is asked for the next token. Batching turns near-ties, so a token
# counts as found within a few bf16 steps of the top logit. Seen on SmolLM2-135M (1,921 tokens): 98.3% are the top, all
# lie within 4 steps; from the layer before 65% do, from the state after the norm 17%.
CHECKED_POSITIONS = 256
NEAR_STEPS = 4
BF16_FRACTION_BITS = 7
MAX_LOST_SHARE = 0.05


def input_problems(samples: Manifest, verifier: Verifier, aux_layer_ids: Sequence[int]) -> Iterator[Problem]:
    """Why states of these samples cannot be taken: another verifier answered them, or it has no such layers."""
    yield from aux_layer_id_problems(aux_layer_ids, verifier.text_config["num_hidden_layers"])
    if samples.verifier != verifier.identity():
        yield Problem(
            "other-verifier",
            "data/samples",
            f"answers of {samples.verifier.get('source')} with sha256 {samples.verifier.get('sha256')}",
            f"answers of {verifier.source} with sha256 {verifier.sha256}, the verifier of params.yaml as it is now",
            f"bring the earlier weights back, or sample anew: dvc exp run -S verifier.sha256={verifier.sha256}",
            "the draft would learn one model's words and another model's states",
        )


def start_extraction(
    verifier: Verifier, machine: Machine, window: int, trust_remote_code: bool, layer_ids: Sequence[int]
) -> Any:
    """A `vllm.LLM` that captures `layer_ids` (n last). window: tokens, over the longest sample."""
    prepare_environment(machine)
    from eagle3.states.hidden_states_connector import engine_options

    return start_engine(verifier.path, machine, window, trust_remote_code, **engine_options(layer_ids))


@dataclass(frozen=True)
class Extracted:
    """What was made: tokens, seconds of running, writing and checking them, answered tokens asked and found again."""

    tokens: int
    seconds: float
    asked: int
    found: int

    @property
    def tokens_per_second(self) -> float:
        return round(self.tokens / self.seconds, 1)

    def __str__(self) -> str:
        found = f"{self.found} of {self.asked} answered tokens found again in the states"
        return f"{self.tokens} tokens now at {self.tokens_per_second} tokens/s; {found}"


def extract_shards(
    engine: Any, shards: Sequence[Shard], folder: Path, layer_ids: Sequence[int], greedy_splits: Collection[str]
) -> Extracted:
    """Make each of `shards` in `folder`, one after the other, under a progress bar of tokens.

    engine: from `start_extraction`, with the same layer_ids. greedy_splits: their answers are the verifier's most
    likely tokens, so the states are checked against them; where a shard has none (answers sampled at a temperature, or
    given), against the token that the engine itself says after each sample.
    """
    asked = found = 0
    start = time.monotonic()
    num_tokens = sum(shard.num_tokens for shard in shards)
    with tqdm(total=num_tokens, desc="extract", unit="tok", unit_scale=True) as bar:
        for shard in shards:
            require_room(folder, shard)
            with extracted(engine, shard, folder / shard.name, bar.update) as (file, said):
                _check_health(file, layer_ids)
                following = _following(shard, greedy_splits, said)
                asked, found = asked + len(following), found + _check_greedy(engine, file, following)
    return Extracted(num_tokens, time.monotonic() - start, asked, found)


@contextmanager
def extracted(
    engine: Any, shard: Shard, target: Path, on_tokens: Callable[[int], object]
) -> Iterator[tuple[ShardFile, list[int]]]:
    """The filled file, which becomes `target` when the context ends well, and what the engine says after each sample.

    on_tokens: the length of each sample run.
    """
    longest = max(len(sample.input_ids) for sample in shard.samples)
    # vLLM 0.32.0 (v1/worker/gpu_model_runner.py, _input_fits_in_drafter): one sequence that fills the window stops the
    # capture of the whole batch that it is in
    assert engine.model_config.max_model_len > longest, (engine.model_config.max_model_len, longest)
    assert engine.model_config.dtype == torch.bfloat16, engine.model_config.dtype
    with ShardFile(target, shard) as file:
        with engine_errors("extract hidden states"):
            _empty_prefix_cache(engine)
            _enqueue(engine, file)
            said = _run_until_written(engine, file, on_tokens)
        yield file, said


def _empty_prefix_cache(engine: Any) -> None:
    """vLLM empties it only when every block is free, and frees a request's blocks a step after its copy."""
    for _ in range(1000):
        if engine.reset_prefix_cache():
            return
        engine.llm_engine.step()
        time.sleep(0.001)
    raise RuntimeError("vLLM kept blocks of finished requests")


def _enqueue(engine: Any, file: ShardFile) -> None:
    """Each sample whole, as a prompt; the one token that must be sampled for it to end has no state."""
    from vllm import SamplingParams

    from eagle3.states.hidden_states_connector import destination

    samples = file.shard.samples
    places = [destination(file.path, *file.place_of(index)) for index in range(len(samples))]
    sampling = [SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=place) for place in places]
    engine.enqueue([{"prompt_token_ids": list(sample.input_ids)} for sample in samples], sampling, use_tqdm=False)


def _run_until_written(engine: Any, file: ShardFile, on_tokens: Callable[[int], object]) -> list[int]:
    """The greedy token after each sample."""
    said: list[tuple[int, int]] = []
    while len(said) < len(file.shard.samples):
        for output in engine.llm_engine.step():
            if output.finished:
                # vLLM 0.32.0 numbers requests as they come; what `enqueue` returns are other, internal ids
                said.append((int(output.request_id), output.outputs[0].token_ids[0]))
                on_tokens(len(output.prompt_token_ids))
    missing: Sequence[int] = range(len(file.shard.samples))
    deadline = time.monotonic() + SECONDS_WITHOUT_A_WRITE
    while still_missing := file.missing(missing):
        if len(still_missing) < len(missing):
            deadline = time.monotonic() + SECONDS_WITHOUT_A_WRITE
        elif time.monotonic() > deadline:
            raise _never_written(file, still_missing)
        missing = still_missing
        # the worker hears of the last requests' end only in a further step
        engine.llm_engine.step()
        time.sleep(0.001)
    return [token for _, token in sorted(said)]


def _never_written(file: ShardFile, missing: Sequence[int]) -> InvalidInput:
    ids = [file.shard.samples[index].sample_id for index in missing]
    return invalid(
        "states-missing",
        "extract",
        f"no hidden states of {len(ids)} samples within {SECONDS_WITHOUT_A_WRITE:.0f} s: {', '.join(ids[:5])}",
        "states of every sample, written by the engine's worker",
        "run it again with VLLM_LOGGING_LEVEL=INFO in the environment; the engine's log names the failed write",
    )


def _check_health(file: ShardFile, layer_ids: Sequence[int]) -> None:
    tensors = map_shard(file.path)
    rows = pairwise(file.shard.offsets)
    problems = [
        Problem(
            "unhealthy-states",
            f"sample {sample.sample_id}",
            "; ".join(faults),
            "finite, non-zero states at every layer",
            "see whether vLLM serves this verifier sensibly; if it does, it does not extract this architecture rightly",
            "a draft trained on them would learn nothing, without an error",
        )
        for sample, (begin, end) in zip(file.shard.samples, rows, strict=True)
        if (faults := state_faults(read_states(tensors, slice(begin, end)), layer_ids))
    ]
    if problems:
        raise InvalidInput(*problems)


def _check_greedy(engine: Any, file: ShardFile, following: list[tuple[int, int]]) -> int:
    """How often a row's last slice gives the token that follows by the verifier's own norm and head.

    following: rows with their tokens. `InvalidInput` where it often does not: the states are of another layer, after
    the norm, of other tokens or weights.
    """
    tensors, (rows_P, next_ids_P) = map_shard(file.path), torch.tensor(following).unbind(1)
    with engine_errors("apply its norm and head"):
        steps_P = engine.apply_model(partial(_steps_below_top, read_states(tensors, rows_P, -1), next_ids_P))[0]
    asked, found = len(following), sum(steps <= NEAR_STEPS for steps in steps_P)
    if asked - found > max(1, MAX_LOST_SHARE * asked):
        raise invalid(
            "states-of-other-answers",
            f"extract: {file.shard.name}",
            f"the verifier's norm and head give {found} of {asked} answered tokens from the stored states",
            f"at least {1 - MAX_LOST_SHARE:.0%}: they were generated greedily",
            "make the samples again: dvc repro --single-item --force sample; if it stays, vLLM does not extract this "
            "architecture rightly",
            "a draft trained on states that do not belong to its answers is accepted rarely, without an error",
        )
    return found


def _following(shard: Shard, splits: Collection[str], said: Sequence[int]) -> list[tuple[int, int]]:
    """(row, greedy token after it), at most CHECKED_POSITIONS, evenly spread.

    Answered tokens of these splits; where the shard has none, what the engine said after each sample.
    """
    answered = [
        (begin + index - 1, sample.input_ids[index])
        for sample, begin in zip(shard.samples, shard.offsets, strict=False)
        if sample.split in splits
        for index, answered in enumerate(sample.loss_mask)
        if answered and index
    ]
    following = answered or [(end - 1, token) for end, token in zip(shard.offsets[1:], said, strict=True)]
    return following[:: max(1, -(-len(following) // CHECKED_POSITIONS))]


@torch.inference_mode()
def _steps_below_top(states_PH: torch.Tensor, next_ids_P: torch.Tensor, model: Any) -> list[float]:
    """In the engine's worker: bf16 steps from the top logit down to that of each next token, at P positions."""
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    norm = language_model.model.norm
    logits = model.compute_logits(norm(states_PH.to(norm.weight.device)))
    if logits is None:  # tensor parallel: rank 0 alone has them
        return []
    logits_PV = logits.float()
    top_P = logits_PV.max(dim=-1).values
    below_P = top_P - logits_PV.gather(1, next_ids_P.to(logits_PV.device)[:, None])[:, 0]
    return (below_P / torch.exp2(top_P.abs().log2().floor() - BF16_FRACTION_BITS)).tolist()
