"""speculators' EAGLE-3 model, built from an explicit architecture; the library's silent substitutions are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger as loguru_logger
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.utils.loading import _resolve_key, list_checkpoint_keys
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eagle3.drafts.cpu_draft import CpuEagle3DraftModel
from eagle3.drafts.draft_architecture import DraftArchitecture
from eagle3.drafts.draft_walk import Draft
from eagle3.drafts.vocab_map import read_vocab_map
from eagle3.gpus import device
from eagle3.problems import InvalidInput, Problem
from eagle3.verifiers.verifier import Verifier, text_config

# PreTrainedModel draws weights with this standard deviation, whatever the layer's config says (transformers 5.19).
INITIAL_STD = 0.02

# d2t offsets int64 [K] (verifier id = i + d2t[i]) and t2d bool [V].
Vocabulary = tuple[torch.Tensor, torch.Tensor]


def read_vocabulary(folder: Path, architecture: DraftArchitecture) -> Vocabulary | None:
    """d2t and t2d of data/vocab_map; None where both vocabularies are one, and no map is stored."""
    if architecture.draft_vocab_size == architecture.vocab_size:
        return None
    d2t_K, t2d_V = read_vocab_map(folder)
    return torch.from_numpy(d2t_K), torch.from_numpy(t2d_V)


def build_draft(
    architecture: DraftArchitecture,
    verifier: Verifier,
    vocabulary: Vocabulary | None,
    ttt_steps: int,
    seed: int,
    shards: bool = False,
) -> Eagle3DraftModel:
    """A new draft in float32 on the CPU: trained part drawn from `seed`, frozen part copied from the verifier.

    shards: it will be dealt out to several processes.

    The library would replace a missing head by the
    embedding and a missing final norm by ones (speculators 0.9.0 model.py:166, utils/loading.py); both are refused.
    """
    _require_verifier_tensors(verifier)
    _register_type(verifier.config["model_type"])
    loguru_logger.disable("speculators.utils.loading")  # says at INFO and WARNING which file it opens
    torch.manual_seed(seed)
    d2t_K, t2d_V = vocabulary or (None, None)
    model = draft_class(shards).from_training_args(
        layer_config(architecture), t2d=t2d_V, d2t=d2t_K, **training_arguments(architecture, verifier.path, ttt_steps)
    )
    broken = [name for name, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    assert not broken, f"not finite after loading: {broken}"
    return model


def training_arguments(architecture: DraftArchitecture, verifier: Path, ttt_steps: int) -> dict[str, Any]:
    """What `from_training_args` is told beside the decoder and the vocabulary map."""
    return {
        "draft_vocab_size": architecture.draft_vocab_size,
        "norm_before_residual": architecture.norm_before_residual,
        "norm_before_fc": architecture.norm_before_fc,
        "fc_norm": architecture.fc_norm,
        "norm_output": architecture.norm_output,
        "embed_requires_grad": False,
        "target_layer_ids": list(architecture.aux_layer_ids),
        "verifier_name_or_path": str(verifier),
        "ttt_steps": ttt_steps,
        "draft_attn_impl": "simple_flex_attention" if torch.cuda.is_available() else "sdpa",
        "trust_remote_code": False,
    }


def draft_class(shards: bool = False) -> type[Eagle3DraftModel]:
    """On a CPU, the same model with a forward that leaves out what nothing depends on.

    Not where it is dealt out: FSDP gathers weights when a layer is called, and that forward reads them without a call.
    """
    return Eagle3DraftModel if shards or torch.cuda.is_available() else CpuEagle3DraftModel


def layer_config(architecture: DraftArchitecture) -> LlamaConfig:
    """The decoder of the draft as transformers describes it. bos and eos are the verifier's; no row is padded."""
    return LlamaConfig(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        hidden_act=architecture.hidden_act,
        max_position_embeddings=architecture.max_position_embeddings,
        initializer_range=INITIAL_STD,
        rms_norm_eps=architecture.rms_norm_eps,
        rope_parameters=dict(architecture.rope_parameters),
        attention_bias=architecture.attention_bias,
        attention_dropout=0.0,
        mlp_bias=architecture.mlp_bias,
        sliding_window=architecture.sliding_window,
        use_sliding_window=architecture.sliding_window is not None,
        layer_types=architecture.layer_types,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=architecture.bos_token_id,
        eos_token_id=architecture.eos_token_id,
    )


def _require_verifier_tensors(verifier: Verifier) -> None:
    """Look the names up as the library will (utils/loading.py), and refuse what it would replace in silence."""
    keys = dict.fromkeys(list_checkpoint_keys(verifier.path), "")
    names = ["embed_tokens.weight", "model.norm.weight"]
    if not verifier.text_config.get("tie_word_embeddings", verifier.config.get("tie_word_embeddings")):
        names.append("lm_head.weight")
    problems = [
        Problem(
            "verifier-tensor",
            name,
            "not among the verifier's safetensors",
            "the unquantised tensor",
            "choose a verifier that stores it",
            "speculators 0.9.0 would put another tensor, or ones, in its place",
        )
        for name in names
        if not _own_tensor(_resolve_key(name, keys))
    ]
    if problems:
        raise InvalidInput(*problems)


class _AsWritten(PreTrainedConfig):
    """The values of a config.json, those of the language model where it is nested."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(text_config(config_dict), **kwargs)


def _register_type(model_type: str) -> None:
    """The library asks transformers for the verifier's hidden size and layers: also of a type that is not there."""
    if model_type not in CONFIG_MAPPING:  # kimi_k2, and what comes with code of its own
        AutoConfig.register(model_type, type("AsWritten", (_AsWritten,), {"model_type": model_type}))


def _own_tensor(key: str | None) -> bool:
    """The library's search by suffix takes a layer's `input_layernorm.weight` for a missing final `norm.weight`."""
    return key is not None and "layers." not in key


def draft_steps(model: Eagle3DraftModel) -> Draft:
    """`model` as the walk wants it: a batch without targets and a number of steps -> draft ids [1, T] per step."""

    def draft(batch: dict[str, torch.Tensor], steps: int) -> Sequence[torch.Tensor]:
        place = device()
        moved = {name: tensor.to(place) for name, tensor in batch.items()}
        with torch.no_grad(), torch.autocast(place.type, dtype=torch.bfloat16):
            drafted: Sequence[torch.Tensor] = model.eval()(**moved, ttt_steps=steps)
        return drafted

    return draft
