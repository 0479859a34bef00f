"""walk_eval.json beside an epoch's weights: what training predicts of the server, round by round, for each eval answer.

`{sample_id: "2013..."}`, one digit for each round that a server can take over that answer (`eagle3.acceptance.walk`).
serve-test compares its own rounds with these, over exactly the tokens that both saw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3.atomic_files import write_json
from eagle3.problems import invalid

NAME = "walk_eval.json"


def write_walks(folder: Path, right: Mapping[str, Sequence[int]]) -> None:
    """right: sample id -> `right_drafts`, each count one digit."""
    write_json(folder / NAME, {name: "".join(map(str, counts)) for name, counts in sorted(right.items())})


def parse_walks(text: str) -> dict[str, list[int]]:
    """The text of a file that `write_walks` wrote: sample id -> counts."""
    return {name: [int(digit) for digit in counts] for name, counts in json.loads(text).items()}


def read_walks(folder: Path) -> dict[str, list[int]]:
    """What `write_walks` wrote; `InvalidInput` for anything else."""
    path = folder / NAME
    try:
        return parse_walks(path.read_text())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise invalid("missing-input", str(path), found, "the walk over eval's answers", "dvc repro train") from None
