"""data/flattened, data/configs/verifier.json -> reports/simulate_weight_load.json

By hand: python -m stages.simulate_weight_load. Follows every tensor of every epoch into the server's parameters, from
headers alone, then lets vLLM's own class load the files and compares: where each tensor went, and the logits of each
epoch with those that training had for the same hidden states. An error fails the stage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from eagle3.atomic_files import write_json
from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.config_check import Epochs
from eagle3.checks.simulated_load import SimulatedLoad
from eagle3.engines import installed_version, require_engine
from eagle3.formats.checkpoint_files import epoch_folders, load_signature
from eagle3.manifests import read_manifest
from eagle3.params import SimulateWeightLoadParams
from eagle3.problems import InvalidInput, Problem, format_problems, invalid
from eagle3.stage_guard import Stage, run_stage
from eagle3.verifiers.verifier_config import read_verifier_config

FLATTENED, VERIFIER = Path("data/flattened"), Path("data/configs/verifier.json")


def run(stage: Stage) -> None:
    """The `engine_level` stands in the report, and so in the release that carries it."""
    read_manifest(FLATTENED, "flatten")
    verifier = read_verifier_config(VERIFIER)
    folders = epoch_folders(FLATTENED, "flatten")
    checks = {folder: check_checkpoint(folder, verifier, config_rules=False) for folder in folders}
    epochs = Epochs({folder.name: verdict for folder, (verdict, _) in checks.items()})
    loads = {folder: load for folder, (_, load) in checks.items() if load}
    if epochs.num("error") or len(loads) < len(folders):
        raise InvalidInput(*epochs.problems(), *(not_simulated(folder) for folder in folders if folder not in loads))
    params = stage.params.simulate_weight_load
    level: dict[str, Any] = {"level": params.engine_level}
    if params.engine_level != "off":
        level |= witness_level(loads, stage.params.engines.vllm, params)
    if epochs.num("warning"):
        print(format_problems(epochs.problems()))
    write_json(stage.out("reports/simulate_weight_load.json"), epochs.as_dict() | {"engine_level": level})
    seen = (
        f"vLLM loaded {level['loads']} of them{parity_line(level)}" if "loads" in level else "the engine level is off"
    )
    print(f"simulate-weight-load: {len(folders)} checkpoints, every tensor and parameter accounted for; {seen}")


def witness_level(loads: dict[Path, SimulatedLoad], declared: str, params: SimulateWeightLoadParams) -> dict[str, Any]:
    """Load each kind of checkpoint with the real class once: what load_weights does depends on headers alone."""
    if installed_version("vllm") is None:
        raise invalid(
            "no-engine",
            "simulate_weight_load.engine_level",
            f"{params.engine_level}, and vLLM is not installed",
            f"vLLM {declared}",
            "install it (make), or leave the witness out: dvc exp run -S simulate_weight_load.engine_level=off",
            "off is written into the report and into the release",
        )
    engines = require_engine("vllm", declared)
    from eagle3.checks.engine_load import engine, witness_problems
    from eagle3.checks.engine_parity import epochs_parity, is_possible, skipped_parity

    folders = list(loads)
    skipped = {} if is_possible() else skipped_parity(folders, required=params.engine_level == "required")
    loaded: dict[tuple[Any, ...], dict[str, Any]] = {}
    with engine(VERIFIER) as vllm:
        for folder, simulated in loads.items():
            signature = load_signature(folder)
            if signature in loaded:
                loaded[signature]["epochs"].append(folder.name)
                continue
            real = vllm.load(folder, simulated)
            problems = list(witness_problems(real, simulated))
            if problems:
                raise InvalidInput(*problems)
            loaded[signature] = real.as_dict() | {"epochs": [folder.name]}
        parity = skipped or epochs_parity(vllm, folders, params.max_logit_steps)
    return {"engines": engines, "loads": len(loaded), "loaded": list(loaded.values()), "parity": parity}


def parity_line(level: dict[str, Any]) -> str:
    apart = [epoch["apart_in_bf16_steps"] for epoch in level["parity"].values() if "apart_in_bf16_steps" in epoch]
    return f", its logits are at most {max(apart)} bf16 steps from training's" if apart else ", logits not compared"


def not_simulated(folder: Path) -> Problem:
    expected = "the tensors of a draft that is not quantised"
    return Problem(
        "no-load", folder.name, "no tensors that a load could be simulated with", expected, "dvc repro flatten"
    )


if __name__ == "__main__":
    sys.exit(run_stage("simulate-weight-load", run))
