"""Training that starts from the weights of an existing draft, in any form whose load this project can judge.

The draft must be the one that params.yaml describes: every number that changes what it computes, the names and shapes
of its tensors, and the vocabulary that its head's rows mean. The head and the embedding stay the verifier's, as in all
training here; how far the draft's own differ is recorded, and its acceptance before the first step is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3.atomic_files import sha256_of, sha256_of_json
from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.config_check import Verdict, judged_config
from eagle3.checks.draft_config import DraftConfig
from eagle3.drafts.draft_architecture import DraftArchitecture, verifier_rope
from eagle3.drafts.draft_model import Vocabulary
from eagle3.formats.checkpoint_files import read_checkpoint_tensors
from eagle3.formats.config_formats import canonical
from eagle3.formats.json_files import read_json_object, spelled
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.verifiers.verifier_config import VerifierConfig

FROZEN = ("embed_tokens.weight", "lm_head.weight")
SILENT = "training would begin with another function than the draft had, and nothing but the accuracy would show it"


@dataclass(frozen=True)
class ExistingDraft:
    """A draft on disk that every rule of the server lets pass; `tensors` under the names that vLLM gives them."""

    folder: Path
    sha256: str
    config: DraftConfig
    tensors: dict[str, TensorHeader]

    def tensor(self, name: str) -> torch.Tensor:
        header = self.tensors[name]
        with safe_open(header.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(header.name)
        return tensor


def read_existing_draft(place: str, sha256: str | None, verifier: VerifierConfig) -> ExistingDraft:
    """The draft in the folder `place` (relative to the repository), identified by every byte of config and tensors.

    Raises `InvalidInput` for whatever the checks of `eagle3 check` call an error, and for another digest than `sha256`.
    """
    folder = Path(os.environ.get("DVC_ROOT", "."), place).absolute()
    if not (folder / "config.json").is_file():
        expected = "the folder of a draft, with a config.json"
        raise invalid("warm-start", "train.warm_start", f"no {place}/config.json", expected, "name another folder")
    checkpoint = read_checkpoint_tensors(folder)
    digest = sha256_of_json(
        {path.name: sha256_of(path) for path in (folder / "config.json", *(file.path for file in checkpoint.files))}
    )
    if digest != sha256:
        raise invalid(
            "warm-start",
            "train.warm_start_sha256",
            f"{sha256 or 'null'}, and {place} is {digest}",
            "the digest of the draft, since DVC does not track the folder",
            f"dvc exp run -S train.warm_start={place} -S train.warm_start_sha256={digest}",
            "another draft in the same folder would not be noticed",
        )
    verdict, _ = check_checkpoint(folder, verifier)
    errors = [problem for problem in verdict.problems if problem.severity == "error"]
    if errors:
        raise InvalidInput(*errors)
    config = judged_config(read_json_object(folder / "config.json"), checkpoint.tensors, verifier, Verdict())
    assert config is not None, "it had no error"
    tensors = {canonical(name): header for name, header in checkpoint.tensors.items()}
    return ExistingDraft(folder, digest, config, tensors)


def start_from(
    draft: ExistingDraft, model: torch.nn.Module, architecture: DraftArchitecture, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """Put the draft's weights into `model`, and say for the manifest what was taken; `InvalidInput` on any mismatch."""
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    problems = [
        *_architecture_problems(draft.config, architecture),
        *_name_problems(draft, trained),
        *_map_problems(draft, vocabulary),
    ]
    if problems:
        raise InvalidInput(*problems)
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(draft.tensor(name))
    frozen = dict(model.named_parameters())
    own = {
        f"other_rows_of_{name.split('.')[0]}": _other_rows(draft.tensor(name), frozen[name])
        for name in FROZEN
        if name in draft.tensors
    }
    return {"sha256": draft.sha256, "format": "nested" if draft.config.nested else "flat", **own}


def _other_rows(found: torch.Tensor, ours: torch.Tensor) -> int:
    """Rows of the draft's own head or embedding that are not the verifier's to bfloat16."""
    return int((found.bfloat16() != ours.detach().cpu().bfloat16()).any(1).sum())


def _architecture_problems(config: DraftConfig, ours: DraftArchitecture) -> Iterator[Problem]:
    for name, theirs in stated(config).items():
        wanted = getattr(ours, name)
        if theirs != (list(wanted) if isinstance(wanted, tuple) else wanted):
            section = {"aux_layer_ids": "extract", "draft_vocab_size": "vocab_map"}.get(name, "draft")
            yield Problem(
                "warm-start",
                f"{section}.{name}",
                f"{spelled(wanted)}, and {spelled(theirs)} in the draft to start from",
                "one value",
                f"dvc exp run -S '{section}.{name}={spelled(theirs)}', or start from another draft",
                SILENT,
            )


def stated(config: DraftConfig) -> dict[str, Any]:
    """What vLLM 0.32.0 computes from the draft's config, under the names of `DraftArchitecture`, defaults filled in."""
    raw = config.raw
    same = (
        *("hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "mlp_bias", "norm_before_fc", "fc_norm"),
    )
    windowed = "sliding_attention" in (raw.get("layer_types") or ())
    return {
        **{name: getattr(config, name) for name in same},
        "attention_bias": config.qkv_bias,
        "hidden_act": raw.get("hidden_act", "silu"),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_parameters": verifier_rope(raw) or {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": raw.get("sliding_window") if windowed else None,
        "norm_before_residual": raw.get("norm_before_residual", config.nested),
        "norm_output": raw.get("norm_output", False),
        # where no list says which layers were captured, the walk before the first step tells
        **({"aux_layer_ids": list(config.ids)} if config.ids else {}),
    }


def _name_problems(draft: ExistingDraft, trained: dict[str, torch.Tensor]) -> Iterator[Problem]:
    """Tensors of another draft: vLLM's classes have a hidden_norm in every layer and use that of the first alone."""
    known = {*trained, *FROZEN, "d2t", "t2d"}
    unused = {name for name in draft.tensors if name.endswith(".hidden_norm.weight")}
    for name in sorted(set(trained) ^ (set(draft.tensors) - (known - set(trained)) - (unused - set(trained)))):
        found = "no such tensor" if name in trained else "a tensor that this draft has not"
        yield _mismatch(name, found, "the tensors of the draft that params.yaml describes")
    for name in sorted(set(trained) & set(draft.tensors)):
        if draft.tensors[name].shape != tuple(trained[name].shape):
            yield _mismatch(name, str(list(draft.tensors[name].shape)), str(list(trained[name].shape)))


def _map_problems(draft: ExistingDraft, vocabulary: Vocabulary | None) -> Iterator[Problem]:
    ours = None if vocabulary is None else vocabulary[0]
    theirs = draft.tensor("d2t").long() if "d2t" in draft.tensors else None
    if (ours is None) != (theirs is None):
        found = "no map" if theirs is None else "a map"
        yield _mismatch("d2t", found, "a map" if theirs is None else "no map: the whole vocabulary is drafted")
    elif ours is not None and theirs is not None and not torch.equal(ours, theirs):
        size = min(len(ours), len(theirs))
        other = int((ours[:size] != theirs[:size]).sum()) + abs(len(ours) - len(theirs))
        yield _mismatch("d2t", f"{other} of {len(ours)} rows that mean other tokens", "the map in data/vocab_map")


def _mismatch(name: str, found: str, expected: str) -> Problem:
    return Problem("warm-start", name, found, expected, "start from a draft of the same kind", SILENT)
