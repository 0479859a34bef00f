"""One sample as a person reads it: its text, with what is supervised marked, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from eagle3.problems import invalid
from eagle3.sampling.samples import Sample, find_sample

GREEN, PLAIN = "\x1b[1;32m", "\x1b[0m"
# Without colours, as `git diff --word-diff` marks what is new.
OPEN, CLOSE = "{+", "+}"


def show_sample(folder: Path, wanted: str, decode: Callable[[Sequence[int]], str], colour: bool) -> str:
    """The sample of data/samples with the number (from 0, in order of id) or the id `wanted`.

    decode: token ids to text, special tokens included. What the draft learns to propose is green and bold, or
    between {+ and +}; all else is what it only reads.
    """
    number, sample = _found(folder, wanted)
    before, after = (GREEN, PLAIN) if colour else (OPEN, CLOSE)
    text = "".join(
        f"{before}{_visible(decode(ids))}{after}" if supervised else _visible(decode(ids))
        for supervised, ids in _spans(sample.input_ids, sample.loss_mask)
    )
    head = (
        f"sample {number}: {sample.sample_id}, split {sample.split}, from turn {sample.turn}, "
        f"finish_reason {sample.finish_reason}; {len(sample.input_ids)} tokens, {sum(sample.loss_mask)} supervised"
    )
    return f"{head}\n{text}"


def _found(folder: Path, wanted: str) -> tuple[int, Sample]:
    if found := find_sample(folder, wanted):
        return found
    raise invalid(
        "no-such-sample",
        str(folder),
        f"no sample {wanted}",
        "a number from 0, below the samples of the manifest, or a sample_id",
        "python -m eagle3 show-sample 0",
    )


def _spans(input_ids: Sequence[int], loss_mask: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    for supervised, pairs in groupby(zip(loss_mask, input_ids, strict=True), key=lambda pair: pair[0]):
        yield supervised, [token for _, token in pairs]


def _visible(text: str) -> str:
    """Conversations are of any origin: no escape sequence of theirs reaches the terminal."""
    return "".join(char if char == "\n" or char.isprintable() else repr(char)[1:-1] for char in text)
