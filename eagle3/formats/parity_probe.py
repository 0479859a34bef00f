"""parity.probe beside a checkpoint: hidden states and tokens, and the logits that the draft in training had for them.

D documents, N positions of all of them, P positions that a round looks at, S unrolled steps, A aux layers, H hidden, K
draft vocabulary. A safetensors file under a name that no server takes for weights:

    aux_states   [N, A*H] bfloat16   the verifier's states, side by side in ascending order of layer
    input_ids    [N] int64           the token after each state; step s of position p reads input_ids[p + s]
    embeddings   [N, H] bfloat16     of these tokens, for a checkpoint that leaves the verifier's embedding out
    offsets      [D + 1] int64       document d is positions offsets[d] .. offsets[d + 1] - 1
    starts       [P] int64           ascending; every step of each stays inside its document
    logits       [S, P, K] float32
    token_ids    [K] int64           which verifier token each row of the draft's head proposes
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3.atomic_files import atomic_path
from eagle3.problems import InvalidInput, invalid


@dataclass(frozen=True)
class ParityProbe:
    aux_states: torch.Tensor
    input_ids: torch.Tensor
    embeddings: torch.Tensor
    offsets: torch.Tensor
    starts: torch.Tensor
    logits: torch.Tensor
    token_ids: torch.Tensor

    def begins(self) -> torch.Tensor:
        """First position of the document of each start, [P]."""
        return self.offsets[torch.searchsorted(self.offsets, self.starts, right=True) - 1]


def write_probe(path: Path, probe: ParityProbe) -> None:
    assert not _fault(probe), _fault(probe)
    with atomic_path(path) as partial:
        save_file({item.name: getattr(probe, item.name).contiguous() for item in fields(probe)}, partial)


def read_probe(path: Path) -> ParityProbe:
    """`InvalidInput` where the file is missing, damaged or not what this module writes."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, f"{type(error).__name__}: {error}") from None
    if set(tensors) != {item.name for item in fields(ParityProbe)}:
        raise _unusable(path, f"the tensors {sorted(tensors)}")
    probe = ParityProbe(**tensors)
    if fault := _fault(probe):
        raise _unusable(path, fault)
    return probe


def _fault(probe: ParityProbe) -> str:
    """What makes it no probe, or nothing."""
    whole = {name: getattr(probe, name) for name in ("input_ids", "offsets", "starts", "token_ids")}
    if any(tensor.dtype != torch.int64 or tensor.ndim != 1 or not len(tensor) for tensor in whole.values()):
        return "input_ids, offsets, starts or token_ids that are not int64 [.]"
    for name in ("aux_states", "embeddings"):
        tensor = getattr(probe, name)
        if tensor.ndim != 2 or len(tensor) != len(probe.input_ids):
            return f"{name} {list(tensor.shape)} for {len(probe.input_ids)} tokens"
    if probe.logits.ndim != 3 or probe.logits.shape[1:] != (len(probe.starts), len(probe.token_ids)):
        return (
            f"logits {list(probe.logits.shape)} for {len(probe.starts)} starts, {len(probe.token_ids)} rows of a head"
        )
    for name, dtype in (("aux_states", torch.bfloat16), ("embeddings", torch.bfloat16), ("logits", torch.float32)):
        tensor = getattr(probe, name)
        if tensor.dtype != dtype or not bool(tensor.isfinite().all()):
            return f"{name} that are not finite numbers of {dtype}"
    offsets = probe.offsets.tolist()
    if offsets[0] != 0 or offsets[-1] != len(probe.input_ids) or offsets != sorted(set(offsets)):
        return f"offsets {offsets}"
    last = probe.starts + len(probe.logits)
    inside = (probe.starts >= 0) & (last <= offsets[-1])
    if not bool(inside.all()):
        return "starts outside the documents"
    ends = probe.offsets[torch.searchsorted(probe.offsets, probe.starts, right=True)]
    return "" if bool((last <= ends).all()) else "steps that leave their document"


def _unusable(path: Path, found: str) -> InvalidInput:
    return invalid(
        "parity-probe",
        str(path),
        found,
        "hidden states, tokens and the logits of training, as the train stage writes them",
        "dvc repro -f train   (or, without the proof: dvc exp run -S simulate_weight_load.engine_level=off)",
        "nothing would show that the server computes what was trained",
    )
