"""The promises of SECURITY.md that no other test keeps: nothing of a parameter, a checkpoint or a link is obeyed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.__main__ import main
from eagle3.params import parse_params
from eagle3.problems import InvalidInput
from eagle3.yaml12 import parse_yaml, read_yaml
from tests.code_deps import ROOT
from tests.drafts import write_nested
from tests.stand_ins import command, light_repository, variables

METACHARACTERS = [
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "| touch pwned",
    "&& touch pwned",
    "x\ntouch pwned",
]
TAGS = [
    "!!python/object/apply:os.system ['touch pwned']",
    "!!python/name:os.system",
    "!!python/object/new:subprocess.Popen [[touch, pwned]]",
    "!include /etc/passwd",
]


class Touch:
    """Unpickling this runs a command."""

    def __reduce__(self):
        return subprocess.call, (["touch", "pwned"],)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return light_repository(tmp_path_factory.mktemp("repository"))


@pytest.mark.parametrize("tag", TAGS)
def test_yaml_tags_are_refused_and_not_run(tag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput):
        parse_yaml(f"verifier: {tag}", "params.yaml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../up.jsonl", "/etc/passwd.jsonl", "a/../../b.jsonl", "..\\b.jsonl", ".jsonl"])
@pytest.mark.parametrize("place", [("sample", "sources"), ("serve_test", "questions")])
def test_no_file_name_leads_out_of_its_folder(name, place):
    raw = read_yaml(ROOT / "params.yaml")
    section, key = place
    raw[section][key] = [{"file": name}] if key == "sources" else [name]
    with pytest.raises(InvalidInput):
        parse_params(raw)


def test_values_with_shell_characters_stay_values(repository):
    """Through the real `dvc repro`: a text of params.yaml that names commands fails as a value, and runs nothing."""
    raw = read_yaml(repository / "params.yaml")
    for text in METACHARACTERS:
        changed = {**raw, "verifier": {**raw["verifier"], "source": text, "revision": "0" * 40}}
        (repository / "params.yaml").write_text(json.dumps(changed))
        subprocess.run(["dvc", "repro", "-q", "sample"], cwd=repository, env=variables(repository), check=False)
        planned = command(repository, "python", "-m", "eagle3", "plan", "-S", f"verifier.source={json.dumps(text)}")
        assert planned.stdout
    (repository / "params.yaml").write_text(json.dumps(raw))
    assert not list(repository.rglob("pwned"))


def test_pickles_beside_a_draft_are_named_and_never_opened(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draft = write_nested(tmp_path / "draft")
    for path in draft.glob("model*"):
        path.unlink()
    for name in ("pytorch_model.bin", "training_state.pt"):
        (draft / name).write_bytes(pickle.dumps(Touch()))
    for words in (["check", "draft"], ["inspect", "draft"], ["flatten", "draft", "flat"], ["trace", "draft"]):
        main(words)
    assert "pickle" in capsys.readouterr().out
    assert not (tmp_path / "pwned").exists()


def test_code_beside_a_draft_is_not_run_and_not_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draft = write_nested(tmp_path / "draft")
    for name in ("config.py", "modeling.py", "__init__.py", "sitecustomize.py", "json.py"):
        (draft / name).write_text("import pathlib; pathlib.Path('pwned').touch()\n")
    for words in (["check", "--no-values", "draft"], ["inspect", "draft"], ["flatten", "draft", "flat"]):
        subprocess.run([sys.executable, "-m", "eagle3", *words], cwd=tmp_path, env=_with(ROOT), check=True)
    assert not list(tmp_path.rglob("pwned"))
    assert not list((tmp_path / "flat").glob("*.py"))


def _with(root: Path) -> dict[str, str]:
    return variables(root) | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_light_commands_open_no_connection(tmp_path, monkeypatch):
    """A socket in any of them is an error of the interpreter's own audit hook, whoever opens it."""
    draft = write_nested(tmp_path / "draft")
    hook = "import sys; sys.addaudithook(lambda name, _: name.startswith('socket.') and sys.exit('a socket: ' + name))"
    check, flatten = ["check", "--no-values", str(draft)], ["flatten", str(draft), str(tmp_path / "flat")]
    for words in (check, ["inspect", str(draft)], flatten):
        code = f"{hook}; from eagle3.__main__ import main; sys.exit(main({words!r}))"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=_with(ROOT))


def test_a_link_out_of_the_tree_gives_nothing_away(tmp_path, capsys):
    """What a link leads to is read as a config or as a header, never printed."""
    (tmp_path / "secret").write_text("the password is 1234\n")
    for name in ("config.json", "model.safetensors"):
        draft = write_nested(tmp_path / name.partition(".")[0])
        for path in draft.glob("model*") if name.startswith("model") else ():
            path.unlink()
        (draft / name).unlink(missing_ok=True)
        (draft / name).symlink_to(tmp_path / "secret")
        for command_name in ("check", "inspect", "trace"):
            assert main([command_name, str(draft)]) == 1
    told = capsys.readouterr()
    assert "1234" not in told.out + told.err


def test_nothing_of_the_environment_is_written_down(repository):
    """Manifests, reports, dvc.lock and the log of runs hold no secret, no user and no path of this machine."""
    secret = "a-secret-of-the-environment"
    names = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_API_KEY")
    command(repository, "dvc", "repro", "-q", **dict.fromkeys(names, secret))
    paths = [path for part in ("data", "reports", ".dvc/tmp/eagle3") for path in (repository / part).rglob("*")]
    for path in [*paths, repository / "dvc.lock"]:
        if path.is_file():
            content = path.read_bytes()
            assert secret.encode() not in content, path
            assert ".dvc/tmp" in str(path) or str(repository).encode() not in content, path


def test_dvc_yaml_gives_no_value_to_a_shell():
    text = (ROOT / "dvc.yaml").read_text()
    assert "${" not in text
    assert set(re.findall(r"^    cmd: (.*)$", text, re.MULTILINE)) == {
        f"python -m stages.{path.stem}" for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__"
    }


def test_trust_in_remote_code_is_off_unless_it_is_named():
    for preset in sorted((ROOT / "presets").glob("*.yaml")):
        assert read_yaml(preset)["verifier"]["trust_remote_code"] is (preset.stem == "kimi-k2.5"), preset.stem
    calls = [path for path in (ROOT / "eagle3").rglob("*.py") if "trust_remote_code=True" in path.read_text()]
    assert not calls


def test_every_test_that_security_md_names_is_there():
    for name in re.findall(r"`(tests/[\w.]+)`", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / name).is_file(), name
    assert shutil.which("git")
