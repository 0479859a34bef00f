"""`eagle3 doctor` in environments that are broken on purpose: each finding has its remedy."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from eagle3 import machine
from eagle3.__main__ import main
from eagle3.plans import doctor
from tests.code_deps import ROOT


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A healthy repository, with every program it needs on PATH and nothing else."""
    (tmp_path / ".dvc").mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, target in (("git", "/bin/true"), ("dvc", "/bin/true"), ("python", sys.executable)):
        (tmp_path / "bin" / name).symlink_to(target)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def codes(*severities: str) -> set[str]:
    return {problem.code for problem in doctor.diagnose() if problem.severity in (severities or ("error",))}


def program(folder: Path, name: str, text: str) -> None:
    (folder / "bin" / name).unlink(missing_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


def test_a_healthy_repository_has_no_error(here, capsys):
    assert codes() == set()
    assert main(["doctor"]) == 0
    assert "ERROR" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "found"),
    [("LlavaForConditionalGeneration", {"no-torchvision"}), ("KimiK25ForConditionalGeneration", set())],
)
def test_a_verifier_whose_class_needs_torchvision_is_named(here, name, found):
    """The lock has no torchvision; vLLM imports it for every multimodal class with aux states but two."""
    params = (here / "params.yaml").read_text()
    (here / "params.yaml").write_text(re.sub(r"(?m)^  source: .*", "  source: model", params, count=1))
    (here / "model").mkdir()
    (here / "model/config.json").write_text(json.dumps({"architectures": [name], "text_config": {"kv_lora_rank": 512}}))
    assert codes() == found
    assert "latent-attention" in codes("warning")


@pytest.mark.parametrize("outside", [True, False])
def test_int4_experts_on_a_cpu_build_are_named_wherever_the_config_says_them(here, outside):
    params = (here / "params.yaml").read_text()
    (here / "params.yaml").write_text(re.sub(r"(?m)^  source: .*", "  source: model", params, count=1))
    (here / "model").mkdir()
    quantised = {"quantization_config": {"quant_method": "compressed-tensors"}}
    text = {"n_routed_experts": 384, **({} if outside else quantised)}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (here / "model/config.json").write_text(json.dumps({**config, **(quantised if outside else {})}))
    assert "packed-experts" in codes("warning")
    (here / "model/config.json").write_text(json.dumps({**config, "text_config": {"n_routed_experts": 384}}))
    assert "packed-experts" not in codes("warning")


@pytest.mark.parametrize("name", ["git", "dvc", "python"])
def test_a_missing_program_is_named(here, name, capsys):
    (here / "bin" / name).unlink()
    assert codes() == {"no-program"}
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["where"] == name


def test_another_python_on_the_path_is_found(here):
    program(here, "python", "exit 0")
    assert codes() == {"other-python"}


def test_another_engine_than_declared_is_found(here):
    text = (here / "params.yaml").read_text()
    (here / "params.yaml").write_text(text.replace('vllm: "0.32.0"', 'vllm: "0.31.0"'))
    assert codes() == {"engine-version"}


def test_broken_parameters_and_machine_are_said_and_the_rest_is_looked_at(here):
    (here / "params.yaml").write_text("seed: many\n")
    (here / "machine.yaml").write_text("tensor_parallel_size: 0\n")
    (here / "bin/git").unlink()
    assert codes() >= {"missing-parameter", "no-program"}
    assert any(one.where == "tensor_parallel_size" and "machine.yaml" in one.fix for one in doctor.diagnose())


def test_a_ray_cluster_that_does_not_answer_is_found(here):
    (here / "machine.yaml").write_text("executor: ray\nray_address: 127.0.0.1:1\n")
    assert codes() == {"executor"}


def test_a_lock_with_other_versions_is_a_warning_that_names_them(here):
    (here / "requirements").mkdir()
    (here / "requirements/cpu.lock").write_text("pyyaml==1.0\nnot-there==2.0\n")
    found = [problem for problem in doctor.diagnose() if problem.code == "packages"]
    assert "not 1.0" in found[0].found
    assert "not-there absent, not 2.0" in found[0].found


def test_fewer_gpus_than_machine_yaml_wants_and_a_cpu_build_beside_them(here):
    program(here, "nvidia-smi", "echo 'GPU 0: A'; echo 'GPU 1: B'")
    (here / "machine.yaml").write_text("tensor_parallel_size: 8\n")
    assert codes("error", "warning") >= {"gpus"}
    assert any("at most 2 GPUs" in problem.expected for problem in doctor.diagnose())
    program(here, "nvidia-smi", "exit 9")
    assert "gpus" not in codes("error", "warning"), "a driver that fails shows no GPU"


def test_a_weak_processor_and_little_memory(here, monkeypatch):
    (here / "MEMINFO").write_text("MemTotal:       16777216 kB\nMemAvailable:    1048576 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", here / "MEMINFO")
    (here / "CPUINFO").write_text("flags : sse4_2 fpu\n")
    monkeypatch.setattr(doctor, "CPUINFO", here / "CPUINFO")
    assert "cpu" in codes()
    assert "memory" in codes("warning")
    (here / "CPUINFO").write_text("flags : avx2 avx512f\n")
    assert "cpu" in codes("warning")
    (here / "CPUINFO").write_text("flags : avx2 amx_bf16\n")
    assert "cpu" not in codes("error", "warning")


def test_a_disk_with_little_room(here, monkeypatch):
    assert "disk" not in codes("warning")
    monkeypatch.setattr(doctor, "MIN_DISK_GIB", 10**9)
    assert "disk" in codes("warning")


def test_a_cache_on_another_disk_than_the_data(here, monkeypatch):
    """The cache that DVC uses, also before it is made; where that is moved beside the data the warning is gone."""
    monkeypatch.setattr(doctor, "are_on_one_disk", lambda data, cache: not cache.is_relative_to(here / "elsewhere"))
    for name in ("data", "elsewhere", "beside"):
        (here / name).mkdir()
    assert "file-systems" not in codes("warning")
    local = here / ".dvc/config.local"
    local.write_text(f"[cache]\n    dir = {here / 'elsewhere/cache'}\n")
    [found] = [problem for problem in doctor.diagnose() if problem.code == "file-systems"]
    assert str(here / "elsewhere") in found.found
    local.write_text(f"[cache]\n    dir = {here / 'beside/cache'}\n")
    assert "file-systems" not in codes("warning")
    monkeypatch.setenv("HOME", str(here / "elsewhere"))
    local.write_text("[cache]\n    dir = ~/cache\n")
    assert "file-systems" in codes("warning"), "DVC expands ~ here too"


def test_a_list_of_the_cache_with_a_flipped_bit(here):
    text = b'[{"md5": "32d7de0ad90437a10c66fe9319999576", "relpath": "manifest.json"}]'
    digest = hashlib.md5(text).hexdigest()
    path = here / f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}.dir"
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    assert codes() == set()
    path.write_bytes(text.replace(b"json", b"jsom"))
    found = [problem for problem in doctor.diagnose() if problem.code == "rotten-list"]
    assert found[0].fix.startswith(f"rm -f {path.relative_to(here)}; then: dvc repro")


def test_what_a_full_disk_and_an_open_file_of_secrets_leave(here):
    (here / "dvc.lock").write_text("")
    assert codes() == {"cut-lock"}
    (here / "dvc.lock").unlink()
    local = here / ".dvc/config.local"
    local.write_text("['remote \"storage\"']\n    secret_access_key = abc\n")
    local.chmod(0o644)
    assert "secrets" in codes("warning")
    assert not any("abc" in str(problem) for problem in doctor.diagnose()), "the secret itself is not said"
    local.chmod(0o600)
    assert "secrets" not in codes("warning")
    local.chmod(0o644)
    local.write_text("['remote \"storage\"']\n    url = /somewhere\n")
    assert "secrets" not in codes("warning")


@pytest.mark.parametrize(
    ("url", "is_taken_from_the_root"),
    [("storage", True), ("../../store", True), ("~/store", False), ("/store", False), ("s3://bucket/eagle3", False)],
)
def test_a_remote_that_some_commands_take_from_the_root_of_the_disk(here, url, is_taken_from_the_root):
    (here / ".dvc/config").write_text(f"['remote \"storage\"']\n    url = {url}\n")
    found = [problem for problem in doctor.diagnose() if problem.code == "relative-remote"]
    assert [problem.fix for problem in found] == (
        [f"dvc remote modify storage url {os.path.abspath(here / '.dvc' / url)}"] if is_taken_from_the_root else []
    )
    (here / ".dvc/config.local").write_text("['remote \"storage\"']\n    url = ../store\n")
    assert "relative-remote" not in codes("warning"), "the local file is read from the clone itself"


def test_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"no-repository", "unreadable"} <= codes()


def test_in_time(here):
    start = os.times()
    doctor.diagnose()
    assert os.times().user - start.user < 5
