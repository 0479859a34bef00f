"""A run that ends in the middle and is called again: the bytes of an uninterrupted one, at a bounded cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.drafts.draft_model import build_draft, read_vocabulary
from eagle3.drafts.training import TrainingRun, train
from eagle3.drafts.training_data import PackedRows, Row, read_documents
from eagle3.drafts.training_state import FILE, SaveSchedule
from eagle3.params import VerifierParams, read_params
from eagle3.problems import InvalidInput
from eagle3.states.hidden_states import HiddenStates
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier
from tests.training_inputs import AUX_LAYER_IDS, write_hidden_states, write_vocab_map

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
PARAMS = read_params(ROOT / "params.yaml")
TRAIN = replace(PARAMS.train, epochs=3, total_seq_len=64, learning_rate=3e-3, optimizer="adamw")
SEED, K, ROWS = 0, 128, 8  # rows of the first epoch


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    path = tiny_verifier(tmp_path_factory.mktemp("verifier"))
    return resolve_verifier(VerifierParams(str(path), None, None, False))


@pytest.fixture(scope="module")
def data(verifier, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_hidden_states(folder / "hidden_states", verifier.path, verifier.identity(), {"train": 12, "val": 2})
    write_vocab_map(folder / "vocab_map", K, 320)
    return folder


class Interrupted(PackedRows):
    """Rows that end the run, as a signal does, when the given number of them has been read."""

    left = 10**9

    def batch(self, row: Row) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().batch(row)


def run(
    verifier: Verifier, data: Path, folder: Path, asked: Any = TRAIN, after: int = 10**9
) -> tuple[Any, TrainingRun]:
    """Model and result of a training that stops after so many rows."""
    architecture = resolve_architecture(PARAMS.draft, verifier.text_config, K, AUX_LAYER_IDS)
    model = build_draft(architecture, verifier, read_vocabulary(data / "vocab_map", architecture), 3, SEED)
    states = HiddenStates(data / "hidden_states")
    splits = read_documents(states, asked.total_seq_len, asked.ttt_steps).by_split
    rows = Interrupted(states, splits["train"], asked.total_seq_len, SEED)
    assert len(rows) == ROWS
    rows.left = after
    val_rows = PackedRows(states, splits["val"], asked.total_seq_len)
    return model, train(model, asked, (rows, val_rows), folder, lambda *_: None, save_every=0.0)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "stops"),
    [("adamw", "cosine", (4,)), ("adamw", "none", (ROWS,)), ("muon", "linear", (1, ROWS + 1, 3))],
    ids=["in the first epoch", "between two epochs", "three times"],
)
def test_stopped_and_called_again_is_never_stopped(verifier, data, tmp_path, optimizer, scheduler, stops):
    asked = replace(TRAIN, optimizer=optimizer, scheduler=scheduler)
    for after in stops:
        with pytest.raises(KeyboardInterrupt):
            run(verifier, data, tmp_path / "stopped", asked, after)
    torch.rand(5)  # whatever ran before must not matter
    model, result = run(verifier, data, tmp_path / "stopped", asked)
    whole_model, whole = run(verifier, data, tmp_path / "whole", asked)
    assert result.epochs == whole.epochs
    assert (result.token_passes, result.settings) == (whole.token_passes, whole.settings)
    for (name, tensor), other in zip(whole_model.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_a_finished_run_called_again_trains_no_step(verifier, data, tmp_path):
    run(verifier, data, tmp_path / "state")
    _, result = run(verifier, data, tmp_path / "state", after=0)
    assert len(result.epochs) == TRAIN.epochs


def test_weights_and_optimizer_are_stored_in_full_precision(verifier, data, tmp_path):
    run(verifier, data, tmp_path)
    state = torch.load(tmp_path / FILE, weights_only=True)
    floats = [*state["weights"].values()]
    floats += [tensor for moments in state["optimizers"][0]["state"].values() for tensor in moments.values()]
    assert {tensor.dtype for tensor in floats} == {torch.float32}
    assert "embed_tokens.weight" not in state["weights"], "frozen tensors come from the verifier"


@pytest.mark.parametrize("content", [b"", b"not a state", b"half"], ids=["empty", "something else", "cut short"])
def test_an_unreadable_state_is_named_with_the_way_out(verifier, data, tmp_path, content):
    if content == b"half":
        run(verifier, data, tmp_path)
        content = (tmp_path / FILE).read_bytes()[:5000]
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InvalidInput, match=r"(?s)training-state.*rm .*state\.pt"):
        run(verifier, data, tmp_path)


def test_a_state_of_another_number_of_processes_is_refused(verifier, data, tmp_path, monkeypatch):
    run(verifier, data, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match=r"(?s)a run of 1 processes.*train_processes: 1 in machine\.yaml"):
        run(verifier, data, tmp_path)


@pytest.mark.parametrize("kept", [{"shards": True}, {}], ids=["dealt out", "of an earlier version"])
def test_a_state_of_weights_held_otherwise_is_refused(verifier, data, tmp_path, kept):
    run(verifier, data, tmp_path)
    state = torch.load(tmp_path / FILE, weights_only=True)
    del state["shards"]
    torch.save(state | kept, tmp_path / FILE)
    with pytest.raises(InvalidInput, match=r"(?s)train_shards: (true|none).*one with train_shards: false.*rm "):
        run(verifier, data, tmp_path)


def test_saving_takes_at_most_two_percent_of_the_time_unless_asked_otherwise(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("eagle3.drafts.training_state.time.monotonic", lambda: now[0])

    def due(schedule: SaveSchedule, at: float) -> bool:
        now[0] = at
        return schedule.due()

    schedule = SaveSchedule()
    schedule.start()
    assert not due(schedule, 29.0)
    assert due(schedule, 30.0)
    schedule.saved(3.0)
    assert not due(schedule, 179.0)
    assert due(schedule, 180.0)
    assert schedule.seconds == 3.0
    always, never = SaveSchedule(0.0), SaveSchedule(1e9)
    for each in (always, never):
        each.start()
        each.saved(50.0)
    assert (always.due(), never.due()) == (True, False)
