"""Which aux layer ids a verifier has, and the way to the other numbering and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.layer_ids import (
    SGLANG_AS_THEY_ARE,
    aux_layer_id_problems,
    from_output_of,
    sglang_captures,
    sglang_default,
    sglang_list,
    stored_layer_ids,
    to_output_of,
)
from eagle3.problems import InvalidInput


def codes(ids, num_hidden_layers=30):
    return [problem.code for problem in aux_layer_id_problems(ids, num_hidden_layers)]


def test_ids_from_the_embeddings_to_the_last_layer_are_allowed():
    assert codes([0, 15, 29]) == []


def test_the_final_state_is_refused_as_an_aux_layer():
    (problem,) = aux_layer_id_problems([2, 15, 30], 30)
    assert (problem.code, problem.where) == ("aux-layer-final", "extract.aux_layer_ids[2]")
    assert "speculators#1065" in problem.consequence


def test_every_id_out_of_range_is_named():
    problems = list(aux_layer_id_problems([-1, 2, 31, 99], 30))
    assert [problem.where[-3:] for problem in problems] == ["[0]", "[2]", "[3]"]
    assert "[2, 15, 27]" in problems[0].fix


def test_the_suggestion_of_a_shallow_verifier_is_in_range():
    (problem,) = aux_layer_id_problems([7], 2)
    assert "[1]" in problem.fix


@pytest.mark.parametrize("ids", [[15, 2], [2, 2]])
def test_unsorted_and_repeated_ids_are_refused(ids):
    assert codes(ids) == ["aux-layer-order"]


def test_no_id_is_refused():
    assert codes([]) == ["aux-layers"]


def test_the_final_state_is_stored_last():
    assert stored_layer_ids([2, 15, 27], 30) == [2, 15, 27, 30]


def test_the_embeddings_have_no_number_in_the_other_numbering():
    with pytest.raises(InvalidInput, match="aux-layer-embedding"):
        to_output_of([0, 2])


@given(st.lists(st.integers(1, 200), unique=True))
def test_the_other_numbering_and_back_is_identity(ids):
    assert from_output_of(to_output_of(ids)) == ids


CLASSES = ["LlamaForCausalLM", "GptOssForCausalLM", *sorted(SGLANG_AS_THEY_ARE)]


@given(st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted), st.sampled_from(CLASSES))
def test_sglang_captures_the_ids_that_its_list_was_written_for_or_there_is_none(ids, name):
    if ids[0] == (1 if name in SGLANG_AS_THEY_ARE else 0):
        with pytest.raises(InvalidInput, match="aux-layer"):
            sglang_list(ids, [name])
        return
    assert sglang_captures(sglang_list(ids, [name]), [name], 61) == ids


@pytest.mark.parametrize(
    ("name", "listed", "captured"),
    [
        ("LlamaForCausalLM", [1, 29, 57], [2, 30, 58]),
        ("LlamaForCausalLM", [2, 30, 58], [3, 31, 59]),
        ("KimiK25ForConditionalGeneration", [1, 29, 57], [2, 30, 58]),
        ("KimiK25ForConditionalGeneration", [2, 30, 58], [2, 30, 58]),
        ("GptOssForCausalLM", [1, 17, 35], [2, 18, 36]),
        ("GptOssForCausalLM", [24, 30, 61], [24, 30, 61]),
    ],
)
def test_what_sglang_captures_depends_on_the_verifiers_class(name, listed, captured):
    assert sglang_captures(listed, [name], 61) == captured


def test_defaults_of_sglang():
    assert sglang_default(["LlamaForCausalLM"], 61) == [2, 30, 58]
    assert sglang_default(["MiniMaxM3SparseForConditionalGeneration"], 61) == [3, 31, 59]
