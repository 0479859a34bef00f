"""`eagle3 estimate`: disk, memory and time that the long stages need, against what this machine has.

Sizes are arithmetic on params.yaml and the verifier's config; times come from the last runs here. No weight is loaded.
Once data/samples is there, its shards are planned as the stage extract plans them, and judged by the same function.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic_files import nearest
from eagle3.checks.draft_config import parse_draft_config
from eagle3.checks.expected_tensors import expected_parameters
from eagle3.closing_table import clock, last_runs
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.formats.json_files import printable, read_json_object
from eagle3.layer_ids import aux_layer_id_problems
from eagle3.manifests import read_manifest
from eagle3.params import Params
from eagle3.problems import InvalidInput, Problem, invalid
from eagle3.stage_guard import ROOM_FOR_THE_RECORD, scratch_home
from eagle3.states.shard_plan import Shard, planned_extraction
from eagle3.states.shard_scratch import bytes_to_clean, space_problems, writings
from eagle3.states.store_dtypes import bytes_per_token
from eagle3.verifiers.verifier_config import parse_verifier_config

BF16, FLOAT32 = 2, 4
# Adam keeps two moments and a gradient beside each trained weight.
BYTES_PER_TRAINED_WEIGHT = 4 * FLOAT32
# What a token of a sample takes in memory (an id, a value of the mask), and a sample beside them.
BYTES_PER_TOKEN, BYTES_PER_SAMPLE = 5, 600
FROZEN = ("embed_tokens.weight", "lm_head.weight")
# Where a finished stage, or the user, has put the verifier's config.
CONFIGS = (Path("data/configs/verifier.json"), Path("data/checkpoints/verifier_config.json"))
SAMPLES = Path("data/samples")
ON_TOP = "; the engine's memory comes on top"
# Of extract and train: what the estimated memory holds, and what makes it less.
HELD = (
    ("all samples", "sample.max_train"),
    ("weights and optimizer", "vocab_map.draft_vocab_size or draft.intermediate_size"),
)
Json = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """What one stage needs: bytes it writes, bytes of memory (0 = not estimated), seconds (None = never run here).

    output: bytes of all it puts into data/, of which `disk` are not there yet. freed: bytes it deletes first.
    """

    stage: str
    disk: int
    memory: int
    seconds: float | None
    how: str
    output: int
    freed: int = 0


def estimate(params: Params, verifier: Path | None) -> list[Need]:
    """The needs of extract and train; `InvalidInput` for layers that the verifier has not, or without its config."""
    config = _verifier_config(params, verifier)
    if problems := list(aux_layer_id_problems(params.extract.aux_layer_ids, config["num_hidden_layers"])):
        raise InvalidInput(*problems)
    rates = last_runs(scratch_home() / "runs.jsonl")
    tokens, extract = _extract_need(params, config, rates.get("extract"))
    trained, frozen = _draft_weights(params, config)
    checkpoints = params.train.epochs * params.train.checkpoints_per_epoch
    disk = (frozen + trained * checkpoints) * BF16
    memory = trained * BYTES_PER_TRAINED_WEIGHT + (frozen + config["vocab_size"] * config["hidden_size"]) * FLOAT32
    seconds = _seconds(tokens * params.train.epochs, rates.get("train"))
    how = f"{trained:,} trained and {frozen:,} frozen weights, {checkpoints} checkpoints; activations come on top"
    return [extract, Need("train", disk, memory, seconds, how, disk)]


def _extract_need(params: Params, config: Json, last_run: Json | None) -> tuple[int, Need]:
    """(tokens of all samples, need): of the shards that data/samples gives, else the most that the budgets allow."""
    ids, dtype = params.extract.aux_layer_ids, params.extract.store_dtype
    per_token = bytes_per_token(dtype, len(ids) + 1, config["hidden_size"])
    states = f"{per_token:,} bytes: {len(ids) + 1} states of {config['hidden_size']} {dtype} numbers"
    if not (SAMPLES / "manifest.json").is_file():
        sample = params.sample
        num_samples = sample.max_train + sample.max_val + sample.max_eval
        most = num_samples * sample.max_model_len
        how, held = f"{most:,} tokens at most x {states}{ON_TOP}", samples_memory(num_samples, most)
        return most, Need("extract", most * per_token, held, _seconds(most, last_run), how, most * per_token)
    shards, home = _planned(params, config), scratch_home() / "extract"
    missing = [shard for shard in shards if not (home / shard.name).exists()]
    tokens, new = (sum(shard.num_tokens for shard in each) for each in (shards, missing))
    made = f"{len(shards) - len(missing)} of {len(shards)} shards are made"
    how = f"{tokens:,} tokens in data/samples x {states}; {made}{ON_TOP}"
    held = samples_memory(sum(len(shard.samples) for shard in shards), tokens)
    disk, output = (sum(shard.num_bytes for shard in each) for each in (missing, shards))
    return tokens, Need("extract", disk, held, _seconds(new, last_run), how, output, bytes_to_clean(home, shards))


def samples_memory(num_samples: int, num_tokens: int) -> int:
    """Bytes: extract holds all samples from begin to end (`eagle3.sampling.samples.Sample`)."""
    return num_samples * BYTES_PER_SAMPLE + num_tokens * BYTES_PER_TOKEN


def _planned(params: Params, config: Json) -> list[Shard]:
    """The shards as the stage will plan them, with the verifier that the samples name."""
    from eagle3.sampling.samples import read_samples

    made = read_manifest(SAMPLES, "sample")
    return planned_extraction(read_samples(SAMPLES), made, config, params.extract, params.engines.vllm)


def _verifier_config(params: Params, given: Path | None) -> Json:
    source = Path(params.verifier.source).expanduser()
    paths = [given / "config.json" if given and given.is_dir() else given, source / "config.json", *CONFIGS]
    path = next((path for path in paths if path is not None and path.is_file()), None)
    if path is None:
        raise invalid(
            "no-verifier-config",
            "verifier.source",
            f"{printable(params.verifier.source)}: no config.json here, and no stage has left one",
            "the verifier's sizes",
            "eagle3 estimate --verifier DIR   (a folder with the verifier's config.json, or that file)",
        )
    raw = read_json_object(path).value
    parse_verifier_config(raw)
    config: Json = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    if missing := [name for name in ("hidden_size", "vocab_size", "num_hidden_layers") if name not in config]:
        found, fix = f"no {' and no '.join(missing)}", "eagle3 estimate --verifier DIR"
        raise invalid("verifier-config", printable(str(path)), found, "the verifier's sizes", fix)
    return config


def _draft_weights(params: Params, config: Json) -> tuple[int, int]:
    """(trained, frozen) weights of the draft, from the table of parameters that the server has for it."""
    architecture = resolve_architecture(
        params.draft, config, params.vocab_map.draft_vocab_size, params.extract.aux_layer_ids
    )
    raw = {**architecture.as_dict(), "num_aux_hidden_states": len(params.extract.aux_layer_ids)}
    draft = parse_draft_config({key: value for key, value in raw.items() if value is not None}, "llama", False)
    trained = frozen = 0
    for parameter in expected_parameters(draft, architecture.vocab_size):
        for part in parameter.parts:
            size = 1
            for length in part.shape:
                size *= length
            if part.name in FROZEN or parameter.integer:
                frozen += size
            else:
                trained += size
    return trained, frozen


def _seconds(tokens: int, run: Json | None) -> float | None:
    """At the rate of the last run here, the one-off seconds of loading counted in."""
    rate = (run or {}).get("tokens_per_second")
    return tokens / rate if isinstance(rate, (int, float)) and rate > 0 else None


def shortages(needs: list[Need], memory: int) -> Iterator[Problem]:
    """What this machine has too little of: where extract will refuse to start, by its own judgement, and what train
    would not find. memory in bytes.
    """
    extract, train = needs
    home = scratch_home()
    refused = list(space_problems(home / "extract", extract.disk, extract.output, extract.how, extract.freed))
    yield from refused
    taken = {nearest(home / "extract").stat().st_dev: -extract.freed}
    for writing in writings(home / "extract", extract.disk, extract.output):
        taken[writing.disk] = taken.get(writing.disk, 0) + writing.num_bytes
    for writing in [] if refused else writings(home / "train", train.disk, train.output):
        free = shutil.disk_usage(writing.where).free - taken.get(writing.disk, 0)
        if writing.num_bytes + ROOM_FOR_THE_RECORD > free:
            yield Problem(
                "no-space",
                str(writing.where),
                f"{free:,} bytes free once extract has run",
                f"{writing.num_bytes:,} bytes of checkpoints",
                "make room (dvc gc -w -a -T --all-experiments), or lower train.epochs or train.checkpoints_per_epoch",
                "a full disk fails the stage, and DVC 3.67 can then cut dvc.lock to nothing (eagle3 doctor tells)",
            )
    for need, (what, smaller) in zip(needs, HELD, strict=True):
        if need.memory > memory:
            yield Problem(
                "no-memory",
                need.stage,
                f"{memory:,} bytes of memory (on a GPU, compare with its own)",
                f"{need.memory:,} bytes for {what}",
                f"a smaller {smaller}, or a machine with more",
                severity="warning",
            )


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_disk() -> int:
    return shutil.disk_usage(Path()).free


def need_lines(needs: list[Need]) -> Iterator[str]:
    for need in needs:
        took = "time not known: never run here" if need.seconds is None else f"about {clock(need.seconds)}"
        memory = f", {need.memory:,} bytes of memory" if need.memory else ""
        yield f"{need.stage}: writes {need.disk:,} bytes{memory}, {took}"
        yield f"    {need.how}"
    yield f"this machine: {free_disk():,} bytes free, {machine_memory():,} bytes of memory, {os.cpu_count()} cores"
