"""The verifier as transformers computes it, in float32: the reference that vLLM's states and answers are judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.formats.json_files import read_json_object
from eagle3.machine import available_memory
from eagle3.verifiers.verifier import text_config

# Types that transformers 5.19 has under another name. Sources: its kimi_k25 configuration, which renames the text
# config so; vllm 0.32.0, transformers_utils/config.py, which reads one as the other.
KNOWN_AS = {"kimi_k2": "deepseek_v3"}


class NoReference(Exception):
    """Why there is no reference, as words: what is there, then what it needs."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"{found}; expected {expected}")
        self.found, self.expected = found, expected


def load_reference(verifier: Path, trust_remote_code: bool) -> Any:
    """A model that gives logits for text alone; `NoReference` where memory or transformers has none."""
    weights = sum(path.stat().st_size for path in verifier.glob("*.safetensors"))
    needed, free = weights * _growth(verifier), available_memory()
    if needed > free:
        raise NoReference(
            f"{free / 1e9:.1f} GB of memory available", f"{needed / 1e9:.1f} GB for the verifier in float32"
        )
    try:
        model, loading = _load(verifier, {"local_files_only": True, "trust_remote_code": trust_remote_code})
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        raise NoReference(found, "a verifier that transformers loads as a causal language model") from error
    # transformers fills these with random numbers, and warns
    missing = sorted(loading["missing_keys"])
    if missing:
        found = f"no weights for {len(missing)} tensors, {missing[0]} the first of them"
        raise NoReference(found, "a file that gives every tensor of the class that transformers takes for it")
    return model.eval()


def _growth(verifier: Path) -> int:
    """Bytes in float32 for one byte of the files: 2 where they hold bf16; up to 8 where they hold packed integers."""
    config = read_json_object(verifier / "config.json").value
    return 8 if "quantization_config" in {**config, **text_config(config)} else 2


def _load(verifier: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known_as = KNOWN_AS.get(read_json_object(verifier / "config.json").value.get("model_type", ""))
    if known_as:
        config = CONFIG_MAPPING[known_as].from_pretrained(verifier)
        # the names of its tensors hang on it, and vLLM in this process may have renamed the whole class
        config.model_type = known_as
    else:
        config = AutoConfig.from_pretrained(verifier, **options)
    # transformers 5.19 has most models with a nested text config, kimi_k25 too, under the second name only
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    return auto.from_pretrained(verifier, config=config, dtype=torch.float32, output_loading_info=True, **options)
