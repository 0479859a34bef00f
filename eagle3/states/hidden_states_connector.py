"""The KV connector that carries hidden states out of vLLM: from the cache straight to their place in a shard file.

vLLM's method `extract_hidden_states` keeps the captured states as one more layer of the KV cache, and the parent class
here (vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py, 0.32.0) copies them out when a
request ends, on a GPU without stopping the model. This class changes where they go: the parent writes one safetensors
file for each request, this one into the shard and position that the request names. So no bytes are written twice, and
it is the same whether the worker runs in the stage's process or, with tensor parallel, in another on the same machine.

vLLM loads the class by module and name, in the engine's own processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

from eagle3.file_faults import naming
from eagle3.states.fp8 import quantise
from eagle3.states.shard_file import write_at

NUM_WRITERS = 4


class ShardConnector(ExampleHiddenStatesConnector):
    """Writes a finished request's states and token ids to the place given by `destination`, from TP rank 0 alone."""

    _failure: BaseException | None = None

    def _submit_async_write(self, pending: Any) -> None:
        """On a CPU, where the parent would pin memory and record CUDA events, the copy is a plain gather."""
        assert self._kv_cache is not None
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
        elif self._is_tp_rank_zero:
            blocks = torch.tensor(pending.block_ids)[:, None]
            slots = (blocks * self._block_size + torch.arange(self._block_size)).flatten()
            states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
            tensors = {"hidden_states": states, "token_ids": pending.token_ids}
            future = self._executor.submit(self._write_tensors, tensors, Done(), pending.filename, None)
            self._req_copy_events[pending.req_id] = Done()
            self._req_futures[pending.req_id] = future
            future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _on_write_done(self, req_id: str, future: Future[None]) -> None:
        """In a writer thread."""
        super()._on_write_done(req_id, future)
        self._failure = self._failure or future.exception()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Called in every step of the engine, so that a failed write ends it at once, in whichever process it runs.

        The parent only logs the failure; the driver would wait for states that never come.
        """
        if self._failure:
            raise self._failure
        return super().get_finished(finished_req_ids)

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """In a writer thread: states first, ids last, for the ids say that the states are there."""
        assert lock_fd is None, "use_synchronization_lock is off"
        event.synchronize()
        path, (states_at, *more_at, ids_at) = _parse_destination(filename)
        states = tensors["hidden_states"]
        parts = quantise(states) if more_at else (states,)
        with naming(path), open(path, "r+b", buffering=0) as file:
            for part, position in zip(parts, (states_at, *more_at), strict=True):
                write_at(file.fileno(), _bytes_of(part), position)
            write_at(file.fileno(), _bytes_of(tensors["token_ids"].to(torch.int32)), ids_at)


class Done:
    """Stands for the CUDA event of a copy that has ended."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def destination(path: Path, *positions: int) -> dict[str, Any]:
    """`SamplingParams.extra_args` of a request whose states and ids go to these bytes of the file (`place_of`).

    With four positions the states are stored as fp8. It travels as the parent's own `hidden_states_path`, so that its
    scheduler side serves unchanged.
    """
    text = ",".join(map(str, positions))
    return {"kv_transfer_params": {"hidden_states_path": f"{path}#{text}"}}


def _parse_destination(text: str) -> tuple[str, list[int]]:
    path, _, positions = text.rpartition("#")
    return path, [int(position) for position in positions.split(",")]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; numpy knows no bfloat16, so they are looked at as bytes."""
    return memoryview(tensor.contiguous().view(torch.uint8).numpy())


def engine_options(layer_ids: Sequence[int]) -> dict[str, Any]:
    """Options of `vllm.LLM` that capture `layer_ids` (ids of `eagle3.layer_ids`, n last) through this connector."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": ShardConnector.__name__,
            "kv_connector_module_path": ShardConnector.__module__,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "allow_custom_save_path": True,
                "use_synchronization_lock": False,
                "num_writer_threads": NUM_WRITERS,
            },
        },
    }
