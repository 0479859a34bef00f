"""How the server is started: nothing guessed, nothing inherited that would change results."""

from __future__ import annotations

import json
import os
import sys

from eagle3.machine import DEFAULT, Machine
from eagle3.serve.vllm_command import ServerSettings, intel_openmp, num_ranks, server_command, server_environment


def machine(**values: int) -> Machine:
    return Machine(**{**vars(DEFAULT), **values})


def test_the_method_is_given_whatever_the_folder_of_the_draft_is_called(tmp_path):
    draft = tmp_path / "mtp-eagle-dflash"
    command = server_command(ServerSettings(tmp_path, 128, DEFAULT, False, draft, 3), "name", 8000)
    given = json.loads(command[command.index("--speculative-config") + 1])
    assert given == {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


def test_without_a_draft_nothing_is_said_of_drafting(tmp_path):
    command = server_command(ServerSettings(tmp_path, 128, DEFAULT), "name", 8000)
    assert not [word for word in command if "spec" in word]
    assert command[command.index("--model") + 1] == str(tmp_path)
    assert "--trust-remote-code" not in command


def test_settings_of_the_machine_reach_the_server(tmp_path):
    settings = ServerSettings(tmp_path, 128, machine(tensor_parallel_size=2), trust_remote_code=True)
    command = server_command(settings, "name", 8000)
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert "--trust-remote-code" in command
    assert server_environment(machine(kv_cache_gib=5))["VLLM_CPU_KVCACHE_SPACE"] == "5"
    assert server_environment(machine(cpu_threads=1))["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))


def test_the_servers_environment_is_offline_and_free_of_what_would_change_results(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    environment = server_environment(DEFAULT)
    assert environment["HF_HUB_OFFLINE"] == environment["VLLM_NO_USAGE_STATS"] == "1"
    assert not {"VLLM_API_KEY", "VLLM_USE_V2_MODEL_RUNNER"} & set(environment)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_the_openmp_of_intel_is_preloaded_where_it_is_installed(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    found = intel_openmp()
    assert server_environment(DEFAULT).get("LD_PRELOAD") == (str(found) if found else None)
    assert found is None or found.is_file()
    monkeypatch.setenv("LD_PRELOAD", "/lib/mine.so")
    assert server_environment(DEFAULT)["LD_PRELOAD"] == "/lib/mine.so"


def test_one_rank_where_no_gpu_is_visible(monkeypatch):
    assert num_ranks(machine(tensor_parallel_size=4)) == 4
    assert num_ranks(DEFAULT) >= 1
