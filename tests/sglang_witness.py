"""The simulation of SGLang's load against its real classes, over the corpus. By hand, since SGLang is in no lock:

    pip install --no-deps --target DIR sglang==0.5.23 triton==3.7.1
    python -m tests.sglang_witness DIR

DIR must lie outside the environment: SGLang asks for another torch than vLLM. Its two EAGLE-3 classes run on a CPU with
the environment's torch and transformers all the same; what they only import (MISSING) is stood in for by empty modules.
Each checkpoint is loaded by the real class in the order of eagle_worker_v2.py: load_weights, then set_embed or
set_embed_and_head. Then every set_eagle3_layers_to_capture is asked for the layers that our table says.
"""

from __future__ import annotations

import importlib.machinery
import json
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

MISSING = ("IPython", "torchvision")
# The real class refuses these before a tensor is read, or builds no draft at all.
BEFORE = {
    "activation", "class-name", "config-type", "dtype", "heads", "layers", "model-type", "nested-config", "not-eagle3",
    "other-drafter", "rope", "tied-head", "vocabulary", "window",
}  # fmt: skip


# Classes of drafts and of other work than generation; the language model of a class that asks it for the layers.
DRAFT = re.compile("NextN$|MTP$|Eagle3?$|Assistant|EmbeddingGemma|MindSpore")
INNER = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}


class StandIns:
    """Finds empty modules for what is imported and not used."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _stand_in(module, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _stand_in(module: types.ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=f"{module.__name__}.{name}")


def start(packages: Path) -> dict[str, type]:
    """SGLang with one process in its groups; its two draft classes by name."""
    import transformers.models.auto.image_processing_auto  # noqa: F401 - decides on torchvision before the stand-ins

    sys.path.append(str(packages))
    sys.meta_path.append(StandIns())  # type: ignore[arg-type]
    from sglang.srt.distributed import parallel_state
    from sglang.srt.models.kimi_k25_eagle3 import Eagle3DeepseekV2ForCausalLM
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy"), role="witness", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with tempfile.NamedTemporaryFile() as store:
        parallel_state.init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        parallel_state.initialize_model_parallel("gloo")
    return {each.__name__: each for each in (LlamaForCausalLMEagle3, Eagle3DeepseekV2ForCausalLM)}


def load(classes: dict[str, type], folder: Path, simulated: Any) -> Any:
    """What the real class did with a checkpoint, as an EngineLoad; SGLang's errors are data here."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.utils.hf_transformers import get_config

    from eagle3.checks import engine_load

    name = ""
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = get_config(str(folder), trust_remote_code=False)
        name = config.architectures[0]
        model = classes[name](config)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            engine_load._bits(parameter).fill_(engine_load._pattern(parameter))
        model.load_weights(iter(load_file(folder / "model.safetensors").items()))
        hot = model.hot_token_id
        written = {key: each.detach().clone() for key, each in parameters.items()}
        _share(model)
    except Exception as error:  # whatever the server raises is what the witness reports
        return engine_load.EngineLoad(name, {}, {}, engine_load._told(error), ())
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = dict(model.named_parameters())
    states = {key: engine_load._state(each) for key, each in parameters.items()}
    shapes = {key: tuple(each.shape) for key, each in parameters.items()}
    for state in simulated.parameters:
        if state.parameter.name == "hot_token_id":  # no parameter: any shape is taken, which the simulation says
            states["hot_token_id"] = "unset" if hot is None else "filled"
            shapes["hot_token_id"] = state.parameter.parts[0].shape
    return engine_load.EngineLoad(name, states, shapes, "", tuple(_differing(written, simulated, folder)))


def _differing(written: dict[str, Any], simulated: Any, folder: Path) -> Iterator[str]:
    """As engine_load's, for tensors under the names of the file, and without those that SGLang pads with zeros."""
    from dataclasses import replace

    from eagle3.checks import engine_load
    from eagle3.formats.safetensors_headers import read_header

    stored = {tensor.begin: tensor for tensor in read_header(folder / "model.safetensors").tensors}
    fates = [
        replace(fate, tensor=stored[fate.tensor.begin])
        for fate in simulated.tensors
        if (
            all(size >= wanted for size, wanted in zip(fate.tensor.shape, fate.expected, strict=False))
            or fate.tensor.shape[1:] == (1,)
        )
        and (fate.parameter not in written or written[fate.parameter].shape[1:] == fate.expected[1:])
    ]
    yield from engine_load._differing(written, replace(simulated, tensors=tuple(fates)))


def _share(model: Any) -> None:
    """init_lm_head of eagle_worker_v2.py; the verifier's weights are full of the pattern, so they count as unset."""
    import torch

    from eagle3.checks import engine_load

    embed = torch.nn.Parameter(torch.empty_like(model.model.embed_tokens.weight), requires_grad=False)
    head = torch.nn.Parameter(torch.empty_like(model.lm_head.weight), requires_grad=False)
    for each in (embed, head):
        engine_load._bits(each).fill_(engine_load._pattern(each))
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None  # no GPU: kimi_k25_eagle3.py calls both
    if model.load_lm_head_from_target:
        model.set_embed_and_head(embed, head)
    else:
        model.set_embed(embed)


def differences(classes: dict[str, type], case: Path) -> Iterator[str]:
    """Where the real class and the simulation differ on one case of the corpus."""
    from eagle3.checks.checkpoint_check import check_checkpoint
    from eagle3.checks.engine_load import witness_problems
    from eagle3.checks.simulated_load import SimulatedLoad
    from eagle3.verifiers.verifier_config import read_verifier_config
    from tests.drafts import write_sparse_tensors

    own = case / "verifier.json"
    verifier = read_verifier_config(own if own.exists() else case.parent / "verifier.json")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes((case / "config.json").read_bytes())
        weights = json.loads((case / "weights.json").read_text())
        write_sparse_tensors(
            folder / "model.safetensors", {name: (dtype, tuple(shape)) for name, (dtype, shape) in weights.items()}
        )
        verdict, simulated = check_checkpoint(folder, verifier, engine="sglang")
        real = load(classes, folder, simulated or SimulatedLoad((), ()))
        codes = {problem.code for problem in verdict.problems if problem.severity == "error"}
        if real.refusal and not codes:
            yield f"refused, and we let it pass: {real.refusal}"
        elif simulated and not codes & {"model-type", "name-prefix"} and not (real.refusal and codes & BEFORE):
            yield from (f"{each.where}: {each.found}, {each.expected}" for each in witness_problems(real, simulated))


def capture_differences() -> Iterator[str]:
    """Every verifier class of the registry: whether it captures at all, and which layers for which list."""
    from sglang.srt.models.registry import ModelRegistry

    from eagle3.layer_ids import sglang_captures, sglang_default, sglang_list
    from eagle3.verifiers.sglang_verifiers import WITH_EAGLE3

    ModelRegistry._load_default_models()
    classes = {name: cls for name, cls in ModelRegistry.models.items() if not DRAFT.search(name)}
    real = {name for name, cls in classes.items() if hasattr(cls, "set_eagle3_layers_to_capture")}
    if real != WITH_EAGLE3:
        yield f"classes that capture: only real {sorted(real - WITH_EAGLE3)}, only ours {sorted(WITH_EAGLE3 - real)}"
    for name in sorted(real):
        for listed in (None, [1, 29, 57], [2, 30, 58], [3, 30, 58], [5, 30, 61]):
            ours = sglang_captures(listed, [name], 61) if listed else sglang_default([name], 61)
            if (seen := _captured(classes, name, listed)) != ours:
                yield f"{name} {listed}: captures {seen}, table {ours}"
        for ids in ([2, 30, 58], [3, 30, 58]):
            if (seen := _captured(classes, name, sglang_list(ids, [name]))) != ids:
                yield f"{name}: our list for {ids} captures {seen}"


def _captured(classes: dict[str, Any], name: str, listed: list[int] | None) -> list[int]:
    """The ids that reach the model; a multimodal class may pass them on to its language model."""
    model = MagicMock()
    model.config.num_hidden_layers = model.config.text_config.num_hidden_layers = 61
    model.model.layers.__len__.return_value = 61
    model.num_layers = 61
    classes[name].set_eagle3_layers_to_capture(model, listed)
    inner = model.language_model.set_eagle3_layers_to_capture
    if inner.called:
        return _captured(classes, INNER[name], inner.call_args[0][0])
    called = model.model.set_eagle3_layers_to_capture
    place = model.language_model if isinstance(model.language_model.layers_to_capture, list) else model.model
    return list(called.call_args[0][0] if called.called else place.layers_to_capture)


def main() -> int:
    from tests.code_deps import ROOT

    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "sglang").is_dir():
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    classes = start(Path(sys.argv[1]))
    cases = sorted(path.parent for path in (ROOT / "tests").glob("*_checkpoints/*/config.json"))
    cases = [case for case in cases if not sys.argv[2:] or case.name in sys.argv[2:]]
    found = [f"{case.name}: {text}" for case in cases for text in differences(classes, case)]
    found += capture_differences()
    print("\n".join([*found, f"{len(cases)} checkpoints, {len(found)} differences"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
