"""data/hidden_states, data/vocab_map -> data/checkpoints, reports; by hand: python -m stages.train

Trains the draft with speculators. Every epoch is a checkpoint, with the acceptance that a walk over known answers
predicts for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3.atomic_files import link_tree, write_json
from eagle3.drafts.checkpoints import write_epoch
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.drafts.draft_model import build_draft, draft_steps, read_vocabulary
from eagle3.drafts.draft_walk import predict, walk_table
from eagle3.drafts.parity import probe_of, probe_rows
from eagle3.drafts.training import train, use_threads
from eagle3.drafts.training_curves import EpochMetrics, announce
from eagle3.drafts.training_data import PackedRows, check_inputs, read_documents
from eagle3.drafts.training_report import Record, best_epoch, epoch_record, progress, verdict, write_reports
from eagle3.drafts.walk_files import write_walks
from eagle3.engines import require_engine
from eagle3.formats.checkpoint_files import PROBE
from eagle3.formats.json_files import read_json_object
from eagle3.formats.parity_probe import write_probe
from eagle3.machine import read_machine
from eagle3.manifests import Manifest, read_manifest, write_manifest
from eagle3.stage_guard import Stage, run_stage
from eagle3.states.hidden_states import HiddenStates
from eagle3.verifiers.verifier import resolve_verifier

HIDDEN_STATES, VOCAB_MAP = Path("data/hidden_states"), Path("data/vocab_map")


def run(stage: Stage) -> None:
    """Validation follows each epoch on the val split; eval is walked and selects nothing."""
    params, seed = stage.params.train, stage.params.seed
    engines = require_engine("speculators", stage.params.engines.speculators)
    hidden, vocab_map = read_manifest(HIDDEN_STATES, "extract"), read_manifest(VOCAB_MAP, "vocab-map")
    verifier = resolve_verifier(stage.params.verifier)
    check_inputs(hidden, vocab_map, verifier)
    sizes = vocab_map.decisions["draft_vocab_size"], hidden.decisions["aux_layer_ids"]
    architecture = resolve_architecture(stage.params.draft, verifier.text_config, *sizes)
    machine = read_machine()
    use_threads(machine.cpu_threads)

    states = HiddenStates(HIDDEN_STATES)
    documents = read_documents(states, params.total_seq_len, params.ttt_steps)
    splits = documents.by_split
    train_rows = PackedRows(states, splits["train"], params.total_seq_len, seed)
    val_rows = PackedRows(states, splits["val"], params.total_seq_len)
    walk_rows = PackedRows(states, splits["val"] + splits["eval"], params.total_seq_len)
    parity_rows = probe_rows(states, splits["val"], params.total_seq_len, params.ttt_steps)
    vocabulary = read_vocabulary(VOCAB_MAP, architecture)
    d2t = vocabulary and vocabulary[0]
    model = build_draft(architecture, verifier, vocabulary, params.ttt_steps, seed)

    # what a killed run goes on with: the state of training, and whatever it had finished
    kept = stage.scratch / "training"

    def close_epoch(epoch: int, metrics: EpochMetrics) -> None:
        place = write_epoch(kept / "checkpoints", epoch, model, verifier.source)
        write_probe(place / PROBE, probe_of(model, parity_rows, d2t, params.ttt_steps))
        walked = predict(draft_steps(model), walk_rows, d2t)
        write_walks(place, {one.sample_id: one.right_n for one in walked if one.split == "eval"})
        record = epoch_record(epoch, metrics, walk_table(walked), walk_table(walked, loops=False))
        write_json(kept / f"epoch_{epoch}.json", record)
        announce(progress(record, params.ttt_steps))

    save_every = None if machine.save_state_minutes is None else 60 * machine.save_state_minutes
    done = train(model, params, (train_rows, val_rows), kept, close_epoch, save_every)
    records: list[Record] = [read_json_object(kept / f"epoch_{n}.json").value for n in range(params.epochs)]
    checkpoints = stage.out("data/checkpoints")
    link_tree(kept / "checkpoints", checkpoints)
    write_json(checkpoints / "verifier_config.json", verifier.config)
    decisions = {
        "best_epoch": best_epoch(records, params.ttt_steps),
        "draft": architecture.as_dict(),
        "training": done.settings,
        "epochs": records,
    }
    inputs = {"hidden_states": hidden.as_dict(), "vocab_map": vocab_map.as_dict()}
    made = Manifest("train", stage.values, inputs, verifier.identity(), engines, documents.counts(), decisions)
    write_manifest(checkpoints, made)
    write_reports(stage.out, records, params.ttt_steps)
    stage.spent.append(kept)
    stage.figures.update(
        tokens_per_second=done.token_passes / done.seconds,
        token_passes=float(done.token_passes),
        state_seconds=done.saving_seconds,
    )
    print(f"train: {verdict(records, params.ttt_steps)}")


if __name__ == "__main__":
    sys.exit(run_stage("train", run))
