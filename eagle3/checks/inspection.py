"""`eagle3 inspect DIR`: one screen that says what a checkpoint is, whoever wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.config_check import Verdict, judged_config
from eagle3.checks.draft_config import DraftConfig
from eagle3.formats.checkpoint_files import read_checkpoint_tensors
from eagle3.formats.json_files import printable, read_json_object, spelled
from eagle3.formats.safetensors_headers import TensorHeader, num_bytes
from eagle3.problems import InvalidInput
from eagle3.verifiers.verifier_config import VerifierConfig

CLASSES = {"llama": "a Llama decoder", "qwen3": "a Qwen3 decoder", "mla": "a DeepSeek decoder with latent attention"}


def inspection(folder: Path, verifier: VerifierConfig | None = None) -> dict[str, str]:
    """Label -> text, in the order of the screen; `InvalidInput` where the folder holds no config that can be read.

    A checkpoint that is broken is described as far as it can be; the last row says what `check` finds.
    """
    file = read_json_object(folder / "config.json")
    checkpoint = read_checkpoint_tensors(folder)
    verdict, _ = check_checkpoint(folder, verifier)
    config = judged_config(file, checkpoint.tensors, verifier, Verdict())
    rows = {"checkpoint": printable(str(folder)), "classes": spelled(file.value.get("architectures"))}
    if config:
        rows |= _config_rows(config)
    rows |= _tensor_rows(checkpoint.tensors, len(checkpoint.files))
    rows |= _release_rows(folder)
    errors = sum(problem.severity == "error" for problem in verdict.problems)
    rows["check"] = f"{verdict.verdict}: {errors} errors, {len(verdict.problems) - errors} warnings (eagle3 check DIR)"
    return rows


def _config_rows(config: DraftConfig) -> dict[str, str]:
    raw = config.raw
    heads = (
        f"{config.num_attention_heads} heads ({config.num_key_value_heads} for keys and values) of {config.head_dim}"
    )
    layers = f"{config.num_hidden_layers} layer" + "s" * (config.num_hidden_layers != 1)
    rope = raw.get("rope_parameters") or {key: raw[key] for key in ("rope_theta", "rope_scaling") if key in raw}
    return {
        "format": "nested, as speculators writes it" if config.nested else "flat",
        "decoder": f"{layers}, {CLASSES[config.variant]}: {config.hidden_size} wide, ffn {config.intermediate_size}",
        "attention": heads if config.variant != "mla" else f"{config.num_attention_heads} heads, latent",
        "positions": f"{spelled(raw.get('max_position_embeddings'))}, rope {spelled(rope, 120)}",
        "window": spelled(raw.get("sliding_window"))
        if "sliding_attention" in _texts(raw.get("layer_types"))
        else "full",
        "vocabulary": f"{config.draft_vocab_size} of the verifier's {config.vocab_size} tokens",
        "aux states": _aux(config),
        "norms": ", ".join(
            f"{name} {'not written' if value is None else spelled(value)}"
            for name, value in (
                ("before fc", config.norm_before_fc),
                ("fc_norm", config.fc_norm),
                ("output", raw.get("norm_output")),
                ("before residual", raw.get("norm_before_residual")),
            )
        ),
        "quantised": "yes" if config.quantized else "no",
    }


def _aux(config: DraftConfig) -> str:
    """Both lists, each in the numbering that its reader gives it."""
    lists = []
    if config.ids:
        lists.append(f"{list(config.ids)} (states entering these layers)")
    if config.nested_ids:
        lists.append(f"{list(config.nested_ids)} in eagle_config (outputs of these layers, to SGLang)")
    return f"{config.num_aux}: {'; '.join(lists) or 'no ids written, the server takes its own'}"


def _tensor_rows(tensors: Mapping[str, TensorHeader], files: int) -> dict[str, str]:
    if not tensors:
        return {"tensors": "none in the folder"}
    sizes = [num_bytes(tensor.dtype, tensor.shape) for tensor in tensors.values()]
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    own = [
        f"{what}: {'its own' if any(word in name for name in tensors) else 'none, shared with the verifier'}"
        for what, word in (("embedding", "embed_tokens"), ("head", "lm_head"))
    ]
    kinds = ", ".join(f"{count} {printable(dtype)}" for dtype, count in sorted(dtypes.items()))
    return {
        "tensors": f"{len(tensors)} in {files} files, {sum(sizes):,} bytes: {kinds}",
        "embedding, head": "; ".join(own),
    }


def _release_rows(folder: Path) -> dict[str, str]:
    """What provenance.json says, unverified; a folder of another origin has none."""
    if not (folder / "provenance.json").is_file():
        return {}
    try:
        made = read_json_object(folder / "provenance.json", 64 << 20).value
        served = float(made["metrics"]["served"]["acceptance_length"])
        told = f"{spelled(made['verifier']['source'], 80)}, epoch {spelled(made['epoch'])}, acceptance {served:.3f}"
    except (InvalidInput, KeyError, TypeError, ValueError):
        return {"released for": "provenance.json cannot be read: eagle3 trace DIR"}
    return {"released for": f"{told} (eagle3 trace DIR verifies it)"}


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
