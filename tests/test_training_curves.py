"""What the Trainer reports, on the progress bar."""

from __future__ import annotations

import logging

from eagle3.drafts.training_curves import curves_of


def test_the_bar_shows_the_tokens_of_all_processes():
    step = {"loss": 1.5, "full_acc_0": 0.25, "error_records": 0}
    with curves_of(2, processes=4) as curves:
        logging.getLogger("speculators.metrics").info({"train": step, "profile": {"tokens_per_s": 250.0}})
        assert curves.bar.postfix == "loss 1.500, accuracy 0.250, 1000 tokens/s"
