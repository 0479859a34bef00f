"""The witness: vLLM's own draft class, built on the CPU from the same config, and what its load_weights really did.

Every parameter is filled with a bit pattern that no checkpoint holds, the real load_weights runs over the files that
vLLM's own loader chooses, and what is left of the pattern is compared with the simulation, parameter by parameter and
value by value. Only the verifier's config.json is needed. vLLM 0.32.0 cannot do this on the meta device, where neither
the pattern nor the load leaves anything to look at.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.checks.expected_tensors import SHARED, UNINITIALISED, UNUSED, ZERO, Parameter, Part
from eagle3.checks.mapped_pages import ForgottenPages
from eagle3.checks.simulated_load import CUT, FILLED, FUSED, LOADED, PARTLY, SimulatedLoad
from eagle3.problems import Problem

# A quiet NaN with a payload of its own as bfloat16, a denormal-free odd number otherwise: what a tensor file could
# hold by accident is one value, not a parameter full of it.
PATTERN = 0x7FE5A5A57FE57FE5
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNSET = "unset"
NO_PARAMETER = "no such parameter"


@dataclass(frozen=True)
class EngineLoad:
    """What the real class did. states: parameter -> filled, partly_filled or unset; refusal: the exception, or ''."""

    class_name: str
    states: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    refusal: str
    differing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For the report: no paths, no times, no addresses."""
        filled = sum(state == FILLED for state in self.states.values())
        return {
            "class": self.class_name,
            "parameters": len(self.states),
            "filled": filled,
            "refused": bool(self.refusal),
        }


@contextmanager
def engine(verifier_config: Path) -> Iterator[Engine]:
    """vLLM with one process in its group, for drafts of the verifier whose config.json is `verifier_config`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vllm is first imported
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
    )
    from vllm.utils.network_utils import get_open_port

    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
    try:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(verifier_config, Path(folder) / "config.json")
            yield Engine(Path(folder))
    finally:
        cleanup_dist_env_and_memory()


class Engine:
    """Loads one draft after another; see `engine`."""

    def __init__(self, verifier: Path) -> None:
        self._verifier = verifier

    def load(self, draft: Path, simulated: SimulatedLoad) -> EngineLoad:
        """Build the class for `draft`, load its files, and compare with `simulated`. Errors of vLLM are data here."""
        try:
            name, model, _ = self.draft(draft)
        except Exception as error:  # whatever the server raises is what the witness reports
            return EngineLoad("", {}, {}, _told(error), ())
        parameters = dict(model.named_parameters())
        states = {key: _state(parameter) for key, parameter in parameters.items()}
        shapes = {key: tuple(parameter.shape) for key, parameter in parameters.items()}
        return EngineLoad(name, states, shapes, "", tuple(_differing(parameters, simulated)))

    def draft(self, draft: Path) -> tuple[str, Any, Any]:
        """vLLM's name for the class of a checkpoint, the model, and the config that it was built under.

        What no tensor fills holds the pattern.
        """
        from vllm.config import set_current_vllm_config
        from vllm.distributed import initialize_model_parallel, model_parallel_is_initialized
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.models.registry import ModelRegistry
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = self._engine_config(draft)
        draft_config = config.speculative_config.draft_model_config
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            if not model_parallel_is_initialized():
                initialize_model_parallel(1, 1)
            cls, name = ModelRegistry.resolve_model_cls(draft_config.hf_config.architectures, draft_config)
            model = cls(vllm_config=config, prefix="draft")
            for parameter in model.parameters():
                _bits(parameter).fill_(_pattern(parameter))
            loader = DefaultModelLoader(config.load_config)
            with ForgottenPages() as pages:
                model.load_weights(pages.watch(loader.get_all_weights(draft_config, model)))
        return name, model, config

    def _engine_config(self, draft: Path) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(
            model=str(self._verifier),
            tokenizer=str(self._verifier),
            skip_tokenizer_init=True,
            enforce_eager=True,
            use_tqdm_on_load=False,
            max_model_len=256,
            dtype="bfloat16",
            speculative_config={"method": "eagle3", "model": str(draft), "num_speculative_tokens": 1},
        ).create_engine_config()


def witness_problems(real: EngineLoad, simulated: SimulatedLoad) -> Iterator[Problem]:
    """Every point at which the real load and the simulated one differ: a fault of the simulation, or of its table."""
    if bool(real.refusal) != simulated.refused:
        yield _differs("the load", real.refusal or "loaded", "refused" if simulated.refused else "loaded")
    if real.refusal:
        return
    expected = {state.parameter.name: state for state in simulated.parameters}
    for name in sorted(set(real.states) | set(expected)):
        state = expected.get(name)
        wanted = _as_seen(state.state) if state else NO_PARAMETER
        seen = real.states.get(name, NO_PARAMETER)
        if seen != wanted:
            yield _differs(name, seen, wanted)
        elif state and not _fits(real.shapes[name], _whole_shape(state.parameter)):
            yield _differs(name, str(list(real.shapes[name])), str(list(_whole_shape(state.parameter))))
    for name in real.differing:
        yield _differs(name, "other values in the parameter than in the file", "the same values")


def _as_seen(state: str) -> str:
    """Nothing was written into a parameter that the server shares, zeroes or forgets."""
    return UNSET if state in (SHARED, ZERO, UNINITIALISED, UNUSED) else state


def _whole_shape(parameter: Parameter) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parameter.parts), *parameter.parts[0].shape[1:])


def _fits(real: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Vocabularies are padded to a multiple of 64 rows (vocab_parallel_embedding.py)."""
    padded = (-(-expected[0] // 64) * 64, *expected[1:])
    return real in (expected, padded)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view(INTEGERS[tensor.element_size()])


def _pattern(tensor: torch.Tensor) -> int:
    bits = 8 * tensor.element_size()
    value = PATTERN & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def _state(tensor: torch.Tensor) -> str:
    """Counted in blocks: a comparison of a whole vocabulary at once would need as much memory again."""
    flat, pattern = _bits(tensor).flatten(), _pattern(tensor)
    left = sum(int((block == pattern).sum()) for block in flat.split(1 << 24))
    return FILLED if left == 0 else UNSET if left == flat.numel() else PARTLY


def _differing(parameters: dict[str, torch.Tensor], simulated: SimulatedLoad) -> Iterator[str]:
    """Tensors whose bytes are not where the simulation put them (a cut tensor: its first rows or columns)."""
    from safetensors import safe_open

    rows = _row_offsets(simulated)
    for fate in simulated.tensors:
        if fate.fate not in (LOADED, FUSED, CUT) or fate.parameter not in parameters:
            continue
        with safe_open(fate.tensor.file, framework="pt") as file:
            if fate.tensor.name not in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                yield fate.tensor.name
                continue
            stored = file.get_tensor(fate.tensor.name)
        start = rows.get((fate.parameter, fate.expected), {}).get(_last_word(fate.tensor.name), 0)
        place = parameters[fate.parameter].data[start : start + fate.expected[0]]
        window = stored[tuple(slice(size) for size in fate.expected)]
        if not torch.equal(_bits(place.contiguous()), _bits(window.to(place.dtype).expand_as(place).contiguous())):
            yield fate.tensor.name


def _row_offsets(simulated: SimulatedLoad) -> dict[tuple[str, tuple[int, ...]], dict[str, int]]:
    """(parameter, shape) -> part -> first row, for parameters made of several parts."""
    offsets: dict[tuple[str, tuple[int, ...]], dict[str, int]] = {}
    for state in simulated.parameters:
        row = 0
        for part in _parts(state.parameter):
            offsets.setdefault((state.parameter.name, part.shape), {})[_last_word(part.name)] = row
            row += part.shape[0]
    return offsets


def _parts(parameter: Parameter) -> tuple[Part, ...]:
    return parameter.parts if len(parameter.parts) > 1 else ()


def _last_word(name: str) -> str:
    """`layers.0.self_attn.q_proj.weight` -> `q_proj`."""
    return name.split(".")[-2] if "." in name else name


def _told(error: Exception) -> str:
    """The class and the first line of an exception; many of vLLM's assertions have no text at all."""
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _differs(where: str, real: str, simulated: str) -> Problem:
    return Problem(
        "witness",
        where,
        f"vLLM: {real}",
        f"simulated: {simulated}",
        "report it: the table in eagle3/checks/expected_tensors.py or eagle3/checks/simulated_load.py is wrong",
        "the simulation does not describe the server, so its verdict means nothing",
    )
