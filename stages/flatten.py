"""data/checkpoints -> data/flattened, data/configs, data/draft; by hand: python -m stages.flatten

Rewrites the config of every epoch to the flat form that vLLM serves, and puts the selected epoch beside as data/draft.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from eagle3.atomic_files import link_or_copy
from eagle3.drafts import walk_files
from eagle3.formats.checkpoint_files import epoch_folders
from eagle3.formats.flattening import flatten_checkpoint
from eagle3.manifests import NAME, Manifest, changed_file, read_manifest, write_manifest
from eagle3.problems import InvalidInput, invalid
from eagle3.stage_guard import Stage, run_stage

CHECKPOINTS = Path("data/checkpoints")
EMBEDDING = frozenset({"embed_tokens.weight"})


def run(stage: Stage) -> None:
    """The manifest of data/flattened leaves `select` out, so that another choice reruns only what reads data/draft."""
    checkpoints = read_manifest(CHECKPOINTS, "train")
    epochs = [int(path.name.removeprefix("epoch_")) for path in epoch_folders(CHECKPOINTS, "train")]
    epoch = selected_epoch(stage.params.flatten.select, epochs, checkpoints)
    flattened, configs = stage.out("data/flattened"), stage.out("data/configs")
    configs.mkdir()
    shutil.copyfile(CHECKPOINTS / "verifier_config.json", configs / "verifier.json")
    dropped = EMBEDDING if stage.params.flatten.drop_embed_tokens else frozenset()
    unchanged = []
    for number in epochs:
        name = f"epoch_{number}"
        linked = flatten_checkpoint(CHECKPOINTS / name, flattened / name, dropped)
        link_or_copy(CHECKPOINTS / name / walk_files.NAME, flattened / name / walk_files.NAME)
        unchanged += [f"{name}/{file}" for file in (*linked, walk_files.NAME)]
        (configs / name).mkdir()
        shutil.copyfile(flattened / name / "config.json", configs / name / "config.json")
    kept = {key: value for key, value in stage.values["flatten"].items() if key != "select"}
    inputs = {"checkpoints": checkpoints.as_dict()}
    manifest = Manifest("flatten", {"flatten": kept}, inputs, checkpoints.verifier, counts={"epochs": len(epochs)})
    check_unchanged(checkpoints, write_manifest(flattened, manifest), unchanged)
    draft = stage.out("data/draft")
    draft.mkdir()
    for path in sorted((flattened / f"epoch_{epoch}").iterdir()):
        link_or_copy(path, draft / path.name)
    write_manifest(draft, Manifest("flatten", stage.values, inputs, checkpoints.verifier, decisions={"epoch": epoch}))
    print(f"flatten: {len(epochs)} checkpoints, epoch_{epoch} is data/draft")


def selected_epoch(select: str | int, epochs: list[int], checkpoints: Manifest) -> int:
    """`best` is the longest walk on val, which train decided; a number must exist."""
    wanted = {"best": checkpoints.decisions.get("best_epoch"), "last": epochs[-1]}.get(str(select), select)
    if wanted not in epochs:
        choices = f"best, last or one of {', '.join(map(str, epochs))}"
        raise invalid("no-epoch", "flatten.select", str(select), choices, f"dvc exp run -S flatten.select={epochs[-1]}")
    return int(wanted)


def check_unchanged(before: Manifest, after: Manifest, names: list[str]) -> None:
    """A tensor file that was not rewritten has the digest that train recorded."""
    changed = [name for name in names if before.files.get(name) != after.files[name]]
    if changed:
        raise InvalidInput(
            *(changed_file(CHECKPOINTS / name, "other bytes", f"as in {NAME}", "train") for name in changed)
        )


if __name__ == "__main__":
    sys.exit(run_stage("flatten", run))
