from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.formats.json_files import JsonFile, RepeatedKey, parse_json_object, printable, read_json_object, spelled
from eagle3.problems import InvalidInput


def parse(text: str | bytes) -> JsonFile:
    return parse_json_object(text.encode() if isinstance(text, str) else text, Path("config.json"))


def test_a_repeated_key_is_remembered_with_every_value_and_its_place():
    file = parse('{"a": {"b": 1, "b": 2}, "c": [{"d": null, "d": 3}], "a2": 0}')
    assert file.value == {"a": {"b": 2}, "c": [{"d": 3}], "a2": 0}
    assert set(file.repeated) == {RepeatedKey("a.b", (1, 2)), RepeatedKey("c.0.d", (None, 3))}


def test_a_repeated_key_around_a_repeated_key_is_found():
    file = parse('{"a": {"x": 1, "x": 2}, "a": 3}')
    assert file.repeated == (RepeatedKey("a", ({"x": 2}, 3)),)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "null", "{", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "\ufeff{}", '{"a": 1} x'],
)
def test_what_is_not_a_strict_json_object_is_refused(text):
    with pytest.raises(InvalidInput, match="unreadable-json"):
        parse(text)


def test_bytes_that_are_not_utf8_are_refused_with_their_place():
    with pytest.raises(InvalidInput, match="not UTF-8 at byte 2"):
        parse(b'{"\xff": 1}')


def test_deep_nesting_is_refused():
    with pytest.raises(InvalidInput):
        parse('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def test_a_huge_integer_is_refused():
    with pytest.raises(InvalidInput):
        parse('{"a": ' + "9" * 10_000 + "}")


def test_many_repeated_keys_cost_no_quadratic_time():
    text = "{" + ",".join(f'"k{n % 50_000}": 0' for n in range(100_000)) + "}"
    assert len(parse(text).repeated) == 50_000


def test_a_missing_file_a_folder_and_a_large_file_are_refused(tmp_path):
    large = tmp_path / "config.json"
    large.write_text("{}" + " " * 100)
    for path, limit in ((tmp_path / "absent.json", 10), (tmp_path, 10), (large, 10)):
        with pytest.raises(InvalidInput):
            read_json_object(path, limit)
    assert read_json_object(large).value == {}


def test_text_of_unknown_origin_becomes_one_printable_line():
    assert printable("a\x1b[31m\nb\ud800é") == "a\\x1b[31m\\nb\\ud800\\xe9"
    assert printable("x" * 300) == "x" * 200 + "…"
    assert spelled({"a": [True, None, "\n"]}) == '{"a": [true, null, "\\n"]}'
    assert spelled(object()) == "a object"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON))
def test_what_json_writes_is_read_back(value):
    assert parse(json.dumps(value)).value == value


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_invalid_input(data):
    with suppress(InvalidInput):
        assert isinstance(parse(data).value, dict)
