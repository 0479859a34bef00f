"""params.yaml: every fault is named, all at once, with the key and the remedy."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.params import PARAMS_FILE, RECORDS, parse_params, read_params
from eagle3.problems import InvalidInput
from eagle3.yaml12 import read_yaml

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = read_yaml(ROOT / PARAMS_FILE)


def changed(path: str, value: object) -> dict:
    raw = copy.deepcopy(DEFAULT)
    *parents, key = path.split(".")
    section = raw
    for parent in parents:
        section = section[parent]
    section[key] = value
    return raw


def problems_of(raw: object) -> list[tuple[str, str]]:
    with pytest.raises(InvalidInput) as caught:
        parse_params(raw)
    return [(problem.code, problem.where) for problem in caught.value.problems]


def test_the_default_parameters_are_valid():
    assert read_params(ROOT / PARAMS_FILE).train.epochs == DEFAULT["train"]["epochs"]


def test_every_preset_is_valid():
    presets = sorted((ROOT / "presets").glob("*.yaml"))
    assert presets
    for preset in presets:
        read_params(preset)


def test_the_preset_of_the_default_is_the_default():
    assert (ROOT / "presets/smollm2-135m.yaml").read_text() == (ROOT / PARAMS_FILE).read_text()


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("train.epochs", True, "parameter"),
        ("train.epochs", 0, "parameter"),
        ("train.epochs", 2.0, "parameter"),
        ("train.epochs", "3", "parameter"),
        ("train.epochs", None, "parameter"),
        ("train.learning_rate", float("nan"), "parameter"),
        ("train.learning_rate", float("inf"), "parameter"),
        ("train.learning_rate", False, "parameter"),
        ("train.learning_rate", "1e-3", "parameter"),
        ("seed", -1, "parameter"),
        ("seed", True, "parameter"),
        ("extract.aux_layer_ids", [15, 2], "parameter"),
        ("extract.aux_layer_ids", [2, 2], "parameter"),
        ("extract.aux_layer_ids", [], "parameter"),
        ("flatten.select", "bst", "parameter"),
        ("flatten.select", True, "parameter"),
        ("verifier.revision", "main", "parameter"),
        ("verifier.sha256", "ABC", "parameter"),
        ("engines.vllm", 0.32, "parameter"),
        ("sample.sources", [], "parameter"),
        ("sample.max_new_tokens", 5000, "parameter"),
        ("sample.min_eval", 5000, "parameter"),
        ("draft.fc_norm", True, "parameter"),
        ("serve_test.max_tie_fraction", 1.5, "parameter"),
        ("serve_test.min_acceptance_length", 4.1, "unreachable-gate"),
    ],
)
def test_a_bad_value_is_named(path, value, code):
    assert (code, path) in problems_of(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("serve_test.suite", "fast", "one of greedy, full"),
        ("train.loss", "kl", "one of kl_div, rkl, jsd, ce, tv, nla, lk_hybrid"),
        ("serve_test.questions", ["../up.jsonl"], "the name of a file, NAME.jsonl, without its folder"),
        ("verifier.revision", "main", "a commit: 40 hex digits"),
        ("verifier.sha256", "ABC", "a sha256: 64 hex digits"),
        ("engines.vllm", "latest", "a version, e.g. 1.2.3, in quotes"),
        ("train.epochs", "3", "must be of integer type"),
        ("serve_test.min_acceptance_length", 4.1, "at most 4: 3 drafted tokens and the verifier's own"),
    ],
)
def test_what_would_be_right_is_said_in_words(path, value, expected):
    with pytest.raises(InvalidInput) as caught:
        parse_params(changed(path, value))
    assert [problem.expected for problem in caught.value.problems] == [expected]


def test_a_boolean_is_no_layer_id():
    assert ("parameter", "extract.aux_layer_ids.0") in problems_of(changed("extract.aux_layer_ids", [True]))


def test_a_hub_model_without_its_commit_is_refused():
    assert problems_of(changed("verifier.source", "org/model")) == [("unpinned-verifier", "verifier.revision")]


@pytest.mark.parametrize("file", ["../up.jsonl", "/abs.jsonl", ".hidden.jsonl", "a/b.jsonl", "x.csv", "a\\b.jsonl"])
def test_a_source_never_leaves_its_folder(file):
    assert problems_of(changed("sample.sources", [{"file": file}])) == [("parameter", "sample.sources.0")]


@pytest.mark.parametrize(
    ("source", "is_good"),
    [
        ({"package": "chats", "version": "1.0", "file": "chats/a.jsonl", "ignore": ["id"], "weight": 2}, True),
        ({"package": "chats", "version": "1.0", "file": ""}, False),
        ({"package": "chats", "version": "1.0", "file": 1}, False),
        ({"package": "chats", "file": "chats/a.jsonl"}, False),
        ({"package": "chats", "version": "1.0", "path": "chats/a.jsonl"}, False),
        ({"package": "chats", "version": "1.0", "ignore": ["id"]}, False),
    ],
)
def test_a_file_inside_a_package_is_named_with_its_version(source, is_good):
    raw = changed("sample.sources", [source])
    if is_good:
        assert parse_params(raw).sample.sources == [source]
    else:
        assert problems_of(raw) == [("parameter", "sample.sources.0")]


def test_all_problems_come_at_once_with_the_nearest_known_key():
    raw = changed("train.epochs", True)
    raw["train"]["lerning_rate"] = raw["train"].pop("learning_rate")
    raw["vocabmap"] = raw.pop("vocab_map")
    with pytest.raises(InvalidInput) as caught:
        parse_params(raw)
    text = str(caught.value)
    for expected in (
        "train.epochs",
        "did you mean learning_rate?",
        "add train.learning_rate",
        "did you mean vocab_map?",
    ):
        assert expected in text


@pytest.mark.parametrize("raw", [None, [], 3, "x", {}])
def test_a_file_of_another_shape_is_refused(raw):
    assert problems_of(raw)


def test_an_integer_learning_rate_is_a_number():
    assert parse_params(changed("train.learning_rate", 1)).train.learning_rate == 1


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


@given(st.data(), scalars)
def test_any_value_anywhere_is_accepted_or_refused_with_its_name(data, value):
    section = data.draw(st.sampled_from(sorted(RECORDS)))
    key = data.draw(st.sampled_from([item.name for item in fields(RECORDS[section])]))
    try:
        parse_params(changed(f"{section}.{key}", value))
    except InvalidInput as error:
        named = [problem.where for problem in error.problems if problem.where.startswith(section)]
    else:
        named = [section]
    assert named
