"""The in-process vLLM engine of the stages sample and extract: its environment, its start, its errors.

This module and the stages' own vLLM modules are where vLLM's Python API is imported; the settings below were tried with
vLLM 0.32.0.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eagle3.file_faults import file_fault
from eagle3.formats.json_files import read_json_object
from eagle3.machine import Machine, cores_by_rank
from eagle3.problems import InvalidInput, invalid
from eagle3.stage_guard import die_with_parent
from eagle3.verifiers.engine_limits import engine_limits

GIB = 1 << 30
DEFAULT_CPU_KV_CACHE_GIB = 2
# What a faulty verifier, setting or machine makes vLLM 0.32.0 raise; pydantic's errors are ValueErrors.
ENGINE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError, OSError, RuntimeError)


def prepare_environment(machine: Machine) -> None:
    """Set what vLLM reads at import; values that the user exported stay.

    V1 multiprocessing off keeps the engine in this process: it dies with the stage, its scheduling depends on nothing
    but the requests, and a start takes 12 s instead of 31 s (two cores, tiny verifier).
    """
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        # the verifier is a folder by now: nothing has to be looked up
        "HF_HUB_OFFLINE": "1",
    }
    import torch

    if not torch.cuda.is_available():
        # as serve-test's server is started: the number of threads is part of an answer's bf16 bits
        settings["VLLM_CPU_OMP_THREADS_BIND"] = cores_by_rank(machine.tensor_parallel_size or 1, machine.cpu_threads)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def start_engine(verifier: Path, machine: Machine, max_model_len: int, trust_remote_code: bool, **options: Any) -> Any:
    """A `vllm.LLM` over the local folder `verifier`, in bf16 and eager mode, seed 0.

    options are vLLM's own (`speculative_config`, `kv_transfer_config`, `max_num_seqs`, ...) and win over the settings
    here. Whatever stops the engine from starting is `InvalidInput` with vLLM's own words.
    """
    if problems := list(engine_limits(read_json_object(verifier / "config.json").value)):
        raise InvalidInput(*problems)
    with engine_errors("start"):
        prepare_environment(machine)
        # vLLM 0.32.0 itself reads torch's deprecated reduce_op while it loads
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")
        import torch
        from vllm import LLM

        _let_vllm_look_at_llvmlite()
        cuda = torch.cuda.is_available()
        tensor_parallel_size = machine.tensor_parallel_size or (torch.cuda.device_count() if cuda else 1)
        kv_cache_gib = machine.kv_cache_gib or (None if cuda else DEFAULT_CPU_KV_CACHE_GIB)
        settings = {
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": max_model_len,
            # a CPU gains nothing from compilation, and CUDA graphs pad batches, which changes bits
            "enforce_eager": True,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            # None on a GPU: vLLM profiles and takes its share; on a CPU it would take most of the machine's memory
            "kv_cache_memory_bytes": kv_cache_gib * GIB if kv_cache_gib else None,
        }
        engine = LLM(str(verifier), **{**settings, **options})
        if tensor_parallel_size > 1 and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            engine.collective_rpc(_die_with_the_stage)
        return engine


def _let_vllm_look_at_llvmlite() -> None:
    """vLLM 0.32.0's CPU build looks for its kernels in the `__dict__` of every object of every module
    (triton_utils/dispatcher.py). llvmlite's library answers for any name, this one too, with a C function:
    "object has no attribute 'get'". numba brings it in, with kimi_k25's image processor.
    """
    with suppress(ImportError):
        from llvmlite.binding import ffi

        ffi.lib._fntab.setdefault("__dict__", {})


def _die_with_the_stage(worker: Any) -> None:
    """In each worker process. vLLM 0.32.0 tells a worker by a pipe that its parent is gone, but one that spins in a
    collective operation, waiting for another rank, never looks: seen on a CPU, for ever and at full speed.
    """
    die_with_parent(signal.SIGKILL)


def stop_engine(engine: Any) -> None:
    """Free an engine's memory and process group, for a process that goes on (tests; a stage simply ends)."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def generate(engine: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[Any]) -> list[Any]:
    """vLLM's `RequestOutput`s in the order of `prompts` (token ids), one `SamplingParams` each.

    One prompt without room for its answer makes vLLM refuse the whole call, so callers filter by length first; that
    they did is asserted here.
    """
    window = engine.model_config.max_model_len
    assert all(len(ids) + one.max_tokens <= window for ids, one in zip(prompts, sampling, strict=True))
    with engine_errors("answer"):
        return list(
            engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], list(sampling), use_tqdm=False)
        )


def _engine_failures() -> tuple[type[Exception], ...]:
    try:
        from vllm.exceptions import VLLMError
    except ImportError:
        return ENGINE_ERRORS
    return (*ENGINE_ERRORS, VLLMError)


@contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """What vLLM raises becomes `InvalidInput` with vLLM's own words; faults of files pass, the stage guard says them.

    doing: completes "an engine that can ...".
    """
    try:
        yield
    except _engine_failures() as error:
        if file_fault(error):
            raise
        words = " ".join(str(error).split()) or "no message"
        raise invalid(
            "engine",
            "vLLM",
            f"{type(error).__name__}: {words[:1500]}",
            f"an engine that can {doing}",
            "mend what vLLM names: the verifier (verifier.source), sample.max_model_len, or this machine's share in "
            "machine.yaml (tensor_parallel_size, kv_cache_gib)",
        ) from error
