"""Tokens a second of extraction against the same prompts through a plain engine: two processes, in turns.

    python -m benchmarks.extraction [BLOCKS] [TOKENS]

The verifier is that of params.yaml. One side is extract's own `extract_shards`: capture, copy, write and check of a
shard, everything between the prompts and the finished file; the other is vLLM's `LLM` without speculative and KV
config, which runs the prompts and forgets them. Both engines stay up, one waits while the other runs, and the order
changes from pair to pair, so that whatever else the machine does meets both. Printed: the median of the pairs' ratios
with a distribution-free interval (order statistics). Exit status 1 where the median is under 95%.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path
from typing import IO

from eagle3.layer_ids import stored_layer_ids
from eagle3.machine import read_machine
from eagle3.params import read_params
from eagle3.sampling.samples import Sample
from eagle3.states.extraction import extract_shards, start_extraction
from eagle3.states.shard_plan import plan_shards
from eagle3.states.vllm_engine import generate, prepare_environment, start_engine
from eagle3.verifiers.verifier import resolve_verifier

SIDES = ("extraction", "plain")
AT_LEAST = 0.95
WINDOW, SHORTEST, LONGEST = 1024, 32, 512
# Between blocks: OpenMP's threads spin for 0.2 s after the last parallel region.
PAUSE_S = 0.5
ANSWER = "seconds "


def main(blocks: int = 12, tokens: int = 10_000) -> int:
    with tempfile.TemporaryFile() as said:
        sides = {side: start(side, tokens, said) for side in SIDES}
        for process in sides.values():
            answer_of(process)
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for block in range(blocks):
            for side in SIDES if block % 2 else SIDES[::-1]:
                time.sleep(PAUSE_S)
                print("go", file=sides[side].stdin, flush=True)
                seconds[side].append(answer_of(sides[side]))
        for process in sides.values():
            process.communicate()
    count = sum(len(prompt.input_ids) for prompt in prompts(tokens, 1000))
    ratios = [plain / ours for ours, plain in zip(seconds["extraction"], seconds["plain"], strict=True)]
    low, high, confidence = median_interval(ratios)
    for side in SIDES:
        print(f"{side:10} {count / statistics.median(seconds[side]):7.0f} tokens/s")
    print(
        f"extraction runs at {statistics.median(ratios):.1%} of the plain engine's speed (median of {blocks} pairs of "
        f"{count:,} tokens; {confidence:.0%} interval {low:.1%} to {high:.1%})"
    )
    return 0 if statistics.median(ratios) >= AT_LEAST else 1


def start(side: str, tokens: int, said: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.extraction", side, str(tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
    )


def answer_of(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            return float(line.removeprefix(ANSWER))
    sys.exit(
        f"a side ended with status {process.wait()}; by hand: python -m benchmarks.extraction extraction|plain 1000"
    )


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, high, confidence): the narrowest pair of order statistics that holds the median with at least 95%.

    The number of values under the median is binomial(n, 1/2), whatever the distribution.
    """
    ordered, n = sorted(values), len(values)
    for skip in range((n - 1) // 2, -1, -1):
        confidence = 1 - 2 * sum(comb(n, below) for below in range(skip + 1)) / 2**n
        if confidence >= 0.95 or skip == 0:
            break
    return ordered[skip], ordered[n - 1 - skip], confidence


def prompts(tokens: int, vocab_size: int) -> list[Sample]:
    """About `tokens` in all, of lengths between SHORTEST and LONGEST, the same on both sides."""
    draw, count = random.Random(0), 0
    found: list[Sample] = []
    while count < tokens:
        length = draw.randint(SHORTEST, LONGEST)
        name, ids = f"{len(found):08d}", draw.choices(range(vocab_size // 2), k=length)
        found.append(Sample(name, name, 0, "train", ids, [False, *[True] * (length - 1)], "stop"))
        count += length
    return found


def serve_side(side: str, tokens: int) -> int:
    """One engine: a block at the start, then one for each line of the standard input."""
    run = (extraction_side if side == "extraction" else plain_side)(tokens)
    while True:
        start = time.perf_counter()
        run()
        print(f"{ANSWER}{time.perf_counter() - start}", flush=True)
        if not sys.stdin.readline():
            return 0


def extraction_side(tokens: int) -> Callable[[], object]:
    params = read_params()
    verifier = resolve_verifier(params.verifier)
    num_layers, hidden_size, vocab_size = (
        verifier.text_config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    layer_ids = stored_layer_ids(params.extract.aux_layer_ids, num_layers)
    engine = start_extraction(verifier, read_machine(), WINDOW, params.verifier.trust_remote_code, layer_ids)
    shards = plan_shards(prompts(tokens, vocab_size), {}, 10**18, len(layer_ids), hidden_size)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            extract_shards(engine, shards, Path(folder), layer_ids, ())

    return run


def plain_side(tokens: int) -> Callable[[], object]:
    params, machine = read_params(), read_machine()
    verifier = resolve_verifier(params.verifier)
    prepare_environment(machine)
    from vllm import SamplingParams

    engine = start_engine(verifier.path, machine, WINDOW, params.verifier.trust_remote_code)
    asked = [prompt.input_ids for prompt in prompts(tokens, verifier.text_config["vocab_size"])]
    sampling = [SamplingParams(temperature=0, max_tokens=1, detokenize=False) for _ in asked]

    def run() -> None:
        engine.reset_prefix_cache()
        generate(engine, asked, sampling)

    return run


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SIDES:
        sys.exit(serve_side(sys.argv[1], int(sys.argv[2])))
    sys.exit(main(*map(int, sys.argv[1:])))
