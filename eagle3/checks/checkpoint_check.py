"""A checkpoint folder judged from config and headers: rules, their agreement with the tensors, the simulated load.

Light: the standard library and cerberus. Values (numpy) and the witness (vllm) are asked for by their own commands.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eagle3.checks.config_check import VLLM_RULES, Verdict, apply_config_rules, apply_rules, as_given, judged_config
from eagle3.checks.config_rules import Given, Rule
from eagle3.checks.load_problems import MANY, common_prefix, load_problems, prefix_problem
from eagle3.checks.quantisation_rules import QUANTISATION_RULES
from eagle3.checks.servers import SERVERS
from eagle3.checks.sglang_load import simulate_sglang_load, takes_prefix
from eagle3.checks.sglang_rules import SGLANG_CONFIG_RULES, SGLANG_NESTED_RULES
from eagle3.checks.sglang_tensor_rules import SGLANG_TENSOR_RULES
from eagle3.checks.sglang_tensors import shares_embedding
from eagle3.checks.sglang_value_rules import dtype_of_the_draft
from eagle3.checks.simulated_load import SimulatedLoad, simulate_load
from eagle3.checks.tensor_rules import TENSOR_RULES
from eagle3.checks.tokenizer_agreement import compare_tokenizers
from eagle3.formats.checkpoint_files import CheckpointTensors, read_checkpoint_tensors
from eagle3.formats.config_formats import canonical
from eagle3.formats.json_files import read_json_object
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import at_most
from eagle3.verifiers.verifier_config import VerifierConfig

TENSOR_RULES_OF = {"vllm": (*TENSOR_RULES, *QUANTISATION_RULES), "sglang": SGLANG_TENSOR_RULES}
LOADS = {"vllm": simulate_load, "sglang": simulate_sglang_load}


def rule_rows() -> list[tuple[str, str, str, str]]:
    """(name, server, truth, source) of every rule, in the order in which they run, for the README's table."""
    servers: dict[Rule, str] = dict.fromkeys((*VLLM_RULES, *TENSOR_RULES, *QUANTISATION_RULES), "vLLM")
    for rule in (*SGLANG_NESTED_RULES, *SGLANG_CONFIG_RULES, *SGLANG_TENSOR_RULES):
        servers[rule] = "both" if servers.get(rule, "SGLang") != "SGLang" else "SGLang"
    rows = []
    for rule, server in servers.items():
        truth, _, source = (rule.__doc__ or "").partition("Source:")
        rows.append((rule.__name__.replace("_", " "), server, truth.strip().split("\n")[0], " ".join(source.split())))
    return rows


def check_checkpoint(
    folder: Path,
    verifier: VerifierConfig | None,
    config_rules: bool = True,
    values: bool = False,
    verifier_folder: Path | None = None,
    engine: str = "vllm",
    tensor_parallel_size: int | None = None,
) -> tuple[Verdict, SimulatedLoad | None]:
    """The config's rules (unless switched off), their agreement with the tensors, the simulated load; `values`: numpy.

    `engine` is a key of SERVERS. With a `verifier_folder` the tokenizers are compared if both have one; with `values`
    also head and embedding, where it holds weights.

    A folder may hold a config alone: then the rest is among `not_checked`. `InvalidInput` only for files that cannot
    be read at all.
    """
    verdict = Verdict()
    file = read_json_object(folder / "config.json")
    checkpoint = read_checkpoint_tensors(folder, SERVERS[engine].name)
    verdict.problems += checkpoint.problems
    tensors = _without_prefix(checkpoint, verdict, engine)
    config = judged_config(file, tensors, verifier, verdict, engine)
    if config is None:
        verdict.skip("rules and load", "the config does not say what the draft is")
        return verdict, None
    canonical_tensors = {canonical(name): tensor for name, tensor in tensors.items()}
    given = as_given(config, canonical_tensors, verifier, engine)
    given = replace(given, tensor_parallel_size=tensor_parallel_size)
    if config_rules:
        apply_config_rules(given, engine, verdict)
    else:
        verdict.skip("config rules", "only the load was asked for")
    vocab_size = (verifier.vocab_size if verifier else None) or config.vocab_size
    load = None
    if engine == "sglang" and config.nested:
        verdict.skip("load", "SGLang does not read this format; export the draft first")
    else:
        if tensors:
            apply_rules(TENSOR_RULES_OF[engine], given, verdict, "config against tensors")
        load = _load(given, tensors, vocab_size, verdict, engine)
    if engine == "sglang":
        _unknown_to_us(given, verdict, compared=values and verifier_folder is not None)
    if verifier_folder and verifier_folder.is_dir():
        compare_tokenizers(folder, verifier_folder, verdict)
    if values and tensors:
        _values(given, vocab_size, verifier_folder, verdict)
    verdict.problems = at_most(MANY, verdict.problems)
    return verdict, load


def _unknown_to_us(given: Given, verdict: Verdict, compared: bool) -> None:
    """What SGLang does and no rule here says."""
    if given.tensor_parallel_size:
        verdict.skip("tensor parallelism", "only vLLM's rules for it are known here")
    if given.config.quantized:
        verdict.skip("quantised layers", "only vLLM's rules for them are known here")
    if "embed_tokens.weight" in given.tensors and shares_embedding(given.config) and not compared:
        why = f"{given.server.name} puts the verifier's in its place; give --verifier with its weights"
        verdict.skip("whether embed_tokens is the verifier's", why)


def _values(given: Given, vocab_size: int, verifier_folder: Path | None, verdict: Verdict) -> None:
    from eagle3.checks.weight_values import value_problems

    dtype = given.verifier.dtype if given.verifier else None
    if given.server is SERVERS["sglang"]:
        dtype = dtype_of_the_draft(given.config)
    verdict.problems += value_problems(given.tensors, vocab_size, dtype, given.server)
    verdict.checked.append("values")
    if given.verifier is None or verifier_folder is None or not verifier_folder.is_dir():
        verdict.skip("head and embedding against the verifier's", "no folder with the verifier's weights was given")
        return
    from eagle3.checks.verifier_values import compare_with_verifier

    compare_with_verifier(given.tensors, verifier_folder, given.verifier, verdict, given.server.name)


def _without_prefix(checkpoint: CheckpointTensors, verdict: Verdict, engine: str) -> dict[str, TensorHeader]:
    tensors = checkpoint.tensors
    while prefix := common_prefix(list(tensors)):
        if engine == "sglang" and takes_prefix(prefix, tensors):
            kept = f"{prefix}lm_head"
        else:
            verdict.problems.append(prefix_problem(prefix, SERVERS[engine]))
            kept = "\0"
        short = {name: name if name.startswith(kept) else name.removeprefix(prefix) for name in tensors}
        tensors = {short[name]: replace(tensor, name=short[name]) for name, tensor in tensors.items()}
    return tensors


def _load(
    given: Given, tensors: dict[str, TensorHeader], vocab_size: int, verdict: Verdict, engine: str
) -> SimulatedLoad | None:
    if not tensors:
        verdict.skip("load", "no safetensors in the folder")
    elif given.config.quantized:
        verdict.skip("load", "the draft is quantised: its packed tensors have other names and shapes")
    else:
        load = LOADS[engine](given.config, tensors, vocab_size)
        verdict.problems += load_problems(load, given.config, vocab_size, given.server)
        verdict.counts = load.counts()
        verdict.checked.append("load")
        return load
    return None
