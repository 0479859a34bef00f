"""Where a verifier keeps its embedding and its head: found in the headers of the one or two shards that hold them.

Light: the standard library. A verifier of a trillion weights has some hundred thousand tensors; only its index and the
headers of the shards that the index names for these two are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle3.formats.checkpoint_files import INDEX
from eagle3.formats.json_files import printable, read_json_object
from eagle3.formats.safetensors_headers import TensorHeader, read_header
from eagle3.verifiers.verifier_config import VerifierConfig

# Kimi-K2.5's index has some 12 MB; a tenth of the memory of what it describes is no attack.
MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 1024
# The names that vLLM 0.32.0 shares by (`embed_tokens` or `embedding`), and those of other families (speculators#1156).
EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embedding.weight", "wte.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
# Layers of their own (multi-token prediction), and other modalities, have embeddings too.
OTHERS = ("layers.", "mtp", "visual", "vision", "audio", "position", "patch")


@dataclass(frozen=True)
class VerifierTensors:
    """The two tensors, None where there is none; `why` says for which reason one is missing. tied: head = embedding."""

    embedding: TensorHeader | None
    head: TensorHeader | None
    tied: bool
    why: str


def find_verifier_tensors(folder: Path, config: VerifierConfig) -> VerifierTensors:
    """The verifier's embedding [V, H] and head [V, H] in `folder`.

    `InvalidInput` for a file that is broken. A head that is not stored is the embedding where the config ties them.
    """
    hidden_size = config.hidden_size
    files, why = _files(folder)
    tensors = [tensor for path in files for tensor in read_header(path).tensors]
    matrices = [each for each in tensors if len(each.shape) == 2 and hidden_size in (None, each.shape[1])]
    embedding, head = _named(matrices, EMBEDDINGS), _named(matrices, HEADS)
    tied = head is None and config.tied
    if embedding is None and not why:
        why = f"no tensor named like {EMBEDDINGS[0]} with {hidden_size} columns among the verifier's"
        why += f"; candidates: {_candidates(matrices)}"
    elif head is None and not tied and not why:
        why = "the verifier's folder holds no lm_head and its config does not tie it to the embedding"
    return VerifierTensors(embedding, embedding if tied else head, tied, why)


def _files(folder: Path) -> tuple[list[Path], str]:
    """The shards that hold the two tensors: those that the index names for them, else every file."""
    index = folder / INDEX
    if not index.is_file():
        every = sorted(path for path in folder.glob("*.safetensors") if path.is_file())[:MAX_FILES]
        return every, "" if every else "the verifier's folder holds no *.safetensors"
    weight_map = read_json_object(index, MAX_INDEX_BYTES).value.get("weight_map")
    entries = weight_map.items() if isinstance(weight_map, dict) else ()
    names = sorted({str(file) for tensor, file in entries if tensor.endswith((*EMBEDDINGS, *HEADS))})
    if any("/" in name or "\\" in name for name in names):
        return [], "the verifier's index names files in other folders"
    missing = [name for name in names if not (folder / name).is_file()]
    files = [folder / name for name in names if name not in missing]
    return files, f"no such file: {printable(missing[0])}, a shard of the verifier" if missing else ""


def _named(matrices: Iterable[TensorHeader], endings: tuple[str, ...]) -> TensorHeader | None:
    """The matrix with such a name that belongs to the text model itself; the most usual ending, the shortest name."""
    found = [
        (index, len(each.name), each.name, each)
        for each in matrices
        for index, ending in enumerate(endings)
        if (each.name == ending or each.name.endswith(f".{ending}")) and not any(part in each.name for part in OTHERS)
    ]
    return min(found, key=lambda each: each[:3])[3] if found else None


def _candidates(matrices: list[TensorHeader]) -> str:
    rows = sorted(matrices, key=lambda each: -each.shape[0])[:3]
    return ", ".join(f"{printable(each.name, 60)} {list(each.shape)}" for each in rows) or "none"
