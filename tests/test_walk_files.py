from __future__ import annotations

import pytest

from eagle3.drafts.walk_files import NAME, read_walks, write_walks
from eagle3.problems import InvalidInput


def test_what_is_written_is_read(tmp_path):
    walks = {"b": [0, 8, 3], "a": []}
    write_walks(tmp_path, walks)
    assert read_walks(tmp_path) == walks
    assert (tmp_path / NAME).read_text().index('"a"') < (tmp_path / NAME).read_text().index('"b"')


@pytest.mark.parametrize("content", [None, "", "[]", '{"a": 3}', '{"a": "1x"}', '{"a": null}'])
def test_anything_else_names_the_file_and_the_stage_that_makes_it(tmp_path, content):
    if content is not None:
        (tmp_path / NAME).write_text(content)
    with pytest.raises(InvalidInput) as caught:
        read_walks(tmp_path)
    [problem] = caught.value.problems
    assert problem.where.endswith(NAME)
    assert problem.fix == "dvc repro train"
