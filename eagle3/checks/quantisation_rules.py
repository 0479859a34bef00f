"""Rules for quantised drafts: a layer is packed exactly where the config says so. Their load is not simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3.checks.config_rules import VLLM, Given, Rule
from eagle3.checks.tensor_rules import FLOATS
from eagle3.formats.json_files import spelled
from eagle3.problems import Problem

LINEARS = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linears_are_packed_where_targeted(given: Given) -> Iterator[Problem]:
    """A plain weight stands in quantization_config's `ignore`, and a quantised one does not.

    Source: vllm/model_executor/layers/quantization (compressed_tensors: targets, ignore); vllm#28435.
    """
    if not given.config.quantized or not given.tensors:
        return
    settings: dict[str, Any] = given.config.raw["quantization_config"]
    ignore = [name for name in _list(settings.get("ignore")) if isinstance(name, str)]
    plain = [name.removesuffix(".weight") for name, each in given.tensors.items() if _is_plain_linear(name, each.dtype)]
    packed = [name for name in given.tensors if name.endswith(("_packed", "_scale", "_scale_inv"))]
    missing = [name for name in plain if not any(_ignores(pattern, name) for pattern in ignore)]
    if missing and not packed:
        consequence = f"{VLLM} creates packed parameters for plain tensors and refuses them"
        fix = "remove quantization_config: no tensor of the draft is quantised"
        yield given.problem("quantisation", "quantization_config", "present", "absent", fix, consequence)
    elif missing:
        consequence = f"{VLLM} creates packed parameters for these plain tensors and refuses them, often misleadingly"
        fix = f"add to ignore: {spelled(missing)}"
        where = "quantization_config.ignore"
        yield given.problem("quantisation", where, ignore, "every plain linear layer", fix, consequence)
    ignored = [name for name in packed if any(_ignores(pattern, name.rpartition(".")[0]) for pattern in ignore)]
    if ignored:
        consequence = f"{VLLM} creates plain parameters for these packed tensors and refuses them"
        fix = "take them out of ignore"
        yield given.problem("quantisation", "quantization_config.ignore", ignored, "plain layers", fix, consequence)


def _is_plain_linear(name: str, dtype: str) -> bool:
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.split(".")[-1] in LINEARS and dtype in FLOATS


def _ignores(pattern: str, module: str) -> bool:
    """Names and parts of names. A pattern (`re:`) is taken by its plain parts: running one from a file is no option."""
    if pattern.startswith("re:"):
        parts = [part.strip("^$.\\") for part in pattern.removeprefix("re:").split(".*")]
        return all(part.replace("\\.", ".") in module for part in parts)
    return module == pattern or module.endswith(f".{pattern}") or pattern.endswith(f".{module}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


QUANTISATION_RULES: tuple[Rule, ...] = (linears_are_packed_where_targeted,)
