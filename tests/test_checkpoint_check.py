from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.checks.checkpoint_check import check_checkpoint, rule_rows
from eagle3.checks.config_check import check_config
from eagle3.checks.draft_config import SCHEMA
from eagle3.formats.flat_config import flatten
from eagle3.problems import InvalidInput
from eagle3.verifiers.verifier_config import parse_verifier_config
from tests.code_deps import ROOT
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, write_nested, write_tensors

JUDGE = parse_verifier_config(VERIFIER)
HEAVY = ("numpy", "torch", "vllm", "transformers", "safetensors", "yaml", "speculators")


@pytest.fixture
def flat(tmp_path):
    """Our own flat checkpoint, as the pipeline writes it."""
    write_tensors(tmp_path / "model.safetensors", FROZEN | TRAINED)
    (tmp_path / "config.json").write_text(json.dumps(flatten(NESTED)))
    return tmp_path


def test_what_the_pipeline_writes_is_ok_without_a_warning(flat, tmp_path):
    verdict, _ = check_checkpoint(flat, JUDGE)
    assert verdict.problems == []
    assert verdict.counts == {"dropped_knowingly": 1, "filled": 13, "fused": 5, "loaded": 11}
    assert check_config(flat, JUDGE).problems == []
    nested, _ = check_checkpoint(write_nested(tmp_path / "nested"), JUDGE)
    assert nested.problems == []


def test_a_config_alone_says_what_was_not_looked_at(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(flatten(NESTED)))
    verdict, load = check_checkpoint(tmp_path, None)
    assert (verdict.verdict, load) == ("ok", None)
    assert [each["what"] for each in verdict.not_checked] == ["agreement with the verifier", "load"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_check_imports_nothing_heavy(flat, engine):
    """numpy and the engines belong to other commands; PyYAML would cost as much as cerberus."""
    code = (
        "import sys; from eagle3.__main__ import main; status = main(sys.argv[1:]); "
        f"print(status, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--no-values", str(flat), "--json", "--engine", engine],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    status = 0 if engine == "vllm" else 1  # our draft has norm_before_residual
    assert done.stdout.splitlines()[-1] == f"{status} []"


KEYS = st.sampled_from([*SCHEMA, *NESTED, "model", "mrope_section", "other"])
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 200) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.sampled_from(
    ["llama", "qwen3", "deepseek_v2", "eagle3", "LlamaForCausalLMEagle3", "64", "full_attention", "\x1b", "\ud800"]
)
VALUES = st.recursive(
    LEAVES | TEXTS, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=3), max_leaves=6
)
ENGINES = st.sampled_from(["vllm", "sglang"])
CHANGES = st.dictionaries(KEYS, VALUES, max_size=4)


def test_a_verifiers_dtype_is_said_as_plain_ascii(flat):
    """It stands in messages, and another's config may hold terminal escapes or half a character."""
    judge = parse_verifier_config({**VERIFIER, "dtype": "\ud800\x1b[31m"})
    [problem] = [one for one in check_checkpoint(flat, judge)[0].problems if one.where == "dtype"]
    assert '"\\ud800\\x1b[31m"' in problem.expected


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([flatten(NESTED), NESTED, {}]), CHANGES, CHANGES, CHANGES, ENGINES)
def test_any_config_gives_a_verdict(tmp_path_factory, base, changes, layer, verifier, engine):
    """With our tensors beside it: never another exception than InvalidInput, and output that a terminal can print."""
    folder = tmp_path_factory.mktemp("any")
    config = {**base, **changes}
    if isinstance(config.get("transformer_layer_config"), dict):
        config["transformer_layer_config"] = {**config["transformer_layer_config"], **layer}
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", FROZEN | TRAINED)
    try:
        judge = parse_verifier_config({**VERIFIER, **verifier})
    except InvalidInput:
        judge = None
    verdict, _ = check_checkpoint(folder, judge, engine=engine)
    text = json.dumps(verdict.as_dict(), ensure_ascii=False)
    assert "\x1b" not in text
    text.encode()


SHAPES = st.lists(st.sampled_from([0, 1, 2, 32, 40, 64, 96, 128, 160, 192]), max_size=3).map(tuple)
ODD_NAMES = [
    "fc.bias",
    "norm.bias",
    "midlayer.hidden_norm.weight",
    "layers.1.hidden_norm.weight",
    "mask_hidden",
    "fc_norm.0.weight",
    "draft_id_to_target_id",
    "lm_head.bias",
    "x.d2t",
    "layers.0.self_attn.qkv_proj.weight",
    ".",
    "model.fc.weight",
]
NAMES = st.sampled_from(["", *FROZEN, *TRAINED, *ODD_NAMES])


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(["BF16", "F32", "I64", "BOOL", "F8_E4M3"]), SHAPES), max_size=6),
    st.sampled_from([flatten(NESTED), NESTED]),
    ENGINES,
)
def test_any_header_gives_a_verdict(tmp_path_factory, changes, config, engine):
    folder = tmp_path_factory.mktemp("any")
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", FROZEN | TRAINED | changes)
    verdict, _ = check_checkpoint(folder, JUDGE, engine=engine)
    assert verdict.verdict in ("ok", "warning", "error")


ZERO_ROWS = [
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", ZERO_ROWS)
@pytest.mark.parametrize("shape", [(0, 128), (64, 0), (0,), (0, 0), ()])
def test_a_tensor_without_elements_gives_a_verdict(flat, name, shape):
    write_tensors(flat / "model.safetensors", FROZEN | TRAINED | {name: ("BF16", shape)})
    verdict, _ = check_checkpoint(flat, JUDGE, values=True)
    assert verdict.verdict == "error"
    assert not [problem.fix for problem in verdict.problems if problem.fix.endswith(": 0")]


def test_every_rule_has_a_truth_and_a_source():
    rows = rule_rows()
    assert len({name for name, _, _, _ in rows}) == len(rows) > 30
    for name, _, truth, source in rows:
        assert truth.endswith("."), name
        assert len(source) > 10, name


def test_a_config_of_a_hundred_thousand_keys_costs_no_hour(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**flatten(NESTED), **{f"k{n}": 0 for n in range(80_000)}}))
    verdict, _ = check_checkpoint(tmp_path, None)
    assert [problem.where for problem in verdict.problems][-1] == "79960 more keys"
