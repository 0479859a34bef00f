"""Rows of training data: whole samples packed into `total_seq_len` positions, in the form speculators' Trainer reads.

Shapes: T positions of a row, A aux layers, H hidden. A sample of n tokens x0..x(n-1) takes n - 1 positions, aligned as
speculators aligns them (models/eagle3/data.py `shift_batch`, 0.9.0):

    position       0      1      ...  n-2
    input_ids      x1     x2          x(n-1)
    hidden_states  g0     g1          g(n-2)       aux states of the token before
    target state   y1     y2          y(n-1)       last state, whose head predicts the token after
    loss_mask      m1     m2          m(n-1)

so position j learns, from hidden state j and token j + 1, what the verifier says of token j + 2; unrolled step s feeds
token j + 1 + s and learns token j + 2 + s, whose target lies s positions to the right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from eagle3.atomic_files import sha256_of_json
from eagle3.manifests import Manifest
from eagle3.problems import InvalidInput, Problem
from eagle3.states.hidden_states import HiddenStates, SampleStates
from eagle3.verifiers.verifier import Verifier

SPLITS = ("train", "val", "eval")

# Rows that are still being filled; more would pack a little tighter and cost time on millions of samples.
OPEN_ROWS = 64


@dataclass(frozen=True)
class Document:
    """A sample that can be trained on. positions: n - 1, at most a row. supervised: positions with a target.

    unreachable: leading positions whose loss is left out, since unrolled steps of whatever stands before in the row
    would be held to their targets too; only prompts shorter than the steps have a target there.
    """

    sample_id: str
    positions: int
    supervised: int
    unreachable: int
    truncated: bool


@dataclass(frozen=True)
class Placed:
    """`document` occupies the positions from `start` of its row."""

    document: Document
    start: int


Row = tuple[Placed, ...]


@dataclass(frozen=True)
class Documents:
    """What can be trained on, by split, in order of id; `skipped` samples hold no position with a target."""

    by_split: dict[str, list[Document]]
    skipped: list[str]

    def counts(self) -> dict[str, int]:
        """For the manifest: read = train + val + eval + skipped; a truncated sample is among the kept ones."""
        every = [document for documents in self.by_split.values() for document in documents]
        splits = {split: len(documents) for split, documents in self.by_split.items()}
        return {
            "read": len(every) + len(self.skipped),
            **splits,
            "skipped": len(self.skipped),
            "truncated": sum(document.truncated for document in every),
            "train_positions": sum(document.positions for document in self.by_split["train"]),
            "train_supervised": sum(document.supervised for document in self.by_split["train"]),
        }


def read_documents(states: HiddenStates, total_seq_len: int, ttt_steps: int) -> Documents:
    """Every sample as a document of at most `total_seq_len` positions.

    A longer sample is cut on the right, as speculators does. Raises `InvalidInput` where train or val is empty.
    """
    found = Documents({split: [] for split in SPLITS}, [])
    for sample_id in states.sample_ids:
        document = _document(states.get(sample_id), total_seq_len, ttt_steps)
        if document.supervised:
            found.by_split[states.split_of(sample_id)].append(document)
        else:
            found.skipped.append(sample_id)
    problems = [
        Problem(
            "no-samples",
            f"split {split}",
            "no sample with an answer of at least one token",
            "samples to learn from, and others to choose the epoch by",
            "raise sample.max_train or sample.max_val, or train.total_seq_len",
        )
        for split in ("train", "val")
        if not found.by_split[split]
    ]
    if problems:
        raise InvalidInput(*problems)
    return found


def _document(sample: SampleStates, total_seq_len: int, ttt_steps: int) -> Document:
    every = len(sample.input_ids_T) - 1
    positions = min(every, total_seq_len)
    unreachable = ttt_steps - 1
    supervised = int(sample.loss_mask_T[1 + unreachable : positions + 1].sum())
    return Document(sample.sample_id, positions, supervised, unreachable, positions < every)


def check_inputs(hidden: Manifest, vocab_map: Manifest, verifier: Verifier) -> None:
    """Hidden states, vocabulary map and verifier must belong together; `InvalidInput` names what does not."""
    problems = []
    if hidden.verifier != verifier.identity():
        problems.append(
            Problem(
                "other-verifier",
                "data/hidden_states",
                f"of the verifier {json.dumps(hidden.verifier)}",
                f"of {json.dumps(verifier.identity())}",
                "dvc repro extract",
                "the draft would learn one model's states and another model's head",
            )
        )
    digests = [sha256_of_json(manifest.inputs.get("samples")) for manifest in (hidden, vocab_map)]
    if digests[0] != digests[1]:
        problems.append(
            Problem(
                "other-samples",
                "data/vocab_map",
                f"made from samples {digests[1][:12]}…",
                f"those of data/hidden_states, {digests[0][:12]}…",
                "dvc repro extract vocab-map",
            )
        )
    vocab_size = vocab_map.decisions.get("vocab_size")
    if vocab_size != verifier.text_config.get("vocab_size"):
        problems.append(
            Problem(
                "other-verifier",
                "data/vocab_map",
                f"maps into a vocabulary of {vocab_size}",
                f"the verifier's, {verifier.text_config.get('vocab_size')}",
                "dvc repro vocab-map",
            )
        )
    if problems:
        raise InvalidInput(*problems)


def pack(documents: Sequence[Document], total_seq_len: int) -> list[Row]:
    """First fit in the given order, among at most OPEN_ROWS open rows; every document is in exactly one row."""
    rows: list[list[Placed]] = []
    ends: list[int] = []
    first_open = 0
    for document in documents:
        assert document.positions <= total_seq_len, document
        for index in range(first_open, len(rows)):
            if ends[index] + document.positions <= total_seq_len:
                break
        else:
            index = len(rows)
            rows.append([])
            ends.append(0)
            first_open = max(first_open, len(rows) - OPEN_ROWS)
        rows[index].append(Placed(document, ends[index]))
        ends[index] += document.positions
    return [tuple(row) for row in rows]


class PackedRows:
    """What speculators' Trainer takes for a DataLoader: iterable, sized, with a `batch_sampler` that knows epochs.

    With a seed, every pass is a permutation and a packing of its own, a function of seed and number alone; without, the
    order is fixed (validation, walks). parts: what the Trainer calls an epoch is one of so many parts of a pass.
    share: (rank, number of processes); iteration gives the rows of one process, dealt out in turn; where they do not
    come out even, the first rows are taken once more. skip: rows that the next iteration leaves out, since a killed run
    had them.
    """

    def __init__(
        self,
        states: HiddenStates,
        documents: Sequence[Document],
        total_seq_len: int,
        seed: int | None = None,
        parts: int = 1,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.states = states
        self.documents = documents
        self.total_seq_len = total_seq_len
        self.seed = seed
        self.parts = parts
        self.share = share
        self.epoch = 0
        self.skip = 0
        self._packed: tuple[int, list[Row]] = (-1, [])

    @property
    def batch_sampler(self) -> PackedRows:
        """The Trainer tells the epoch to `loader.batch_sampler.set_epoch` (train/trainer.py, 0.9.0)."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def rows(self, epoch: int) -> list[Row]:
        number, part = divmod(epoch, self.parts)
        if self._packed[0] != number:
            order = list(self.documents)
            if self.seed is not None:
                random.Random(f"{self.seed}/{number}").shuffle(order)
            self._packed = (number, pack(order, self.total_seq_len))
        whole = self._packed[1]
        return whole[len(whole) * part // self.parts : len(whole) * (part + 1) // self.parts]

    def own_rows(self, epoch: int) -> list[Row]:
        """Those that this process takes, as many as every other one takes."""
        rows, (rank, number) = self.rows(epoch), self.share
        even = islice(cycle(rows), -(-len(rows) // number) * number)
        return list(even)[rank::number]

    @property
    def positions(self) -> int:
        """Filled positions of one pass: the tokens that the model sees."""
        return sum(document.positions for document in self.documents)

    def __len__(self) -> int:
        return len(self.own_rows(self.epoch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        skipped, self.skip = self.skip, 0
        for row in self.own_rows(self.epoch)[skipped:]:
            yield self.batch(row)

    def batch(self, row: Row) -> dict[str, Any]:
        """One row as speculators' collate function makes it (train/data.py, 0.9.0), a batch of one.

        hidden_states [1, T, A*H] and verifier_last_hidden_states [1, T, H] bfloat16; input_ids, position_ids (from 1
        in each document) and document_ids (-1 where empty) [1, T] int64; loss_mask [1, T] bool; error_records int,
        the samples dropped from this batch, always 0.
        """
        samples = [self.states.get(placed.document.sample_id) for placed in row]
        batch = _empty_row(self.total_seq_len, samples[0])
        for number, (placed, sample) in enumerate(zip(row, samples, strict=True)):
            _fill(batch, placed, sample, number)
        return {**{name: tensor.unsqueeze(0) for name, tensor in batch.items()}, "error_records": 0}


def _empty_row(total_seq_len: int, sample: SampleStates) -> dict[str, torch.Tensor]:
    _, slices, hidden = sample.hidden_TAH.shape
    return {
        "hidden_states": torch.zeros(total_seq_len, (slices - 1) * hidden, dtype=torch.bfloat16),
        "verifier_last_hidden_states": torch.zeros(total_seq_len, hidden, dtype=torch.bfloat16),
        "input_ids": torch.zeros(total_seq_len, dtype=torch.int64),
        "position_ids": torch.zeros(total_seq_len, dtype=torch.int64),
        "document_ids": torch.full((total_seq_len,), -1, dtype=torch.int64),
        "loss_mask": torch.zeros(total_seq_len, dtype=torch.bool),
    }


def _fill(batch: dict[str, torch.Tensor], placed: Placed, sample: SampleStates, number: int) -> None:
    """Write one sample into its place; the copies cast to the row's dtypes."""
    size = placed.document.positions
    place = slice(placed.start, placed.start + size)
    batch["hidden_states"][place] = sample.hidden_TAH[:size, :-1].flatten(1)
    batch["verifier_last_hidden_states"][place] = sample.hidden_TAH[1 : size + 1, -1]
    batch["input_ids"][place] = sample.input_ids_T[1 : size + 1]
    batch["position_ids"][place] = torch.arange(1, size + 1)
    batch["document_ids"][place] = number
    batch["loss_mask"][place] = sample.loss_mask_T[1 : size + 1]
    batch["loss_mask"][placed.start : placed.start + placed.document.unreachable] = False
