"""The rules of the cut, as tests: import layers, exact dependencies and parameters in dvc.yaml, no cycles."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.params import RECORDS
from eagle3.yaml12 import read_yaml
from tests.code_deps import ROOT, closure, file_of, imports_of, module_of, stages

STAGES = stages()
MODULES = sorted((ROOT / "eagle3").rglob("*.py"))
STAGE_MODULES = sorted((ROOT / "stages").glob("*.py"))

# The only modules that may import a heavy library, anywhere in the file; every other module and every stage is light.
OWNERS = {
    "httpx": {"verifier"},
    "datasets": {"row_files"},
    "huggingface_hub": {"verifier"},
    "llvmlite": {"vllm_engine"},
    "loguru": {"draft_model"},
    "numpy": {"verifier_values", "vocab_map", "weight_values"},
    "openai": {"serving", "suite"},
    "prometheus_client": {"serving"},
    "pyarrow": {"row_files", "samples"},
    "ray": {"ray_extraction"},
    "safetensors": {"checkpoints", "engine_load", "hidden_states", "parity_probe", "vocab_map", "warm_start"},
    "speculators": {"cpu_draft", "draft_model", "parity", "process_group", "training"},
    "torch": {
        *("checkpoints", "cpu_attention", "cpu_draft", "cpu_head", "cpu_norm", "dequantise", "draft_model"),
        *(
            "draft_walk",
            "engine_load",
            "engine_parity",
            "extraction",
            "fp8",
            "gpus",
            "greedy_ties",
            "hidden_states",
            "mapped_pages",
            "reference_model",
        ),
        *("hidden_states_connector", "parity", "parity_probe", "process_group", "shard_file", "sharding", "training"),
        *("training_data", "training_state", "vllm_engine", "warm_start", "witness"),
    },
    "tqdm": {"extraction", "question_turns", "ray_extraction", "sample_making", "serving", "suite", "training_curves"},
    "transformers": {"chat_tokenizer", "cpu_norm", "dequantise", "draft_model", "reference_model"},
    "vllm": {"answers", "engine_load", "engine_parity", "extraction", "hidden_states_connector", "vllm_engine"},
}
LIGHT = set(sys.stdlib_module_names) | {"__future__", "cerberus", "yaml", "eagle3"}


@pytest.mark.parametrize("path", [*MODULES, *STAGE_MODULES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_heavy_libraries_are_imported_by_their_owners_only(path):
    imported = {name.split(".")[0] for name in imports_of(path)} - LIGHT
    owned = {library for library, owners in OWNERS.items() if path in MODULES and path.stem in owners}
    assert imported == owned


def test_importing_every_light_module_loads_nothing_heavy():
    """In one process: what an owner imports at its top would show here if a light module imported that owner."""
    owners = set().union(*OWNERS.values())
    light = [name for name in map(dotted, MODULES) if not (closure_stems(name) & owners)]
    code = f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert len(light) > 20
    assert not {name.split(".")[0] for name in done.stdout.split()} & set(OWNERS)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package(module: str) -> str:
    """eagle3.checks.size_rules belongs to eagle3.checks; eagle3.params stands alone."""
    return ".".join(module.split(".")[:2])


def closure_stems(module: str) -> set[str]:
    return {Path(file).stem for file in closure(module)}


@pytest.mark.parametrize("name", STAGES)
def test_code_deps_are_exactly_the_transitive_imports(name):
    declared = {dep for dep in STAGES[name]["deps"] if dep.endswith(".py")}
    assert declared == closure(module_of(STAGES[name])), "run: python -m tests.code_deps"


@pytest.mark.parametrize("name", STAGES)
def test_params_are_exactly_the_sections_that_the_stage_reads(name):
    tree = ast.parse((ROOT / f"{module_of(STAGES[name]).replace('.', '/')}.py").read_text())
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("stage.params", "stage.params.engines"):
            section = "engines." if ast.unparse(node.value).endswith("engines") else ""
            read.add(section + node.attr)
    assert read - {"engines"} == set(STAGES[name].get("params", []))


@pytest.mark.parametrize("name", STAGES)
def test_stage_name_is_its_module_and_its_command_is_static(name):
    assert STAGES[name]["cmd"] == f"python -m stages.{name.replace('-', '_')}"
    assert "${" not in (ROOT / "dvc.yaml").read_text()


@pytest.mark.parametrize("name", STAGES)
def test_no_out_is_uncached_or_persistent(name):
    for out in STAGES[name].get("outs", []):
        options = next(iter(out.values())) if isinstance(out, dict) else {}
        assert set(options) <= {"push"}, "cache: false and persist: true switch the run cache off"


def test_every_table_of_a_stage_is_drawn_by_columns_that_it_has():
    """Without a plot of its own DVC draws a table's last column over the number of the row."""
    tables = {name for stage in STAGES.values() for plot in stage.get("plots", []) for name in plot}
    plots = [definition for plot in read_yaml(ROOT / "dvc.yaml")["plots"] for definition in plot.values()]
    assert {name for plot in plots for name in plot["y"]} == tables
    for plot in plots:
        for name, columns in plot["y"].items():
            header = (ROOT / name).read_text().splitlines()[0].split(",")
            assert {plot["x"], *([columns] if isinstance(columns, str) else columns)} <= set(header), name


def test_every_section_of_params_has_a_reader():
    read = {key.split(".")[0] for stage in STAGES.values() for key in stage.get("params", [])}
    assert read == set(RECORDS) | {"seed"}


def test_modules_import_one_way():
    known = {dotted(path) for path in MODULES}
    graph = {dotted(path): known.intersection(imports_of(path)) for path in MODULES}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_packages_import_one_way():
    """The modules of eagle3/ itself count one by one: most are what everything stands on, __main__ is the top."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        graph.setdefault(package(dotted(path)), set()).update(
            package(name) for name in imports_of(path) if file_of(name) in MODULES
        )
    assert list(graphlib.TopologicalSorter({name: used - {name} for name, used in graph.items()}).static_order())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_library_never_imports_a_stage(path):
    assert not [name for name in imports_of(path) if name.split(".")[0] == "stages"]


@pytest.mark.parametrize("path", [path for path in [*MODULES, *STAGE_MODULES] if path.stem == "__init__"], ids=dotted)
def test_package_files_hold_a_docstring_at_most(path):
    assert all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)


@pytest.mark.parametrize("path", [*MODULES, *STAGE_MODULES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_file_opens_with_what_it_holds(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
