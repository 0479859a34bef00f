from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.drafts.training_data import Document, PackedRows, check_inputs, pack, read_documents
from eagle3.manifests import Manifest
from eagle3.problems import InvalidInput
from eagle3.states.hidden_states import SampleStates
from eagle3.verifiers.verifier import Verifier
from tests.training_inputs import States

A, H = 2, 4


def sample(sample_id: str, num_prompt: int, length: int, split: str = "train") -> SampleStates:
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(length, A + 1, H, generator=generator).bfloat16()
    ids = torch.randint(0, 100, (length,), generator=generator, dtype=torch.int32)
    return SampleStates(sample_id, split, num_prompt, hidden, ids, torch.arange(length) >= num_prompt)


STATES = States(sample("a", 3, 6), sample("b", 3, 9), sample("c", 5, 8, "val"), sample("d", 4, 4))


def test_a_row_is_what_speculators_would_have_collated():
    from speculators.models.eagle3 import shift_batch
    from speculators.train.data import CollateFn

    items = []
    for name in ("a", "b"):
        states = STATES.get(name)
        length = len(states.input_ids_T)
        items.append(
            {
                "hidden_states": states.hidden_TAH[:, :-1].flatten(1),
                "input_ids": states.input_ids_T.long(),
                "verifier_last_hidden_states": states.hidden_TAH[:, -1],
                "loss_mask": states.loss_mask_T,
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    expected = CollateFn(16, H, A, torch.bfloat16, shift_batch)(items)
    rows = PackedRows(STATES, read_documents(STATES, 16, 3).by_split["train"], 16)
    [batch] = list(rows)
    assert set(batch) == set(expected)
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value)), name
        assert torch.as_tensor(batch[name]).dtype == torch.as_tensor(value).dtype, name


def test_samples_without_a_target_are_counted_as_skipped():
    documents = read_documents(STATES, 16, 3)
    assert documents.skipped == ["d"]
    counts = documents.counts()
    assert (counts["read"], counts["train"], counts["val"], counts["eval"], counts["skipped"]) == (4, 2, 1, 0, 1)


def test_long_samples_are_cut_on_the_right_and_counted():
    documents = read_documents(STATES, 6, 3)
    assert documents.by_split["train"][1] == Document("b", 6, 4, 2, truncated=True)
    assert documents.counts()["truncated"] == 2
    batch = PackedRows(STATES, documents.by_split["train"][1:], 6).batch(pack(documents.by_split["train"][1:], 6)[0])
    assert batch["input_ids"][0].tolist() == STATES.get("b").input_ids_T[1:7].tolist()


def test_an_empty_split_is_refused():
    with pytest.raises(InvalidInput, match="split val"):
        read_documents(States(sample("a", 3, 6)), 16, 3)


def test_targets_that_the_document_before_could_reach_are_left_out():
    """Step 2 of the document before would look two positions to the right, at targets of a one-token prompt."""
    documents = read_documents(States(sample("a", 1, 5), sample("v", 4, 6, "val")), 16, 3).by_split
    assert documents["train"][0].supervised == 2
    states = States(sample("a", 1, 5))
    [batch] = PackedRows(states, documents["train"], 8)
    assert batch["loss_mask"][0].tolist() == [False, False, True, True, False, False, False, False]


@given(st.lists(st.integers(1, 20), max_size=200))
def test_every_document_lies_in_one_row_and_none_overlap(sizes):
    documents = [Document(str(number), size, 1, 0, truncated=False) for number, size in enumerate(sizes)]
    rows = pack(documents, 24)
    assert sorted(int(placed.document.sample_id) for row in rows for placed in row) == list(range(len(sizes)))
    for row in rows:
        ends = [0, *(placed.start + placed.document.positions for placed in row)]
        assert [placed.start for placed in row] == ends[:-1]
        assert ends[-1] <= 24


def test_order_depends_on_seed_and_epoch_alone():
    documents = [Document(str(number), 5, 1, 0, truncated=False) for number in range(40)]

    def order(seed: int | None, epoch: int) -> list:
        return PackedRows(STATES, documents, 16, seed).rows(epoch)

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)
    assert order(None, 1) == order(None, 2)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_of_a_pass_are_its_rows_in_order(parts):
    documents = [Document(str(number), 5, 1, 0, truncated=False) for number in range(40)]
    whole = PackedRows(STATES, documents, 16, 0)
    cut = PackedRows(STATES, documents, 16, 0, parts)
    for number in range(2):
        pieces = [cut.rows(number * parts + part) for part in range(parts)]
        assert [row for piece in pieces for row in piece] == whole.rows(number)
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize(("rows", "processes"), [(14, 1), (14, 2), (14, 3), (2, 5)])
def test_processes_take_turns_and_as_many_rows_each(rows, processes):
    documents = [Document(str(number), 5, 1, 0, truncated=False) for number in range(rows)]
    whole = PackedRows(STATES, documents, 5, 0).rows(3)
    assert len(whole) == rows
    shares = [PackedRows(STATES, documents, 5, 0, share=(rank, processes)).own_rows(3) for rank in range(processes)]
    assert len({len(share) for share in shares}) == 1
    dealt = [share[step] for step in range(len(shares[0])) for share in shares]
    assert dealt[:rows] == whole
    assert dealt[rows:] == (whole * processes)[: len(dealt) - rows], "the first rows fill the last step up"


def test_states_map_and_verifier_must_belong_together(tmp_path):
    verifier = Verifier("v", None, tmp_path, "0" * 64, {"vocab_size": 320})
    hidden = Manifest("extract", inputs={"samples": {"a": 1}}, verifier=verifier.identity())
    vocab_map = Manifest("vocab-map", inputs={"samples": {"a": 1}}, decisions={"vocab_size": 320})
    check_inputs(hidden, vocab_map, verifier)
    other = dataclasses.replace(vocab_map, inputs={"samples": {"a": 2}}, decisions={"vocab_size": 300})
    with pytest.raises(InvalidInput) as caught:
        check_inputs(dataclasses.replace(hidden, verifier={"source": "w"}), other, verifier)
    assert [problem.code for problem in caught.value.problems] == ["other-verifier", "other-samples", "other-verifier"]
