"""The verifier as transformers computes it, in float32: the reference that vLLM's states and answers are judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_reference(verifier: Path, trust_remote_code: bool) -> Any:
    """A model that gives logits for text alone; what transformers raises where it does not know the verifier passes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    # transformers 5.19 has most models with a nested text config, kimi_k25 too, under the second name only
    config = AutoConfig.from_pretrained(verifier, **options)
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    return auto.from_pretrained(verifier, dtype=torch.float32, **options).eval()
