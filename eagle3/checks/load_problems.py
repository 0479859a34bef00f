"""What a simulated load means for the user: each tensor not used as it is, each parameter that nothing fills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from eagle3.checks.draft_config import DraftConfig
from eagle3.checks.expected_tensors import SHARED, ZERO
from eagle3.checks.servers import SERVERS, Server
from eagle3.checks.simulated_load import CUT, DROPPED_SILENTLY, REFUSED, SimulatedLoad, TensorFate, unfilled
from eagle3.formats.config_formats import canonical
from eagle3.formats.json_files import printable
from eagle3.problems import Change, Problem, repairable

PLAIN = re.compile(r"(?:fc|midlayer|layers\.0)\.")
PREFIXED = re.compile(r"((?:[A-Za-z0-9_-]{1,40}\.){1,8}?)(?:fc|midlayer|layers\.0)\.")
FEW, MANY = 4, 100
PACKED = (
    "_packed", "_scale", "_scale_inv", "_zero_point", "_shape", ".qweight", ".qzeros", ".scales", ".g_idx", ".absmax",
    ".quant_map", ".quant_state.bitsandbytes__nf4",
)  # fmt: skip
TRAINER = ("optimizer.", "scheduler.", "ema.", "verifier_lm_head", "verifier_norm")


def load_problems(
    load: SimulatedLoad, config: DraftConfig, verifier_vocab_size: int, server: Server = SERVERS["vllm"]
) -> Iterator[Problem]:
    for fate in load.tensors:
        yield from _tensor_problems(fate, server)
    yield from _unknown_tensors(load, config, verifier_vocab_size, server)
    yield from _twice(load, server)
    yield from _unset_problems(load, server)
    for state in load.parameters:
        if state.state == SHARED and state.parameter.name.startswith("lm_head"):
            yield _borrowed_head(config, verifier_vocab_size, server)
        elif state.state == ZERO:
            names = {fate.tensor.name for fate in load.tensors}
            yield _no_map(config, verifier_vocab_size, "t2d" in names and "d2t" not in names, server)


def common_prefix(names: list[str]) -> str:
    """What a trainer or wrapper has put before fc and the layers (`module.`, `draft_model.model.`), or ''.

    Maps and heads may stand without it. A draft that has fc or a layer under their own names has no prefix.
    """
    if any(PLAIN.match(name) for name in names):
        return ""
    found = {match[1] for name in names if (match := PREFIXED.match(name))}
    return found.pop() if len(found) == 1 else ""


def prefix_problem(prefix: str, server: Server) -> Problem:
    refusal = f"ValueError, there is no module or parameter named model.{prefix.rstrip('.')}"
    consequence = f"refuses: {refusal}" if server.unknown == "refuses" else f"{server.unknown} every tensor"
    problem = Problem(
        "name-prefix",
        f"{prefix}*",
        "the prefix of a trainer or wrapper before the tensor names",
        "the names without it",
        "the rest was judged as if that were done",
        f"{server.name} {consequence}",
    )
    return repairable(problem, Change("strip", prefix))


def _tensor_problems(fate: TensorFate, server: Server) -> Iterator[Problem]:
    name, shape = printable(fate.tensor.name), str(list(fate.tensor.shape))
    expected = str(list(fate.expected))
    if fate.fate == CUT:
        fix = "correct the config's sizes, or export again"
        yield Problem("tensor-cut", name, shape, expected, fix, f"{server.name} {fate.why}")
    elif fate.fate == DROPPED_SILENTLY and not fate.unknown:
        fix = "set the flag that the tensor belongs to, or train without it"
        yield Problem("tensor-dropped", name, shape, "a tensor that the server uses", fix, f"{server.name}: {fate.why}")
    elif fate.fate == REFUSED and not fate.unknown:
        fix = "correct the config's sizes, or export again"
        problem = Problem("tensor-shape", name, shape, expected, fix, f"{server.name} refuses: {fate.why}")
        flat = name == "d2t" and len(fate.tensor.shape) > 1 and prod(fate.tensor.shape) == prod(fate.expected)
        yield repairable(replace(problem, fix=""), Change("one dimension", "d2t")) if flat else problem


def _unknown_tensors(
    load: SimulatedLoad, config: DraftConfig, verifier_vocab_size: int, server: Server
) -> Iterator[Problem]:
    """One problem a tensor that the class does not have; one for all where many share the first word of their name."""
    heads = {fate.tensor.shape[:1] for fate in load.tensors if canonical(fate.tensor.name) == "lm_head.weight"}
    full = config.draft_vocab_size == verifier_vocab_size and not heads - {(verifier_vocab_size,)}
    groups: dict[str, list[TensorFate]] = {}
    for fate in load.tensors:
        if fate.unknown:
            groups.setdefault(fate.tensor.name.partition(".")[0], []).append(fate)
    renames = _renames(load)
    for word, fates in groups.items():
        if len(fates) <= FEW or word in ("layers", "midlayer"):
            for fate in fates:
                problem = _unknown_tensor(fate, full, server)
                name = fate.tensor.name
                if name in renames:
                    problem = replace(problem, fix="", changes=())
                    problem = repairable(problem, Change("rename one", name, renames[name]))
                yield problem
            continue
        first = replace(_unknown_tensor(fates[0], full, server), changes=())
        found = f"{len(fates)} tensors, {first.where} and others"
        first = replace(first, where=f"{printable(word)}.*", found=found)
        if _is_layer_0(load, word, fates):
            first = repairable(replace(first, fix="", changes=()), Change("rename", f"{word}.", "layers.0."))
        elif word + "." in TRAINER:
            first = repairable(replace(first, fix="", changes=()), Change("drop", f"{word}.*"))
        yield first


def _renames(load: SimulatedLoad) -> dict[str, str]:
    """Unknown tensor -> the missing one that it must be: the only one of its shape, or of its shape and last words."""
    unknown = {fate.tensor.name: fate.tensor for fate in load.tensors if fate.unknown}
    missing = {
        part.name: part.shape for state in load.parameters if not state.parameter.integer for part in state.missing
    }
    pairs: dict[str, str] = {}
    if len(unknown) > MANY:  # no draft has as many tensors: each would be compared with each
        return pairs
    for name, tensor in unknown.items():
        if tensor.dtype not in ("BF16", "F16", "F32") or printable(name) != name or name.startswith(TRAINER):
            continue
        same = [part for part, shape in missing.items() if shape == tensor.shape]
        rivals = [other for other in unknown.values() if other.shape == tensor.shape]
        alike = [part for part in same if part.split(".")[-2:] == name.split(".")[-2:]]
        if len(alike) == 1 or (len(same) == len(rivals) == 1):
            pairs[name] = (alike or same)[0]
    return {name: part for name, part in pairs.items() if list(pairs.values()).count(part) == 1}


def _is_layer_0(load: SimulatedLoad, word: str, fates: list[TensorFate]) -> bool:
    """Whether these tensors, all of one first word, are what layer 0 lacks: each has the name and shape of a part."""
    parts = {part.name: part.shape for state in load.parameters for part in state.missing}
    rest = {f"layers.0{fate.tensor.name.removeprefix(word)}": fate.tensor.shape for fate in fates}
    return word.isprintable() and word.isascii() and all(parts.get(name) == shape for name, shape in rest.items())


def _unknown_tensor(fate: TensorFate, full_vocabulary: bool, server: Server) -> Problem:
    """full_vocabulary: config and head say that draft and verifier share one vocabulary."""
    name, shape = fate.tensor.name, str(list(fate.tensor.shape))
    refuses = server.unknown == "refuses"
    consequence = f"{server.name} {f'refuses: {fate.why}' if refuses else f'{server.unknown}: {fate.why}'}"
    fix = "remove it, or rename it to what the server calls it"
    changes: tuple[Change, ...] = ()
    if name == "d2t" and not full_vocabulary:
        fix = "correct draft_vocab_size: with it equal to the verifier's the class has no map"
    elif name == "d2t":
        fix, changes = "the vocabularies are equal, so a map (all zero) has nothing to do", (Change("drop", name),)
    elif name.endswith(PACKED):
        fix = "write the quantization_config that the tensors were packed with, or dequantise"
    elif name.startswith(TRAINER):
        fix, changes = "the trainer's state, no part of the draft", (Change("drop", name),)
    elif ("q_norm" in name or "k_norm" in name) and refuses:
        fix = 'write architectures: ["Eagle3Qwen3ForCausalLM"] and model_type: "qwen3", if these norms were trained'
    elif name.endswith(".bias"):
        fix = "train without this bias, or serve with a server that has it"
    problem = Problem("unknown-tensor", printable(name), shape, "a tensor that the class has", fix, consequence)
    return repairable(problem, *changes) if changes and name == printable(name) else problem


def _twice(load: SimulatedLoad, server: Server) -> Iterator[Problem]:
    """`midlayer.x` beside `layers.0.x`: both go into the same place."""
    seen: dict[str, str] = {}
    for fate in load.tensors:
        key = canonical(fate.tensor.name)
        if key in seen:
            consequence = f"{server.name} loads both, and the one that it reads last stays"
            where = printable(fate.tensor.name)
            yield Problem(
                "tensor-twice", where, f"beside {printable(seen[key])}", "one of them", "remove one", consequence
            )
        seen.setdefault(key, fate.tensor.name)
    for state in load.parameters:
        whole = state.parameter.name.removeprefix("model.")
        both = [part.name for part in state.parameter.parts if len(state.parameter.parts) > 1 and part.name in seen]
        if both and whole in seen:
            consequence = f"{server.name} loads both, and the one that it reads last stays"
            found = f"beside {printable(seen[both[0]])}"
            yield Problem("tensor-twice", printable(seen[whole]), found, "one of them", "remove one", consequence)


def _unset_problems(load: SimulatedLoad, server: Server) -> Iterator[Problem]:
    """One problem a missing tensor; one for all layers that have no tensor. A refused tensor was reported as such."""
    # A tensor that is there and was not taken has a problem of its own.
    refused = {canonical(fate.tensor.name) for fate in load.tensors if fate.fate in (REFUSED, DROPPED_SILENTLY)}
    missing = [(state, part) for state in unfilled(load) for part in state.missing if part.name not in refused]
    present = {_layer(canonical(fate.tensor.name)) for fate in load.tensors}
    empty = sorted({_layer(part.name) for _, part in missing} - present - {-1})
    if empty:
        where = f"layers.{empty[0]}.*" if len(empty) == 1 else f"layers.{empty[0]}.* to layers.{empty[-1]}.*"
        count = sum(_layer(part.name) in empty for _, part in missing)
        consequence = f"{server.name} loads without a word: {len(empty)} layers keep {server.unset}"
        fix = "export them, or correct num_hidden_layers"
        yield Problem("tensor-missing", where, "absent", f"{count} tensors", fix, consequence)
    for state, part in missing:
        if _layer(part.name) not in empty:
            consequence = f"{server.name} loads without a word: {state.parameter.name} keeps {server.unset}"
            yield Problem("tensor-missing", part.name, "absent", str(list(part.shape)), "export it", consequence)


def _layer(name: str) -> int:
    """The number in `layers.N.`, -1 outside the layers."""
    parts = name.split(".")
    return (
        int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdecimal() and len(parts[1]) < 7 else -1
    )


def _borrowed_head(config: DraftConfig, verifier_vocab_size: int, server: Server) -> Problem:
    expected = str([config.draft_vocab_size, config.hidden_size])
    if config.draft_vocab_size != verifier_vocab_size:
        consequence = (
            f"{server.name} loads without a word: the verifier's head, {verifier_vocab_size} wide, under a map of "
            f"{config.draft_vocab_size}"
        )
        return Problem("tensor-missing", "lm_head.weight", "absent", expected, "export the draft's head", consequence)
    consequence = f"{server.name} borrows the verifier's head"
    if server is SERVERS["vllm"]:
        consequence += "; SGLang does so only with draft_vocab_size: null, else random"
    fix = "nothing, if the draft was trained against the verifier's head; else export its own"
    return Problem("borrowed-head", "lm_head.weight", "absent", expected, fix, consequence, "warning")


def _no_map(config: DraftConfig, verifier_vocab_size: int, has_mask: bool, server: Server) -> Problem:
    problem = Problem(
        "tensor-missing",
        "d2t",
        "absent",
        f"int64 [{config.draft_vocab_size}], offsets from draft id to verifier id",
        "export d2t",
        f"{server.name} loads without a word: row i of the head means token i of {verifier_vocab_size}",
    )
    remark = f"if it marks {config.draft_vocab_size} tokens; trainers cut the head by it"
    return repairable(replace(problem, fix=remark), Change("from mask", "d2t")) if has_mask else problem
