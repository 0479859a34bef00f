from __future__ import annotations

import torch

from eagle3.acceptance import right_drafts
from eagle3.drafts.draft_walk import Walked, predict, walk_table
from eagle3.drafts.training_data import PackedRows, read_documents
from eagle3.states.hidden_states import SampleStates
from tests.training_inputs import States

X0, X1, X2, X3, X4 = 10, 11, 12, 13, 14


def states_of(tokens: list[int], num_prompt: int, sample_id: str = "a", split: str = "val") -> SampleStates:
    length = len(tokens)
    mask = torch.arange(length) >= num_prompt
    return SampleStates(sample_id, split, num_prompt, torch.zeros(length, 2, 2), torch.tensor(tokens).int(), mask)


def test_the_drawing():
    """Tokens x0 x1 | x2 x3 x4: position 1 holds token x2 and proposes x3, then x4; the round at n = 2 looks there."""
    states = States(states_of([X0, X1, X2, X3, X4], 2), states_of([X0, X1, X2, X3, X4], 2, "t", "train"))
    rows = PackedRows(states, read_documents(states, 8, 3).by_split["val"], 8)
    seen = {}

    def draft(batch, steps):
        seen.update(batch)
        drafted = torch.zeros(steps, 1, 8, dtype=torch.int64)
        drafted[0, 0, :3] = torch.tensor([2, 3, 4])
        drafted[1, 0, :2] = torch.tensor([3, 4])
        return list(drafted)

    d2t = torch.full((5,), 10)  # draft id i is verifier id i + 10
    [walked] = predict(draft, rows, d2t)
    assert seen["input_ids"][0, :4].tolist() == [X1, X2, X3, X4]
    assert "verifier_last_hidden_states" not in seen
    # the round at n = 2 has both right, the one at n = 3 the one that is left
    assert (walked.sample_id, walked.tokens_T, walked.num_prompt) == ("a", [X0, X1, X2, X3, X4], 2)
    assert walked.right_n == [2, 1]
    assert walked.acceptance(2).length == 3.0


def test_a_token_outside_the_draft_vocabulary_is_never_right():
    assert right_drafts([[X2, 99, X4, 0]] * 8, [X0, X1, X2, X3, X4], 2) == [0, 1]


def test_the_table_holds_every_length_of_both_splits_and_adds_samples_up():
    walked = Walked("a", "val", [X0, X1, X2, X3, X4], 2, [2, 1])
    table = walk_table([walked, walked])
    assert list(table) == ["val", "eval"]
    assert list(table["val"]) == [str(k) for k in range(1, 9)]
    assert table["val"]["2"] == {
        "rounds": 2,
        "accepted_per_position": [2, 2],
        "acceptance_length": 3.0,
        "rate_per_position": [1.0, 1.0],
    }
    assert table["eval"]["1"] == {
        "rounds": 0,
        "accepted_per_position": [0],
        "acceptance_length": 1.0,
        "rate_per_position": [0.0],
    }


def test_rounds_inside_a_repetition_can_be_left_out():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    walked = Walked("a", "val", tokens, 1, [0] * (len(tokens) - 2))
    assert walked.acceptance(1).rounds == 25
    assert walked.acceptance(1, loops=False).rounds == 15
