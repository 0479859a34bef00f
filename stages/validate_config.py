"""data/configs -> reports/validate_config.json; by hand: python -m stages.validate_config

Checks the flat config of every epoch against the rules of the server. An error fails the stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3.atomic_files import write_json
from eagle3.checks.config_check import Epochs, check_config
from eagle3.formats.checkpoint_files import epoch_folders
from eagle3.problems import InvalidInput, format_problems
from eagle3.stage_guard import Stage, run_stage
from eagle3.verifiers.verifier_config import read_verifier_config

CONFIGS = Path("data/configs")


def run(stage: Stage) -> None:
    """The report is a dependency of serve-test: it depends on the configs and on nothing else."""
    verifier = read_verifier_config(CONFIGS / "verifier.json")
    epochs = Epochs({folder.name: check_config(folder, verifier) for folder in epoch_folders(CONFIGS, "flatten")})
    if epochs.num("error"):
        raise InvalidInput(*epochs.problems())
    if epochs.num("warning"):
        print(format_problems(epochs.problems()))
    write_json(stage.out("reports/validate_config.json"), epochs.as_dict())
    print(f"validate-config: {len(epochs.verdicts)} configs, 0 errors, {epochs.num('warning')} warnings")


if __name__ == "__main__":
    sys.exit(run_stage("validate-config", run))
