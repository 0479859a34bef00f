"""A folder of input files, each named in params.yaml and tracked by Git or DVC, so that nothing is ignored."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from eagle3.problems import Problem

NOT_DATA = ("README.md", ".gitignore")


def file_problems(
    named: Mapping[str, str], folder: Path, where: str, entry: str, folders: Collection[str] = ()
) -> Iterator[Problem]:
    """Named but absent, no file, present but not named, or tracked by neither Git nor DVC.

    named: file name -> the parameter that names it. where: the list in params.yaml; entry: how a name is written there.
    folders: those of the names that are to be folders.
    """
    entries = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    present = [name for name in entries if name not in NOT_DATA and not name.endswith(".dvc")]
    for name in sorted(set(named) - set(present)):
        fix = f"dvc pull {folder / name}.dvc" if f"{name}.dvc" in entries else f"put it there, or remove {named[name]}"
        yield Problem("source-absent", named[name], f"no {folder / name}", "the file that is named", fix)
    for name in sorted(set(named) & set(present)):
        path, wanted = folder / name, "folder" if name in folders else "file"
        if not (path.is_dir() if name in folders else path.is_file()):
            found = "a link that leads nowhere" if path.is_symlink() and not path.exists() else f"not a {wanted}"
            fix = f"dvc checkout, if DVC tracks it; else put the {wanted} there"
            yield Problem("source-kind", str(path), found, f"a {wanted}, as {named[name]} says", fix)
    for name in present:
        if name not in named:
            yield Problem(
                "source-unnamed",
                str(folder / name),
                f"not named in {where}",
                "every file of the folder is named, or not there",
                f"add {entry.format(name)} to {where} or move it away",
                "it would look used and be ignored",
            )
    tracked = _tracked_by_git(folder) if named else set()
    for name in present:
        if name in named and not {name, f"{name}.dvc"} & tracked:
            yield Problem(
                "source-untracked",
                str(folder / name),
                f"tracked by neither Git nor DVC ({name}.dvc would have to be in Git)",
                "a file that a temporary experiment and the next clone have too",
                f"git add {folder / name}; or, if it is large: dvc add {folder / name} && git add {folder / name}.dvc",
                "`dvc exp run --temp` and `dvc queue` would not find it",
            )


def _tracked_by_git(folder: Path) -> set[str]:
    """Names in Git's index under `folder`, files and folders; empty where there is no repository."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--", "."], cwd=folder, capture_output=True, check=False, timeout=60
        )
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {path.split("/")[0] for path in listing.stdout.decode("utf-8", "surrogateescape").split("\0")} - {""}
