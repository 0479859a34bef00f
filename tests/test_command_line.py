from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from eagle3.__main__ import main
from tests.code_deps import ROOT
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, write_nested, write_tensors


@pytest.fixture
def draft(tmp_path):
    return write_nested(tmp_path / "nested")


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["flatten", "-h"]])
def test_help_is_a_success(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "usage: eagle3" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["check"], ["check", "x", "--engine", "trt"], ["flatten", "x"]])
def test_a_wrong_call_is_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["check", "validate-config", "simulate-load"])
def test_every_judge_takes_the_engine(command, draft, capsys):
    """The draft is nested: SGLang does not read that, and says so wherever its config is looked at."""
    status = main([command, str(draft), "--engine", "sglang"])
    out = capsys.readouterr().out
    assert "SGLang" in out
    assert "vLLM 0.32.0" not in out
    assert status == (0 if command == "simulate-load" else 1)


@pytest.mark.parametrize("command", ["check", "validate-config", "simulate-load"])
def test_a_path_that_is_not_there_is_2(command, draft, capsys):
    assert main([command, "nowhere"]) == 2
    assert main([command, str(draft), "--verifier", "nowhere"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_halves_of_check(draft, tmp_path, capsys):
    verifier = tmp_path / "config.json"
    verifier.write_text(json.dumps(VERIFIER))
    for command in (["check", "--no-values"], ["validate-config"], ["simulate-load"]):
        assert main([*command, str(draft), "--verifier", str(verifier)]) == 0
    out = capsys.readouterr().out
    assert "not checked: tensors (only the config was asked for)" in out
    assert "not checked: config rules (only the load was asked for)" in out
    assert main(["validate-config", str(draft / "config.json")]) == 0


def test_a_name_that_the_system_refuses_is_no_traceback(capsys):
    assert main(["check", "x" * 5000, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "unreadable"


def test_unreadable_files_are_problems_in_the_asked_form(draft, capsys):
    (draft / "config.json").write_bytes(b"\xff")
    (draft / "model-frozen.safetensors").write_bytes(b"")
    assert main(["check", str(draft), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "error"
    assert found["problems"][0]["code"] == "unreadable-json"
    assert main(["check", str(draft)]) == 1
    assert "not UTF-8" in capsys.readouterr().out


def test_flatten_writes_a_checkpoint_that_passes(draft, tmp_path, capsys):
    assert main(["flatten", str(draft), str(tmp_path / "flat")]) == 0
    assert main(["check", "--no-values", str(tmp_path / "flat")]) == 0
    assert main(["flatten", str(draft), str(tmp_path / "flat")]) == 1
    assert "exists" in capsys.readouterr().err


def test_output_that_a_terminal_cannot_show_is_no_traceback(tmp_path):
    write_tensors(tmp_path / "model.safetensors", FROZEN | TRAINED | {"\u2603\x1b[31m": ("F32", (1,))})
    (tmp_path / "config.json").write_text(json.dumps({**NESTED, "\ud800": 1}))
    done = subprocess.run(
        [sys.executable, "-m", "eagle3", "check", str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"\\u2603\\x1b[31m" in done.stdout
    assert b"Traceback" not in done.stderr


def test_a_reader_that_leaves_early_hears_no_complaint(draft):
    command = f"{sys.executable} -m eagle3 check {draft} --no-values --json | {shutil.which('true')}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert done.stderr == b""


def test_a_tensor_parallel_size_that_the_heads_forbid_is_an_error_with_the_legal_ones(draft, capsys):
    """The draft has 4 heads, 2 kv heads and an MLP of 96."""
    check = ["check", "--no-values", str(draft), "--tensor-parallel-size"]
    assert main([*check, "4"]) == 0
    capsys.readouterr()
    assert main([*check, "8"]) == 1
    out = capsys.readouterr().out
    assert "ERROR tensor-parallel: transformer_layer_config.num_attention_heads" in out
    assert "--tensor-parallel-size 1 or 2 or 4, or draft_tensor_parallel_size: 1" in out
    for wrong in ("0", "-1", "two"):
        with pytest.raises(SystemExit) as caught:
            main([*check, wrong])
        assert caught.value.code == 2


def one_object(text: str) -> dict:
    """`--json` prints exactly one object and nothing else."""
    assert text.count("\n") == 1
    found = json.loads(text)
    assert list(found) == ["verdict", "problems", "checked", "not_checked"]
    assert all(set(each) == {"what", "why"} for each in found["not_checked"])
    assert all(isinstance(each, str) for each in found["checked"])
    for each in found["problems"]:
        assert list(each) == ["code", "where", "found", "expected", "fix", "consequence", "severity"]
        assert all(isinstance(value, str) for value in each.values())
    return found


def test_the_object_and_the_exit_status_agree(draft, tmp_path, capsys):
    """0 for ok and for warnings, 1 for errors, also where a file cannot be read at all."""
    verifier = tmp_path / "verifier.json"
    verifier.write_text(json.dumps(VERIFIER))
    config = json.loads((draft / "config.json").read_text())
    for changes, verdict, status in (
        ({}, "ok", 0),
        ({"tie_word_embeddings": True}, "warning", 0),
        ({"draft_vocab_size": 41}, "error", 1),
    ):
        (draft / "config.json").write_text(json.dumps(config | changes))
        arguments = ["check", "--no-values", "--json", str(draft), "--verifier", str(verifier)]
        assert main(arguments) == status
        found = one_object(capsys.readouterr().out)
        assert found["verdict"] == verdict
        assert found["not_checked"] == [{"what": "values", "why": "--no-values"}]
    (draft / "config.json").write_text("[]")
    assert main(["check", "--json", str(draft)]) == 1
    assert one_object(capsys.readouterr().out)["verdict"] == "error"


def test_what_was_not_checked_is_said_for_each_reason(draft, capsys, monkeypatch):
    assert main(["check", "--no-values", "--json", str(draft)]) == 0
    reasons = {each["what"]: each["why"] for each in one_object(capsys.readouterr().out)["not_checked"]}
    assert reasons == {"agreement with the verifier": "no --verifier was given", "values": "--no-values"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["check", "--json", str(draft)]) == 0
    reasons = {each["what"]: each["why"] for each in one_object(capsys.readouterr().out)["not_checked"]}
    assert reasons["values"].startswith("numpy is not installed")
