"""Which files of a checkpoint folder a server reads, and the tensors in them.

vLLM 0.32.0 decides in vllm/model_executor/model_loader/default_loader.py (_prepare_weights) and weight_utils.py
(filter_duplicate_safetensors_files), SGLang 0.5.23 in srt/model_loader/loader.py and weight_utils.py under the same
names; every file that they read is loaded whole, whatever the index says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle3.formats.json_files import JsonFile, printable, read_json_object, spelled
from eagle3.formats.safetensors_headers import FileHeader, TensorHeader, read_header
from eagle3.problems import Change, InvalidInput, Problem, has_errors, invalid, repairable

INDEX = "model.safetensors.index.json"
# What training said of a few positions (eagle3/formats/parity_probe.py); no server reads it.
PROBE = "parity.probe"
PICKLES = ("*.bin", "*.pt", "*.pth")
VLLM = "vLLM 0.32.0"
MAX_FILES = 4096
MAX_INDEX_BYTES = 8 << 20


@dataclass(frozen=True)
class CheckpointTensors:
    """Every tensor that a server reads from a folder; `files` is empty where the folder holds a config alone."""

    tensors: dict[str, TensorHeader]
    files: tuple[FileHeader, ...]
    problems: tuple[Problem, ...]


def read_checkpoint_tensors(folder: Path, server: str = VLLM) -> CheckpointTensors:
    """The headers of all files that the server reads. Broken files raise; a doubtful choice is among `problems`."""
    problems: list[Problem] = []
    paths = _chosen_files(folder, problems, server)
    files: list[FileHeader] = []
    broken: list[Problem] = []
    for path in paths:
        try:
            files.append(read_header(path))
        except InvalidInput as error:
            broken += error.problems
    if broken:
        raise InvalidInput(*problems, *broken)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                problems.append(_twice(tensor, tensors[tensor.name], server))
            tensors[tensor.name] = tensor
    index = folder / INDEX
    if index.is_file() and not has_errors(problems):
        problems += _index_problems(read_json_object(index, MAX_INDEX_BYTES), tensors, server)
    return CheckpointTensors(tensors, tuple(files), tuple(problems))


def _chosen_files(folder: Path, problems: list[Problem], server: str) -> list[Path]:
    entries = sorted(folder.glob("*.safetensors"))
    every = [path for path in entries if path.is_file()]
    problems += [_no_file(path) for path in entries[:MAX_FILES] if path not in every]
    if not every:
        problems += _pickle_problems(folder)
        return []
    consolidated = [path for path in every if path.name.startswith("consolidated")]
    if consolidated and len(consolidated) < len(every) and server == VLLM:
        why = "it reads consolidated*.safetensors and nothing else"
        problems.append(_ignored(every, consolidated, why, server))
        return consolidated
    if not (folder / INDEX).is_file():
        if [path.name for path in every] == ["consolidated.safetensors", "model.safetensors"]:
            problems.append(_ignored(every, every[1:], "model.safetensors stands beside it", server))
            return every[1:]
        if len(every) > 1:
            problems.append(_no_index(every, server))
        return every[:MAX_FILES]
    named = _files_named_by(read_json_object(folder / INDEX, MAX_INDEX_BYTES), problems)
    missing = sorted(named - {path.name for path in every})
    problems += [_missing_shard(name, server) for name in missing]
    chosen = [path for path in every if path.name in named]
    if len(chosen) < len(every):
        problems.append(_ignored(every, chosen, f"{INDEX} does not name it", server, "warning"))
    return chosen


def _files_named_by(index: JsonFile, problems: list[Problem]) -> set[str]:
    weight_map = index.value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(_bad_index("weight_map", spelled(weight_map), "a map from tensor names to files"))
        return set()
    named = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            problems.append(_bad_index(printable(tensor), spelled(name), "the name of a file in the same folder"))
        else:
            named.add(name)
    return named


def _index_problems(index: JsonFile, tensors: dict[str, TensorHeader], server: str) -> Iterable[Problem]:
    weight_map = index.value["weight_map"]
    for repeated in index.repeated:
        yield _bad_index(printable(repeated.where), spelled(repeated.values), "each name once")
    for name, file in weight_map.items():
        if name not in tensors:
            yield Problem(
                "index-mismatch",
                printable(name),
                f"in {INDEX}, not in {printable(file)}",
                "the tensor in the file that the index names",
                "export the checkpoint again",
                f"{server} reads the files, not the index: the tensor stays missing without a word",
            )
    for name, tensor in tensors.items():
        if name not in weight_map:
            problem = Problem(
                "index-mismatch",
                printable(name),
                f"in {printable(tensor.file.name)}, not in {INDEX}",
                "every tensor in the index",
                "or delete the tensor",
                f"{server} loads it all the same; other readers do not",
                "warning",
            )
            yield repairable(problem, Change("index", INDEX))


def epoch_folders(folder: Path, stage: str) -> list[Path]:
    """The `epoch_N` folders that `stage` wrote, in the order of N; `InvalidInput` where there is none."""
    folders = [path for path in folder.glob("epoch_*") if path.name.removeprefix("epoch_").isdecimal()]
    if not folders:
        raise invalid("no-checkpoint", str(folder), "no epoch_N folder", "one per epoch", f"dvc repro {stage}")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("epoch_")))


def load_signature(folder: Path) -> tuple[object, ...]:
    """All that decides what the load of a checkpoint does: its config, and name, dtype and shape of each tensor."""
    tensors = read_checkpoint_tensors(folder).tensors.values()
    rows = sorted((tensor.file.name, tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return ((folder / "config.json").read_bytes(), *rows)


def _pickle_problems(folder: Path) -> Iterable[Problem]:
    for pattern in PICKLES:
        for path in sorted(folder.glob(pattern))[:1]:
            yield Problem(
                "pickled-weights",
                printable(path.name),
                "weights in a pickle, which runs code when it is read",
                "safetensors",
                "convert it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')",
                "its tensors were not looked at",
                "warning",
            )


def _twice(second: TensorHeader, first: TensorHeader, server: str) -> Problem:
    files = f"{printable(first.file.name)} and {printable(second.file.name)}"
    return Problem(
        "tensor-twice",
        printable(second.name),
        files,
        "one file that holds it",
        "delete the file that is left over",
        f"{server} loads both, and the one that it reads last stays",
    )


def _no_file(path: Path) -> Problem:
    """A link without a target (half of a hub's cache), a folder, a pipe or a device: opening it may never return."""
    found = "a link to nothing" if path.is_symlink() and not path.exists() else "no regular file"
    return Problem(
        "no-file",
        printable(path.name),
        found,
        "a file with tensors",
        "download the checkpoint again, or delete the entry",
        "vLLM 0.32.0 tries to open it and fails, or waits for ever",
    )


def _no_index(paths: list[Path], server: str) -> Problem:
    return Problem(
        "no-index",
        INDEX,
        ", ".join(printable(path.name) for path in paths[:4]) + (", …" if len(paths) > 4 else ""),
        "one file, or shards with an index",
        "delete what does not belong to the checkpoint, or export it again",
        f"{server} loads all of them into one draft",
    )


def _missing_shard(name: str, server: str) -> Problem:
    return Problem(
        "missing-shard",
        printable(name),
        f"in {INDEX}, no such file",
        "every shard of the index",
        "download the rest of the checkpoint",
        f"{server} refuses: weight files referenced in the index are missing",
    )


def _bad_index(where: str, found: str, expected: str) -> Problem:
    return Problem("bad-index", f"{INDEX}: {where}", found, expected, "export the checkpoint again")


def _ignored(every: list[Path], chosen: list[Path], why: str, server: str, severity: str = "error") -> Problem:
    left = [printable(path.name) for path in every if path not in chosen]
    return Problem(
        "ignored-file",
        ", ".join(left[:4]) + (", …" if len(left) > 4 else ""),
        f"a tensor file that {server} does not read",
        "only files that belong to the checkpoint",
        "delete it, or export the checkpoint again",
        f"not loaded, because {why}",
        severity,
    )
