"""What Git says of the repository around the current directory."""

from __future__ import annotations

import subprocess


def git(*words: str) -> str | None:
    """Git's output, or None where Git is absent, this is no repository, or nothing was found."""
    try:
        done = subprocess.run(["git", *words], text=True, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
