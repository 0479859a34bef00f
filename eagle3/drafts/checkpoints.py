"""data/checkpoints/epoch_N: speculators' nested config and two safetensors shards, one of them the same in every epoch.

config.json                    names the verifier as params.yaml does, never a path of this machine
model-frozen.safetensors       embed_tokens, lm_head, d2t, t2d: copies of the verifier's, stored once by DVC
model-trained.safetensors      the rest
model.safetensors.index.json   tensor -> file
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.atomic_files import link_or_copy, write_json
from eagle3.file_faults import naming

FROZEN, TRAINED, INDEX = "model-frozen.safetensors", "model-trained.safetensors", "model.safetensors.index.json"
FROZEN_TENSORS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
# The verifier's own norm and head, which the training model holds to compute its targets.
NOT_SAVED = ("verifier_lm_head.weight", "verifier_norm.weight")


def epoch_folder(folder: Path, epoch: int) -> Path:
    return folder / f"epoch_{epoch}"


def nested_config(model: Any, source: str) -> dict[str, Any]:
    """The config of a speculators model, made independent of this machine.

    `auto_map` names a config.py that the library would copy beside it; `dtype` is that of the file, not of training.
    """
    config = json.loads(model.config.to_json_string())
    config.pop("auto_map", None)
    config["architectures"] = ["Eagle3DraftModel"]
    config["dtype"] = "bfloat16"
    config["speculators_config"]["verifier"]["name_or_path"] = source
    return config


def write_epoch(folder: Path, epoch: int, model: Any, source: str) -> Path:
    """Write one epoch's checkpoint, floats as bfloat16; the frozen shard is linked from the first epoch's.

    What a killed run has left in its place is removed.
    """
    place = epoch_folder(folder, epoch)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    state = {name: _stored(tensor) for name, tensor in model.state_dict().items() if name not in NOT_SAVED}
    frozen = {name: state.pop(name) for name in FROZEN_TENSORS if name in state}
    first = epoch_folder(folder, 0) / FROZEN
    if first.exists():
        link_or_copy(first, place / FROZEN)
    else:
        _save(frozen, place / FROZEN)
    _save(state, place / TRAINED)
    files = {**dict.fromkeys(frozen, FROZEN), **dict.fromkeys(state, TRAINED)}
    total = sum(tensor.numel() * tensor.element_size() for tensor in (*frozen.values(), *state.values()))
    write_json(place / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    write_json(place / "config.json", nested_config(model, source))
    return place


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with naming(path):
        save_file(tensors, path, metadata={"format": "pt"})


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
