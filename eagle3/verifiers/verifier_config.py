"""What a draft's rules need to know of its verifier: a few fields of its config.json, those that are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.formats.json_files import printable, read_json_object, spelled
from eagle3.problems import InvalidInput, Problem

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads")


@dataclass(frozen=True)
class VerifierConfig:
    """None stands for a field that the config does not have. layer_types: one name a layer, or empty."""

    hidden_size: int | None
    vocab_size: int | None
    num_hidden_layers: int | None
    max_position_embeddings: int | None
    dtype: str | None
    layer_types: tuple[str, ...]
    rotated: bool
    tied: bool
    architectures: tuple[str, ...] = ()
    num_attention_heads: int | None = None


def read_verifier_config(path: Path) -> VerifierConfig:
    """From a model's folder or its config.json; `InvalidInput` where a size is no positive integer."""
    file = read_json_object(path / "config.json" if path.is_dir() else path)
    return parse_verifier_config(file.value)


def parse_verifier_config(raw: dict[str, Any]) -> VerifierConfig:
    """Nested configs (`text_config`, as in multimodal models) count as vLLM counts them: the text model's."""
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    problems = [
        Problem("verifier-config", f"verifier: {name}", spelled(text[name]), "a positive integer", "correct it")
        for name in SIZES
        if text.get(name) is not None and not (type(text[name]) is int and text[name] > 0)
    ]
    if problems:
        raise InvalidInput(*problems)
    dtype = next(
        (each[key] for each in (text, raw) for key in ("dtype", "torch_dtype") if _is_text(each.get(key))), None
    )
    layer_types, names = text.get("layer_types"), raw.get("architectures")
    quantization = spelled(raw.get("quantization_config") or text.get("quantization_config"), 1 << 20).lower()
    return VerifierConfig(
        hidden_size=text.get("hidden_size"),
        vocab_size=text.get("vocab_size"),
        num_hidden_layers=text.get("num_hidden_layers"),
        max_position_embeddings=text.get("max_position_embeddings"),
        dtype=dtype and printable(dtype),
        layer_types=tuple(map(str, layer_types)) if isinstance(layer_types, list) else (),
        # the text config's word counts where both have one; transformers' default of most families is false
        tied=text.get("tie_word_embeddings", raw.get("tie_word_embeddings")) is True,
        architectures=tuple(map(str, names)) if isinstance(names, list) else (),
        num_attention_heads=text.get("num_attention_heads"),
        rotated=any(word in quantization for word in ("spinquant", "quarot", "hadamard")),
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
