"""`eagle3 check --no-values` of a config and headers of Kimi-K2.5's draft sizes, against a bare Python start.

By hand: python -m benchmarks.check_headers
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.kimi_draft import KIMI, write_draft
from benchmarks.processes import medians

TIMES = 21
HEAVY = ("numpy", "torch", "yaml", "vllm")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        draft = write_draft(Path(folder), KIMI)
        check = ["check", "--no-values", str(draft)]
        verifier = ["--verifier", str(draft / "verifier.json")]
        found = medians(
            {
                "python -c pass": [sys.executable, "-c", "pass"],
                "check": [sys.executable, "-m", "eagle3", *check],
                "check --verifier": [sys.executable, "-m", "eagle3", *check, *verifier],
            },
            TIMES,
        )
        bare = found["python -c pass"].wall_s
        for name, each in found.items():
            print(f"{name:<17} {each.wall_s * 1e3:6.0f} ms wall  {(each.wall_s - bare) * 1e3:+6.0f} ms above bare")
        code = "import sys; from eagle3.__main__ import main; main(sys.argv[1:]); "
        code += f"print(sorted(set({HEAVY}) & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code, *check], text=True, capture_output=True, check=True)
        print(f"heavy modules     {done.stdout.splitlines()[-1]}")


if __name__ == "__main__":
    main()
