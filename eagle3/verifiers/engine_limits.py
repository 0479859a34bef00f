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
