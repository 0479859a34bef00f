"""data/samples, verifier -> data/hidden_states; by hand, in the repository's root: python -m stages.extract."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle3.atomic_files import link_or_copy
from eagle3.engines import require_engine
from eagle3.layer_ids import stored_layer_ids
from eagle3.machine import read_machine
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.problems import InvalidInput
from eagle3.sampling.samples import read_samples
from eagle3.stage_guard import Stage, run_stage
from eagle3.states.extraction import Extracted, extract_shards, input_problems, start_extraction
from eagle3.states.hidden_states import store_errors
from eagle3.states.ray_extraction import Job, extract_with_ray
from eagle3.states.shard_plan import Shard, engine_window, planned_extraction
from eagle3.states.shard_scratch import scratch_in_use
from eagle3.states.store_dtypes import FP8
from eagle3.states.witness import WITNESS, check_parity, first_samples
from eagle3.verifiers.verifier import require_window, resolve_verifier

SAMPLES = Path("data/samples")


def run(stage: Stage) -> None:
    """Shards that an earlier run made of the same inputs are taken from scratch; only the others need the engine."""
    params, trust_remote_code = stage.params.extract, stage.params.verifier.trust_remote_code
    engines = require_engine("vllm", stage.params.engines.vllm)
    made = read_manifest(SAMPLES, "sample")
    verify_files(SAMPLES, made)
    verifier = resolve_verifier(stage.params.verifier)
    if problems := list(input_problems(made, verifier, params.aux_layer_ids)):
        raise InvalidInput(*problems)
    samples = read_samples(SAMPLES)
    num_layers, hidden_size = (verifier.text_config[key] for key in ("num_hidden_layers", "hidden_size"))
    layer_ids = stored_layer_ids(params.aux_layer_ids, num_layers)
    shards = planned_extraction(samples, made, verifier.text_config, params, engines["vllm"])

    home, folder = stage.shared_scratch, stage.out("data/hidden_states")
    folder.mkdir(parents=True)
    with scratch_in_use(home, shards) as missing:
        if missing:
            window, greedy = engine_window(samples, made), made.decided_list("greedy_splits", str)
            job = Job(verifier, read_machine(), window, trust_remote_code, layer_ids, greedy, home)
            done = extracted(job, missing)
            stage.figures["tokens_per_second"] = done.tokens_per_second
            stage.figures["bytes_written"] = sum(shard.num_bytes for shard in missing)
        if witnessed := first_samples(home, shards, params.parity_samples):
            errors = check_parity(verifier.path, witnessed, layer_ids, params.store_dtype, trust_remote_code)
            stage.figures["parity_error"] = round(max(errors.values()), 6)
            said = ", ".join(f"{error:.4f} at layer id {layer_id}" for layer_id, error in errors.items())
            print(f"extract: relative error of {len(witnessed)} samples against transformers: {said}", flush=True)
        for shard in shards:
            link_or_copy(home / shard.name, folder / shard.name)

    decisions = {"aux_layer_ids": params.aux_layer_ids, "hidden_size": hidden_size}
    decisions |= {"num_hidden_layers": num_layers, "dtype": params.store_dtype}
    if params.store_dtype == FP8:
        decisions["relative_error"] = store_errors(folder, shards, layer_ids)
    decisions["parity"] = {"samples": len(witnessed), "witness": WITNESS if witnessed else "off"}
    counts = {"samples": len(samples), "tokens": sum(shard.num_tokens for shard in shards), "shards": len(shards)}
    inputs = {"samples": made.as_dict()}
    write_manifest(folder, Manifest("extract", stage.values, inputs, verifier.identity(), engines, counts, decisions))
    now = f"{len(missing)} made now: {done}" if missing else "all made by an earlier run"
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"extract: {listed}, {sum(shard.num_bytes for shard in shards) / 1e9:.2f} GB ({now})", flush=True)


def extracted(job: Job, shards: Sequence[Shard]) -> Extracted:
    """Make `shards` by the engine of this process, or by Ray's replicas where machine.yaml says so."""
    require_window(job.verifier, job.window)
    if job.machine.executor == "ray":
        return extract_with_ray(job, shards)
    engine = start_extraction(job.verifier, job.machine, job.window, job.trust_remote_code, job.layer_ids)
    return extract_shards(engine, shards, job.folder, job.layer_ids, job.greedy_splits)


if __name__ == "__main__":
    sys.exit(run_stage("extract", run))
