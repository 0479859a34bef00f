"""A stage refuses another engine version than params.yaml declares, and names both ways out."""

from __future__ import annotations

import pytest

from eagle3.engines import installed_version, require_engine
from eagle3.params import read_params
from eagle3.problems import InvalidInput
from tests.code_deps import ROOT


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_the_lock_and_the_parameters_declare_the_same_engines(engine):
    assert installed_version(engine) == getattr(read_params(ROOT / "params.yaml").engines, engine)


def test_another_version_is_refused_with_both_ways_out():
    with pytest.raises(InvalidInput) as caught:
        require_engine("vllm", "0.1.2")
    text = str(caught.value)
    assert "engines.vllm" in text
    assert "install the lock again" in text
    assert f"-S engines.vllm={installed_version('vllm')}" in text.replace("\n" + " " * 15, " ")
