"""The lists of verifier classes against the installed vLLM: by its source, and by importing classes of each kind."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from eagle3.verifiers.eagle3_verifiers import WITH_EAGLE3, WITHOUT_EAGLE3


@pytest.fixture(scope="module")
def models() -> Path:
    """vLLM's folder of model classes, found without importing vLLM."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model_executor/models"


@pytest.fixture(scope="module")
def registry(models) -> dict[str, str]:
    """Architecture -> class name, of the text and multimodal models that the registry lists one by one."""
    tables = {}
    for node in ast.parse((models / "registry.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "_TEXT_GENERATION_MODELS",
            "_MULTIMODAL_MODELS",
        ):
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    tables[str(key.value)] = str(ast.literal_eval(value)[1])
    return tables


@pytest.fixture(scope="module")
def by_source(models, registry) -> dict[str, bool | None]:
    """Architecture -> whether its class inherits SupportsEagle3, None where no file defines a class of that name."""
    bases = defaultdict(set)
    for path in models.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}

    def inherits(name: str, seen: frozenset[str] = frozenset()) -> bool:
        return name == "SupportsEagle3" or any(inherits(base, seen | {name}) for base in bases[name] - seen)

    return {name: inherits(cls) if cls in bases else None for name, cls in registry.items()}


def test_the_lists_are_the_registrys_and_disjoint(registry, by_source):
    assert frozenset() == WITH_EAGLE3 & WITHOUT_EAGLE3
    assert registry.keys() >= WITH_EAGLE3 | WITHOUT_EAGLE3
    assert {name for name in registry if by_source[name] is not None} <= WITH_EAGLE3 | WITHOUT_EAGLE3


def test_every_class_that_inherits_the_interface_is_in_the_list(by_source):
    assert {name for name, found in by_source.items() if found} <= WITH_EAGLE3
    assert len(WITH_EAGLE3) > 70


FOUND = {
    "LlamaForCausalLM": True,
    "DeepseekV32ForCausalLM": True,
    "KimiLinearForCausalLM": True,
    "KimiK25ForConditionalGeneration": True,
    "DeepseekV4ForCausalLM": True,
    "MixtralForCausalLM": False,
    "Gemma2ForCausalLM": False,
    "Qwen2MoeForCausalLM": False,
}
# In a process of its own: once these classes are imported, no engine starts there (vllm/triton_utils/dispatcher.py
# looks into every object of every module, and one of theirs has no plain __dict__).
ASK = """
import json, sys
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry
found = {name: bool(supports_eagle3(ModelRegistry.models[name].load_model_cls())) for name in sys.argv[1:]}
print(json.dumps(found))
"""


@pytest.mark.engine
def test_vllm_itself_says_the_same():
    command = [sys.executable, "-c", ASK, *FOUND]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == FOUND
