"""Our reader and DVC's (ruamel.yaml) must agree on every plain scalar."""

from __future__ import annotations

import contextlib
import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from eagle3.problems import InvalidInput
from eagle3.yaml12 import parse_yaml


def same(a, b):
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-05", 1e-05),
        ("1.0e-3", 0.001),
        ("010", 10),
        ("1:30", "1:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("", None),
        ("0x1F", 31),
        ("0o17", 15),
        ("-0x1F", -31),
        (".5", 0.5),
        ("2024-01-01", "2024-01-01"),
        ("-.inf", -math.inf),
        ("+12", 12),
        (".5e3", ".5e3"),
        (".5e+3", 500.0),
    ],
)
def test_scalars_of_yaml_1_2(text, value):
    assert same(parse_yaml(f"key: {text}", "x")["key"], value)


number_like = st.text(alphabet="0123456789.eE+-_xo:", min_size=1, max_size=9)
word_like = st.sampled_from(
    ["true", "True", "TRUE", "false", "yes", "no", "on", "off", "null", "Null", "~", "n", "y", ".nan", ".inf"]
)


@settings(max_examples=3000)
@given(number_like | word_like)
def test_plain_scalars_read_as_ruamel_reads_them(text):
    document = f"key: {text}"
    try:
        theirs = YAML(typ="safe").load(io.StringIO(document))
    except Exception:
        return
    if isinstance(theirs["key"], (int, float)) and "_" in text:
        return  # ruamel keeps 1.1's underscores; DVC never writes them
    try:
        ours = parse_yaml(document, "x")
    except InvalidInput:
        return  # a refusal is loud; what must never happen is another value
    assert same(ours["key"], theirs["key"]), (ours, theirs)


@pytest.mark.parametrize(
    "text", ["a: 1\na: 2", "a: !!python/object:os.system x", "a: [1", "a: !x 1", "\t- a", "? [1]: 2\n: x"]
)
def test_broken_documents_are_invalid_input_with_a_place(text):
    with pytest.raises(InvalidInput, match=r"params\.yaml"):
        parse_yaml(text, "params.yaml")


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_invalid_input(text):
    with contextlib.suppress(InvalidInput):
        parse_yaml(text, "x")
