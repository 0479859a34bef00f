"""What the installed vLLM cannot run of a verifier, told from its config before an engine starts.

vLLM 0.32.0 says it as "Model architectures [...] failed to be inspected. Please check the logs for more details".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from eagle3.problems import Problem

# Of the multimodal classes that give aux states, the ones that vLLM 0.32.0 imports without torchvision; all 31 others
# were asked for on a CPU build without it (ModelRegistry.models[name].load_model_cls()).
WITHOUT_TORCHVISION = frozenset({"KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration"})


def engine_limits(config: dict[str, Any]) -> Iterator[Problem]:
    """config: the verifier's config.json."""
    names = config.get("architectures")
    architectures = set(map(str, names)) if isinstance(names, list) else set()
    nested = isinstance(config.get("text_config"), dict)
    if nested and not architectures & WITHOUT_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        yield Problem(
            "no-torchvision",
            "verifier.source",
            f"{', '.join(sorted(architectures)) or 'a multimodal class'}, and torchvision is not installed",
            "torchvision, which vLLM 0.32.0 imports for this class even where every prompt is text",
            "install the torchvision that belongs to the installed torch, from the same index",
            "vLLM stops with: Model architectures [...] failed to be inspected",
        )


def packed_expert_limits(config: dict[str, Any], cpu_build: bool) -> Iterator[Problem]:
    """INT4 experts on vLLM's CPU build (fused_moe/oracle/int_wna16.py). Not an error: `ignore` may name the experts."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    routed = any("experts" in name and type(value) is int and value > 1 for name, value in text.items())
    quantised = text.get("quantization_config") or config.get("quantization_config") or {}
    packed = isinstance(quantised, dict) and quantised.get("quant_method") == "compressed-tensors"
    if cpu_build and routed and packed:
        yield Problem(
            "packed-experts",
            "verifier.source",
            "experts, weights quantised by compressed-tensors, and a CPU build of vLLM",
            "a GPU build, or experts that are not packed",
            "run every stage that starts an engine on a GPU",
            "vLLM 0.32.0 stops with: No WNA16 MoE backend supports the deployment configuration (its kernel for INT4 "
            "experts wants AMX, and does not take the routing of DeepSeek-V3 and Kimi)",
            "warning",
        )


def serving_limits(config: dict[str, Any], cpu_build: bool) -> Iterator[Problem]:
    """What stops serve-test alone: a draft beside latent attention on vLLM's CPU build (v1/worker/utils.py)."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    if cpu_build and text.get("kv_lora_rank"):
        yield Problem(
            "latent-attention",
            "verifier.source",
            f"latent attention (kv_lora_rank {text['kv_lora_rank']}) and a CPU build of vLLM",
            "a GPU build, to serve a draft with this verifier",
            "run serve-test on a GPU; every stage before it works here",
            "vLLM 0.32.0 stops with: No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])",
            "warning",
        )
