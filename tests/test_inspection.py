"""`eagle3 inspect`: one screen for any checkpoint, good, bad or hostile."""

from __future__ import annotations

import json

import pytest

from eagle3.__main__ import main
from eagle3.checks.inspection import inspection
from eagle3.formats.flattening import flatten_folder
from eagle3.problems import InvalidInput
from tests.code_deps import ROOT
from tests.drafts import write_nested
from tests.test_corpus import checkpoint

CASES = sorted(path.parent for path in (ROOT / "tests").glob("*_checkpoints/*/config.json"))


def test_the_screen_says_what_a_flat_draft_is(tmp_path, capsys):
    flatten_folder(write_nested(tmp_path / "nested"), tmp_path / "flat")
    assert main(["inspect", str(tmp_path / "flat")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        'classes          ["LlamaForCausalLMEagle3"]',
        "format           flat",
        "decoder          1 layer, a Llama decoder: 64 wide, ffn 96",
        "attention        4 heads (2 for keys and values) of 16",
        'positions        512, rope {"rope_theta": 10000.0, "rope_type": "default"}',
        "window           full",
        "vocabulary       40 of the verifier's 160 tokens",
        "aux states       3: [2, 4, 5] (states entering these layers); [1, 3, 4] in eagle_config (outputs of these "
        "layers, to SGLang)",
        "norms            before fc true, fc_norm false, output true, before residual true",
        "quantised        no",
        "tensors          17 in 2 files, 129,376 bytes: 15 BF16, 1 BOOL, 1 I64",
        "embedding, head  embedding: its own; head: its own",
        "check            ok: 0 errors, 0 warnings (eagle3 check DIR)",
    ]


def test_a_release_says_for_whom_it_was_made(tmp_path):
    folder = write_nested(tmp_path / "draft")
    made = {"verifier": {"source": "org/model"}, "epoch": 2, "metrics": {"served": {"acceptance_length": 1.95}}}
    (folder / "provenance.json").write_text(json.dumps(made))
    assert inspection(folder)["released for"].startswith('"org/model", epoch 2, acceptance 1.950')
    for broken in ("{", "[]", '{"metrics": 1}', '{"metrics": {"served": {"acceptance_length": "x"}}}'):
        (folder / "provenance.json").write_text(broken)
        assert "cannot be read" in inspection(folder)["released for"]


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_every_checkpoint_of_the_corpus_is_described_or_refused(case, tmp_path):
    checkpoint(case, tmp_path)
    try:
        rows = inspection(tmp_path)
    except InvalidInput:
        return
    assert 3 < len(rows) < 20
    assert all(text.isprintable() and len(text) < 400 for text in rows.values())


def test_nothing_there_is_a_wrong_call_and_no_config_an_error(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert main(["inspect", str(tmp_path)]) == 1
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "error"
