"""A verdict on a draft: its config against the rules of the server; what was looked at and what was not.

Light: the standard library and cerberus. What needs tensors is in `eagle3.checks.checkpoint_check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3.checks.aux_id_rules import AUX_ID_RULES
from eagle3.checks.config_rules import CONFIG_RULES, Given, Rule
from eagle3.checks.draft_config import SCHEMA, DraftConfig, parse_draft_config, type_problems
from eagle3.checks.servers import SERVERS
from eagle3.checks.sglang_rules import SGLANG_CONFIG_RULES, SGLANG_NESTED_RULES
from eagle3.checks.sglang_tensors import as_sglang_reads
from eagle3.checks.size_rules import SIZE_RULES
from eagle3.checks.verifier_rules import VERIFIER_RULES
from eagle3.formats.config_formats import recognise
from eagle3.formats.json_files import JsonFile, printable, read_json_object, spelled
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import Change, Problem, has_errors, repairable, sorted_problems
from eagle3.verifiers.verifier_config import VerifierConfig

VLLM_RULES: tuple[Rule, ...] = (*CONFIG_RULES, *SIZE_RULES, *AUX_ID_RULES, *VERIFIER_RULES)
MANY = 40
# A repetition of these with two values changes nothing that a server computes.
WITHOUT_WEIGHT = {"dtype", "torch_dtype", "use_cache", "initializer_range", "tie_word_embeddings"}


@dataclass
class Verdict:
    """What was found, and what was looked at and what not, in the words of `--json`.

    counts: how many tensors and parameters met each fate, where a load was simulated.
    """

    problems: list[Problem] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "error" if has_errors(self.problems) else "warning" if self.problems else "ok"

    def skip(self, what: str, why: str) -> None:
        self.not_checked.append({"what": what, "why": why})

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "problems": [problem.as_dict() for problem in sorted_problems(self.problems)],
            "checked": self.checked,
            "not_checked": self.not_checked,
        }


@dataclass(frozen=True)
class Epochs:
    """The verdicts over all checkpoints of a folder, by the name of the epoch."""

    verdicts: dict[str, Verdict]

    def num(self, severity: str) -> int:
        return sum(problem.severity == severity for verdict in self.verdicts.values() for problem in verdict.problems)

    def problems(self) -> list[Problem]:
        """Every problem once, its place led by the epoch."""
        return [
            replace(problem, where=f"{name}: {problem.where}")
            for name, verdict in self.verdicts.items()
            for problem in sorted_problems(verdict.problems)
        ]

    def as_dict(self) -> dict[str, Any]:
        """For a report: a dict of numbers and texts without times or paths."""
        epochs = {
            name: {"verdict": verdict.verdict, "problems": [problem.as_dict() for problem in verdict.problems]}
            | ({"counts": verdict.counts} if verdict.counts else {})
            for name, verdict in self.verdicts.items()
        }
        return {"epochs": epochs, "errors": self.num("error"), "warnings": self.num("warning")}


def check_config(path: Path, verifier: VerifierConfig | None, engine: str = "vllm") -> Verdict:
    """The rules that need no tensors, over a config.json or the folder that holds one; `engine`: a key of SERVERS."""
    file = path / "config.json" if path.is_dir() else path
    verdict = Verdict()
    config = judged_config(read_json_object(file), {}, verifier, verdict, engine)
    verdict.skip("tensors", "only the config was asked for")
    if config:
        apply_config_rules(as_given(config, {}, verifier, engine), engine, verdict)
    return verdict


def judged_config(
    file: JsonFile,
    tensors: Mapping[str, TensorHeader],
    verifier: VerifierConfig | None,
    verdict: Verdict,
    engine: str = "vllm",
) -> DraftConfig | None:
    """The config's record, or None where its problems leave nothing to go on with."""
    verdict.problems += [_repeated(key.where, key.values) for key in file.repeated[:MANY]]
    recognised, problems = recognise(file.value, tensors, SERVERS[engine].name)
    verdict.problems += problems
    verdict.checked.append("format")
    if verifier is None:
        verdict.skip("agreement with the verifier", "no --verifier was given")
    if recognised is None:
        return None
    problems, raw = type_problems(recognised.raw, recognised.nested, SERVERS[engine].name)
    verdict.problems += problems
    verdict.checked.append("types")
    if raw is None:
        return None
    config = parse_draft_config(raw, recognised.variant, recognised.nested)
    return replace(config, trained_for=recognised.trained_for)


def as_given(
    config: DraftConfig, tensors: Mapping[str, TensorHeader], verifier: VerifierConfig | None, engine: str
) -> Given:
    """What the rules look at: the config as that server's classes resolve it."""
    return Given(as_sglang_reads(config) if engine == "sglang" else config, tensors, verifier, SERVERS[engine])


def apply_config_rules(given: Given, engine: str, verdict: Verdict) -> None:
    if engine == "vllm":
        apply_rules(VLLM_RULES, given, verdict, "config")
    elif given.config.nested:
        apply_rules(SGLANG_NESTED_RULES, given, verdict, "config format")
        verdict.skip("the other rules of the config", "SGLang does not read this format; export the draft first")
    else:
        apply_rules(SGLANG_CONFIG_RULES, given, verdict, "config")


def apply_rules(rules: tuple[Rule, ...], given: Given, verdict: Verdict, name: str) -> None:
    for rule in rules:
        verdict.problems += rule(given)
    verdict.checked.append(name)


def _repeated(where: str, values: tuple[Any, ...]) -> Problem:
    """An error where the values differ and change what is computed: nobody can tell which the training used."""
    differ = any(value != values[0] for value in values[1:])
    key = where.rpartition(".")[2]
    severity = "error" if differ and key in SCHEMA and key not in WITHOUT_WEIGHT else "warning"
    found = " and ".join(spelled(value, 60) for value in values[:4])
    consequence = "every JSON reader keeps the last one without a word"
    problem = Problem("repeated-key", printable(where), found, "the key once", "keep one", consequence, severity)
    if severity == "error":
        return problem
    return repairable(replace(problem, fix=""), Change("keep", printable(where), values[-1]))
