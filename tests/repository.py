"""A copy of this repository in a temporary folder, with a tiny random verifier and its own conversations.

Everything in it is real: Git, DVC, the stages and the engines; only the sizes are small.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ruamel.yaml import YAML

from tests.code_deps import ROOT
from tests.tiny import tiny_verifier

TINY = {
    "sample": {
        "sources": [{"file": "tiny.jsonl"}],
        "max_train": 24,
        "max_val": 4,
        "max_eval": 4,
        "min_eval": 2,
        "val_percent": 20,
        "eval_percent": 20,
        "max_new_tokens": 12,
        "max_model_len": 256,
    },
    "extract": {"aux_layer_ids": [1, 3, 5], "samples_per_shard": 8},
    "vocab_map": {"draft_vocab_size": 128},
    "train": {"epochs": 2, "total_seq_len": 256},
    # no token of an untrained draft stands out, so that the same rounding is more steps
    "simulate_weight_load": {"max_logit_steps": 8.0},
    "serve_test": {
        "num_prompts": 3,
        "min_rounds": 1,
        "min_acceptance_length": 1.0,
        "min_position_0_rate": 0.0,
        "max_gap_to_walk": 3.0,
        "max_tie_fraction": 1.0,
    },
}


def environment() -> dict[str, str]:
    """This interpreter first on PATH, DVC silent and with no state outside the repository."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "VLLM_"))}
    return clean | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DVC_NO_ANALYTICS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "SHELL": "/bin/bash",
    }


def run(folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, env=environment(), text=True, capture_output=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{command} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}")
    return done


def make_repository(folder: Path, make_verifier: Callable[[Path], Path] = tiny_verifier) -> Path:
    """Git and DVC initialised, the code committed, params.yaml set to TINY on a tiny verifier."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if not name.startswith(("tests/", "dvc.lock", "reports/", "docs/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    make_verifier(folder / "verifier")
    (folder / ".gitignore").write_text((folder / ".gitignore").read_text() + "/verifier\n")
    rows = [{"messages": [{"role": "user", "content": f"Tell me about number {n} please"}]} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data/conversations/tiny.jsonl").write_text(lines)
    set_params(folder, {"verifier": {"source": "verifier", "sha256": None}, **TINY})
    run(folder, "git", "init", "-q")
    run(folder, "git", "config", "user.email", "test@example.com")
    run(folder, "git", "config", "user.name", "test")
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "start")
    return folder


def set_params(folder: Path, changes: dict[str, dict]) -> None:
    """Edit params.yaml as `dvc exp run -S` does, through ruamel.yaml."""
    yaml = YAML()
    values = yaml.load(folder / "params.yaml")
    for section, items in changes.items():
        values[section].update(items)
    yaml.dump(values, folder / "params.yaml")


def repro(folder: Path) -> list[str]:
    """`dvc repro`; the stages that ran, in order (restored and skipped ones are not in it)."""
    return re.findall(r"Running stage '([^']+)'", run(folder, "dvc", "repro").stdout)
