"""data/hidden_states, data/vocab_map -> data/checkpoints, reports; by hand: python -m stages.train

Trains the draft with speculators. Every epoch is a checkpoint, with the acceptance that a walk over known answers
predicts for it.
"""

from __future__ import annotations

import sys

from eagle3.atomic_files import link_tree, write_json
from eagle3.drafts.torchrun import MODULE, launch_of, run_with_torchrun
from eagle3.drafts.train_process import HIDDEN_STATES, RUN, VOCAB_MAP, Job, run_job, write_job
from eagle3.drafts.training_data import check_inputs
from eagle3.drafts.training_report import Record, best_epoch, verdict, write_reports
from eagle3.engines import require_engine
from eagle3.formats.json_files import read_json_object
from eagle3.gpus import num_gpus
from eagle3.machine import read_machine
from eagle3.manifests import Manifest, read_manifest, write_manifest
from eagle3.stage_guard import Stage, run_stage
from eagle3.verifiers.verifier import resolve_verifier


def run(stage: Stage) -> None:
    """Validation follows each epoch on the val split; eval is walked and selects nothing."""
    params = stage.params.train
    engines = require_engine("speculators", stage.params.engines.speculators)
    hidden, vocab_map = read_manifest(HIDDEN_STATES, "extract"), read_manifest(VOCAB_MAP, "vocab-map")
    verifier = resolve_verifier(stage.params.verifier)
    check_inputs(hidden, vocab_map, verifier)
    machine = read_machine()
    launch = launch_of(machine, num_gpus())
    save_every = None if machine.save_state_minutes is None else 60 * machine.save_state_minutes

    # what a killed run goes on with: the state of training, and whatever it had finished
    kept = stage.scratch / "training"
    stage.spent.append(kept)
    sections = stage.params.draft, stage.params.verifier, stage.params.seed
    write_job(kept, Job(params, *sections, machine.cpu_threads, save_every, launch.shards))
    if launch.alone:
        run_job(kept)
    else:
        if launch.nodes > 1:
            print(f"train: run on each further node, here: python -m eagle3.drafts.torchrun {kept}", flush=True)
        run_with_torchrun(MODULE, kept, launch, machine.cpu_threads)
    done = read_json_object(kept / RUN).value

    number = params.epochs * params.checkpoints_per_epoch
    records: list[Record] = [read_json_object(kept / f"epoch_{epoch}.json").value for epoch in range(number)]
    checkpoints = stage.out("data/checkpoints")
    link_tree(kept / "checkpoints", checkpoints)
    write_json(checkpoints / "verifier_config.json", verifier.config)
    decisions = {"best_epoch": best_epoch(records, params.ttt_steps), "epochs": records}
    decisions |= {key: done[key] for key in ("draft", "training", "warm_start")}
    inputs = {"hidden_states": hidden.as_dict(), "vocab_map": vocab_map.as_dict()}
    made = Manifest("train", stage.values, inputs, verifier.identity(), engines, done["documents"], decisions)
    write_manifest(checkpoints, made)
    write_reports(stage.out, records, params.ttt_steps, done["warm_start"])
    stage.figures.update(
        tokens_per_second=done["token_passes"] / done["seconds"],
        token_passes=float(done["token_passes"]),
        state_seconds=done["saving_seconds"],
    )
    print(f"train: {verdict(records, params.ttt_steps, done['warm_start'])}")


if __name__ == "__main__":
    sys.exit(run_stage("train", run))
