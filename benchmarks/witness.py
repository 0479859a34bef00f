"""The witness of simulate-weight-load at two sizes: vLLM imported, its draft class built, loaded and compared.

By hand: python -m benchmarks.witness [smollm2|kimi]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.kimi_draft import KIMI, SMOLLM2, write_draft
from benchmarks.processes import medians

SIZES = {"smollm2": SMOLLM2, "kimi": KIMI}
TIMES = 3
WITNESS = """
import sys
from pathlib import Path
from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.engine_load import engine, witness_problems
from eagle3.verifiers.verifier_config import read_verifier_config
folder = Path(sys.argv[1])
verdict, load = check_checkpoint(folder, read_verifier_config(folder / "verifier.json"))
assert verdict.verdict == "ok", verdict.problems
with engine(folder / "verifier.json") as vllm:
    real = vllm.load(folder, load)
    problems = list(witness_problems(real, load))
assert real.states and not problems, (real.refusal, problems)
"""


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name in sys.argv[1:] or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            draft = write_draft(Path(folder), SIZES[name])
            found = medians({name: [sys.executable, "-c", WITNESS, str(draft)]}, TIMES)[name]
        cost = f"{found.wall_s:5.1f} s wall, {found.cpu_s:5.1f} s of processors"
        print(f"{name:<8} {cost}, peak {found.peak_bytes / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
