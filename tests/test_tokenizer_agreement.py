"""A draft whose tokenizer is not the verifier's: equal sizes, other ids (SafeAILab/EAGLE#258)."""

from __future__ import annotations

import json

import pytest

from eagle3.checks.config_check import Verdict
from eagle3.checks.tokenizer_agreement import compare_tokenizers, token_ids
from eagle3.problems import InvalidInput

WORDS = {"a": 0, "b": 1, "c": 2}
END = {"content": "<end>", "id": 3}


def write(folder, vocab=WORDS, added=(END,), template=None, settings=None):
    folder.mkdir()
    value = {"model": {"vocab": vocab}, "added_tokens": list(added)}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def judged(draft, verifier) -> Verdict:
    verdict = Verdict()
    compare_tokenizers(draft, verifier, verdict)
    return verdict


def test_the_verifiers_own_tokenizer_is_checked_and_right(tmp_path):
    verdict = judged(write(tmp_path / "draft"), write(tmp_path / "verifier"))
    assert (verdict.problems, verdict.checked) == ([], ["tokenizer"])


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"vocab": {"a": 0, "b": 2, "c": 1}}, (2, "'b': 2 and 1")),
        ({"vocab": {"a": 0, "b": 1, "d": 2}}, (2, "'c': none and 2")),
        ({"added": ({"content": "<end>", "id": 4},)}, (1, "'<end>': 4 and 3")),
        ({"added": ()}, (1, "'<end>': none and 3")),
        ({"vocab": [["a", 0.0], ["c", -1.0], ["b", -2.0]]}, (2, "'b': 2 and 1")),
    ],
)
def test_another_tokenizer_of_the_same_size_is_an_error(tmp_path, changed, found):
    verdict = judged(write(tmp_path / "draft", **changed), write(tmp_path / "verifier"))
    [problem] = verdict.problems
    assert (problem.code, problem.severity) == ("tokenizer-other", "error")
    assert problem.found == f"{found[0]} tokens with other ids than the verifier's, e.g. {found[1]}"


def test_another_chat_template_is_a_warning_wherever_it_stands(tmp_path):
    verifier = write(tmp_path / "verifier", template="{{ messages }}\n")
    same = write(tmp_path / "same", settings={"chat_template": "{{ messages }}"})
    assert judged(same, verifier).problems == []
    other = write(tmp_path / "other", settings={"chat_template": "{{ other }}"})
    [problem] = judged(other, verifier).problems
    assert (problem.code, problem.severity, problem.where) == ("template-other", "warning", "tokenizer_config.json")


def test_a_folder_without_one_is_said_and_two_without_are_no_matter(tmp_path):
    (tmp_path / "draft").mkdir()
    verdict = judged(tmp_path / "draft", write(tmp_path / "verifier"))
    [skipped] = verdict.not_checked
    assert "the draft's folder has no tokenizer.json" in str(skipped)
    assert judged(tmp_path / "draft", tmp_path).not_checked == []


@pytest.mark.parametrize("text", ["", "[]", "{", "\0"])
def test_a_file_that_is_no_object_is_refused_by_name(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        token_ids(path)


@pytest.mark.parametrize("text", ['{"model": {"vocab": 3}, "added_tokens": [7, {}]}', "{}"])
def test_an_object_without_a_vocabulary_names_no_ids(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    assert token_ids(path) == {}


@pytest.mark.parametrize("row", [["x"], [None, 1], [3, 0.0], [[], 1]])
def test_odd_rows_of_a_vocabulary_are_no_crash(tmp_path, row):
    draft = write(tmp_path / "draft", vocab=[row, ["a", 0.0]])
    assert [problem.code for problem in judged(draft, write(tmp_path / "verifier")).problems] == ["tokenizer-other"]
