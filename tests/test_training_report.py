from __future__ import annotations

from eagle3.acceptance import Acceptance
from eagle3.drafts.training_curves import EpochMetrics
from eagle3.drafts.training_report import best_epoch, epoch_record, progress, summary, verdict, write_reports


def record(epoch: int, val_accepted: int, eval_accepted: int = 0) -> dict:
    walks = {
        split: {"1": Acceptance(10, (accepted,)).as_dict()}
        for split, accepted in (("val", val_accepted), ("eval", eval_accepted))
    }
    metrics = EpochMetrics(train_loss=2.0 - epoch, val_loss=3.0 - epoch, train_accuracy=(0.5,), val_accuracy=(0.25,))
    return epoch_record(epoch, metrics, walks, walks)


def test_best_is_the_longest_walk_on_val_and_the_earliest_of_equals():
    assert best_epoch([record(0, 3), record(1, 5), record(2, 5)], 1) == 1


def test_eval_selects_nothing():
    assert best_epoch([record(0, 5, eval_accepted=0), record(1, 3, eval_accepted=9)], 1) == 0


def test_the_report_is_the_best_checkpoints_numbers_under_honest_names():
    assert summary([record(0, 3), record(1, 5, 4)], 1) == {
        "best_checkpoint": 1,
        "train_loss": 1.0,
        "val_loss": 2.0,
        "train_accuracy_inside_draft_vocabulary_step_0": 0.5,
        "val_accuracy_inside_draft_vocabulary_step_0": 0.25,
        "walk_acceptance_length_val_1_tokens": 1.5,
        "walk_acceptance_length_eval_1_tokens": 1.4,
        "walk_without_loops_acceptance_length_val_1_tokens": 1.5,
        "walk_without_loops_acceptance_length_eval_1_tokens": 1.4,
    }


def test_every_checkpoint_says_its_walk_and_beside_it_what_the_plain_accuracy_is():
    assert progress(record(1, 5, 4), 1) == (
        "epoch_1: loss 1.000, val 2.000, acceptance length by walk at k=1: 1.500 on val, 1.400 on eval; "
        "accuracy on val, inside the draft vocabulary, 0.250"
    )


def test_a_run_that_did_not_improve_says_so():
    assert "did not improve" in verdict([record(0, 5), record(1, 3)], 1)
    assert "did not improve" not in verdict([record(0, 3), record(1, 5)], 1)
    assert "did not improve" not in verdict([record(0, 3)], 1)


def test_a_run_that_did_not_improve_the_draft_it_started_from_says_so():
    started = [verdict([record(0, 3), record(1, 5)], 1, record(0, before)) for before in (4, 5, 6)]
    assert ["did not improve on the draft it started from" in said for said in started] == [False, True, True]
    assert started[2].endswith("(1.600)")


def test_tables_have_a_row_per_epoch_and_per_step(tmp_path):
    write_reports(lambda name: tmp_path / name, [record(0, 3), record(1, 5)], 1)
    assert (tmp_path / "reports/loss.csv").read_text() == "checkpoint,train,val\n0,2.0,3.0\n1,1.0,2.0\n"
    assert (tmp_path / "reports/accuracy.csv").read_text() == "checkpoint,step,train,val\n0,0,0.5,0.25\n1,0,0.5,0.25\n"
