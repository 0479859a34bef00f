"""A checkpoint folder judged from config and headers: rules, their agreement with the tensors, the simulated load.

Light: the standard library and cerberus. Values (numpy) and the witness (vllm) are asked for by their own commands.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eagle3.checks.config_check import RULES, Verdict, apply_rules, judged_config
from eagle3.checks.config_rules import Given
from eagle3.checks.load_problems import common_prefix, load_problems, prefix_problem
from eagle3.checks.quantisation_rules import QUANTISATION_RULES
from eagle3.checks.simulated_load import SimulatedLoad, simulate_load
from eagle3.checks.tensor_rules import TENSOR_RULES
from eagle3.formats.checkpoint_files import CheckpointTensors, read_checkpoint_tensors
from eagle3.formats.config_formats import canonical
from eagle3.formats.json_files import read_json_object
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.verifiers.verifier_config import VerifierConfig


def rule_rows() -> list[tuple[str, str, str]]:
    """(name, truth, source) of every rule, in the order in which they run; the README's table is made of them."""
    rows = []
    for rule in (*RULES, *TENSOR_RULES, *QUANTISATION_RULES):
        truth, _, source = (rule.__doc__ or "").partition("Source:")
        rows.append((rule.__name__.replace("_", " "), truth.strip().split("\n")[0], " ".join(source.split())))
    return rows


def check_checkpoint(
    folder: Path,
    verifier: VerifierConfig | None,
    config_rules: bool = True,
    values: bool = False,
    verifier_folder: Path | None = None,
) -> tuple[Verdict, SimulatedLoad | None]:
    """The config's rules (unless switched off), their agreement with the tensors, the simulated load; `values`: numpy.

    With `values` and a `verifier_folder` that holds weights, head and embedding are compared with the verifier's.

    A folder may hold a config alone: then the rest is among `not_checked`. `InvalidInput` only for files that cannot
    be read at all.
    """
    verdict = Verdict()
    file = read_json_object(folder / "config.json")
    checkpoint = read_checkpoint_tensors(folder)
    verdict.problems += checkpoint.problems
    tensors = _without_prefix(checkpoint, verdict)
    config = judged_config(file, tensors, verifier, verdict)
    if config is None:
        verdict.skip("rules and load", "the config does not say what the draft is")
        return verdict, None
    given = Given(config, {canonical(name): tensor for name, tensor in tensors.items()}, verifier)
    if config_rules:
        apply_rules(RULES, given, verdict, "config")
    else:
        verdict.skip("config rules", "only the load was asked for")
    if tensors:
        apply_rules((*TENSOR_RULES, *QUANTISATION_RULES), given, verdict, "config against tensors")
    vocab_size = (verifier.vocab_size if verifier else None) or config.vocab_size
    load = _load(given, tensors, vocab_size, verdict)
    if values and tensors:
        _values(given, vocab_size, verifier_folder, verdict)
    return verdict, load


def _values(given: Given, vocab_size: int, verifier_folder: Path | None, verdict: Verdict) -> None:
    from eagle3.checks.weight_values import value_problems

    verdict.problems += value_problems(given.tensors, vocab_size, given.verifier.dtype if given.verifier else None)
    verdict.checked.append("values")
    if given.verifier is None or verifier_folder is None or not verifier_folder.is_dir():
        verdict.skip("head and embedding against the verifier's", "no folder with the verifier's weights was given")
        return
    from eagle3.checks.verifier_values import compare_with_verifier

    compare_with_verifier(given.tensors, verifier_folder, given.verifier, verdict)


def _without_prefix(checkpoint: CheckpointTensors, verdict: Verdict) -> dict[str, TensorHeader]:
    tensors = checkpoint.tensors
    while prefix := common_prefix(list(tensors)):
        verdict.problems.append(prefix_problem(prefix))
        tensors = {
            name.removeprefix(prefix): replace(tensor, name=name.removeprefix(prefix))
            for name, tensor in tensors.items()
        }
    return tensors


def _load(given: Given, tensors: dict[str, TensorHeader], vocab_size: int, verdict: Verdict) -> SimulatedLoad | None:
    if not tensors:
        verdict.skip("load", "no safetensors in the folder")
    elif given.config.quantized:
        verdict.skip("load", "the draft is quantised: its packed tensors have other names and shapes")
    else:
        load = simulate_load(given.config, tensors, vocab_size)
        verdict.problems += load_problems(load, given.config, vocab_size)
        verdict.counts = load.counts()
        verdict.checked.append("load")
        return load
    return None
