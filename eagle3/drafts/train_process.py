"""job.json -> checkpoints, probes and records beside it: one training run, alone or as one of torchrun's processes.

By hand: torchrun --nproc-per-node 2 -m eagle3.drafts.train_process FOLDER, in the repository, with a job.json that the
train stage has left in FOLDER. The first process writes; all train.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic_files import write_json
from eagle3.drafts.checkpoints import write_epoch
from eagle3.drafts.draft_architecture import DraftArchitecture, resolve_architecture
from eagle3.drafts.draft_model import Eagle3DraftModel, Vocabulary, build_draft, draft_steps, read_vocabulary
from eagle3.drafts.draft_walk import Walked, predict, walk_table
from eagle3.drafts.parity import probe_of, probe_rows
from eagle3.drafts.process_group import num_local_processes, num_processes, process_group, rank
from eagle3.drafts.training import TrainingRun, train, use_threads
from eagle3.drafts.training_curves import EpochMetrics, announce
from eagle3.drafts.training_data import Documents, PackedRows, read_documents
from eagle3.drafts.training_report import Record, epoch_record, progress, step_0
from eagle3.drafts.walk_files import write_walks
from eagle3.drafts.warm_start import read_existing_draft, start_from
from eagle3.formats.checkpoint_files import PROBE
from eagle3.formats.json_files import read_json_object
from eagle3.formats.parity_probe import write_probe
from eagle3.manifests import read_manifest
from eagle3.params import DraftParams, TrainParams, VerifierParams
from eagle3.problems import InvalidInput
from eagle3.stage_guard import die_with_parent
from eagle3.states.hidden_states import HiddenStates
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from eagle3.verifiers.verifier_config import parse_verifier_config

HIDDEN_STATES, VOCAB_MAP = Path("data/hidden_states"), Path("data/vocab_map")
JOB, RUN, WARM_START = "job.json", "run.json", "warm_start.json"


@dataclass(frozen=True)
class Job:
    """What all processes of a run are told. cpu_threads: of all on a node; save_every, shards: `training.train`."""

    train: TrainParams
    draft: DraftParams
    verifier: VerifierParams
    seed: int
    cpu_threads: int | None
    save_every: float | None
    shards: bool


def write_job(folder: Path, job: Job) -> None:
    write_json(folder / JOB, asdict(job))


def read_job(folder: Path) -> Job:
    raw = read_json_object(folder / JOB).value
    records = {"train": TrainParams, "draft": DraftParams, "verifier": VerifierParams}
    return Job(**{name: records[name](**value) if name in records else value for name, value in raw.items()})


class Run:
    """A draft and its data, ready to be trained; what is finished lies in `folder`."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job, params = folder, job, job.train
        self.verifier: Verifier = resolve_verifier(job.verifier)
        self.architecture = architecture_of(job, self.verifier)
        states = HiddenStates(HIDDEN_STATES)
        self.documents: Documents = read_documents(states, params.total_seq_len, params.ttt_steps)
        splits, size = self.documents.by_split, params.total_seq_len
        share = rank(), num_processes()
        self.train_rows = PackedRows(states, splits["train"], size, job.seed, params.checkpoints_per_epoch, share)
        self.val_rows = PackedRows(states, splits["val"], size)
        self.walk_rows = PackedRows(states, splits["val"] + splits["eval"], size)
        self.parity_rows = probe_rows(states, splits["val"], size, params.ttt_steps)
        self.vocabulary: Vocabulary | None = read_vocabulary(VOCAB_MAP, self.architecture)
        self.d2t = self.vocabulary and self.vocabulary[0]
        self.model = build_draft(
            self.architecture, self.verifier, self.vocabulary, params.ttt_steps, job.seed, job.shards
        )

    def train(self) -> None:
        start = self._warm_start()
        rows = self.train_rows, self.val_rows
        asked, save_every, shards = self.job.train, self.job.save_every, self.job.shards
        done = train(self.model, asked, rows, self.folder, self._close_epoch, save_every, shards)
        if rank() == 0:
            write_json(self.folder / RUN, self._record(done, start))

    def _warm_start(self) -> Record | None:
        """Take the weights of an existing draft, and measure it before the first step (once, whatever is resumed)."""
        place = self.job.train.warm_start
        if place is None:
            return None
        existing = read_existing_draft(
            place, self.job.train.warm_start_sha256, parse_verifier_config(self.verifier.config)
        )
        taken = start_from(existing, self.model, self.architecture, self.vocabulary)
        path = self.folder / WARM_START
        if rank() == 0:
            if not path.exists():
                write_json(path, {**taken, "walk": walk_table(self._walked(self.model))})
            record: Record = read_json_object(path).value
            announce(step_0(record, self.job.train.ttt_steps))
            return record
        return None

    def _close_epoch(self, epoch: int, metrics: EpochMetrics, model: Eagle3DraftModel) -> None:
        params = self.job.train
        place = write_epoch(self.folder / "checkpoints", epoch, model, self.verifier.source)
        write_probe(place / PROBE, probe_of(model, self.parity_rows, self.d2t, params.ttt_steps))
        walked = self._walked(model)
        write_walks(place, {one.sample_id: one.right_n for one in walked if one.split == "eval"})
        record = epoch_record(epoch, metrics, walk_table(walked), walk_table(walked, loops=False))
        write_json(self.folder / f"epoch_{epoch}.json", record)
        announce(progress(record, params.ttt_steps))

    def _walked(self, model: Eagle3DraftModel) -> list[Walked]:
        return predict(draft_steps(model), self.walk_rows, self.d2t)

    def _record(self, done: TrainingRun, start: Record | None) -> Record:
        return {
            "draft": self.architecture.as_dict(),
            "training": done.settings,
            "warm_start": start,
            "documents": self.documents.counts(),
            "seconds": done.seconds,
            "saving_seconds": done.saving_seconds,
            "token_passes": done.token_passes,
        }


def architecture_of(job: Job, verifier: Verifier) -> DraftArchitecture:
    hidden, vocab_map = read_manifest(HIDDEN_STATES, "extract"), read_manifest(VOCAB_MAP, "vocab-map")
    sizes = vocab_map.decided_size("draft_vocab_size"), hidden.decided_list("aux_layer_ids", int)
    return resolve_architecture(job.draft, verifier.text_config, *sizes)


def run_job(folder: Path) -> dict[str, Any]:
    """Train in this process what `folder` asks for, going on from what is there; the run's record."""
    job = read_job(folder)
    use_threads(job.cpu_threads and max(1, job.cpu_threads // num_local_processes()))
    with process_group():
        Run(folder, job).train()
    return read_json_object(folder / RUN).value


def main() -> int:
    die_with_parent()
    try:
        run_job(Path(sys.argv[1]))
    except InvalidInput as error:
        if rank() == 0:
            print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
