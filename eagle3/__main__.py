"""`python -m eagle3`: what DVC has not. Heavy libraries are imported only inside the command that needs them.

Exit status: 0 ok or warnings only, 1 errors in what was judged, 2 the call itself was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3.checks.config_check import Verdict
    from eagle3.checks.repairs import Repairs
    from eagle3.problems import InvalidInput
    from eagle3.verifiers.verifier_config import VerifierConfig

OK, ERRORS, WRONG_CALL = 0, 1, 2
ENGINES = ("vllm", "sglang")
FORMS = (*ENGINES, "speculators")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Bad input of any kind prints its problems, never a traceback."""
    from eagle3.formats.json_files import printable
    from eagle3.problems import InvalidInput, invalid

    for stream in (sys.stdout, sys.stderr):
        # Problems quote files of any origin; a terminal of another encoding must not turn that into a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    given = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        status = run(given)
        sys.stdout.flush()
    except InvalidInput as error:
        return _refused(given, error)
    except BrokenPipeError:
        # The reader has gone (| head); what is left must not fail again while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:  # a folder without permission, a name that is too long, a disk that fails
        where, fix = printable(str(error.filename or given.command)), "check its name and its permissions"
        found = error.strerror or str(error)
        return _refused(given, invalid("unreadable", where, found, "a file that can be read", fix))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle3", description="Judge, convert and describe EAGLE-3 drafts.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for add in (_add_judges, _add_converters, _add_tellers, _add_pipeline):
        add(commands)
    return parser


def _add_judges(commands: Any) -> None:
    judges = {
        "check": (check, "config rules, tensors and the simulated load of a checkpoint"),
        "validate-config": (validate_config, "the rules of the config alone"),
        "simulate-load": (simulate_load, "what the server does with each tensor"),
    }
    for name, (run, text) in judges.items():
        judge = commands.add_parser(name, help=text, description=text)
        judge.add_argument("path", type=Path, metavar="DIR", help="folder with config.json and *.safetensors")
        judge.add_argument("--verifier", type=Path, metavar="DIR|config.json", help="the model that the draft is for")
        judge.add_argument(
            "--engine", choices=ENGINES, default="vllm", help="the server that will load it: vllm 0.32.0, sglang 0.5.23"
        )
        judge.add_argument("--json", action="store_true", help="print one JSON object")
        judge.set_defaults(run=run)
        if name == "check":
            judge.add_argument("--no-values", action="store_true", help="do not read tensor data, headers alone")
            text = "write a copy to OUT, which must not exist, with every problem repaired whose right value is certain"
            judge.add_argument(
                "--tensor-parallel-size", type=_positive, metavar="N", help="GPUs it will be divided among"
            )
            judge.add_argument("--fix", type=Path, metavar="OUT", help=text)


def _add_converters(commands: Any) -> None:
    convert = commands.add_parser("flatten", help="speculators' format to the flat one, tensors byte for byte")
    convert.add_argument("source", type=Path, metavar="SRC")
    convert.add_argument("target", type=Path, metavar="DST")
    convert.set_defaults(run=flatten)
    export_ = commands.add_parser("export", help="a draft in the form that another server or speculators reads")
    export_.add_argument("source", type=Path, metavar="SRC", help="a draft in any form")
    export_.add_argument("target", type=Path, metavar="DST", help="a new folder")
    export_.add_argument("--engine", choices=FORMS, required=True, help="what is to read it")
    export_.add_argument("--verifier", type=Path, metavar="DIR|config.json", help="the model that the draft is for")
    export_.add_argument("--verifier-name", metavar="NAME", help="for speculators: the verifier's hub id or path")
    export_.add_argument("--num-speculative-tokens", type=int, metavar="N", help="for speculators: tokens a round")
    export_.set_defaults(run=export)


def _add_tellers(commands: Any) -> None:
    tellers = {
        "inspect": (inspect, "one screen: what this checkpoint is"),
        "trace": (trace, "verify every digest of a release and print how it was made"),
    }
    for name, (run, text) in tellers.items():
        teller = commands.add_parser(name, help=text, description=text)
        teller.add_argument("path", type=Path, metavar="DIR")
        teller.add_argument("--json", action="store_true", help="print one JSON object")
        teller.set_defaults(run=run)


def _add_pipeline(commands: Any) -> None:
    """What is asked inside a repository of the pipeline."""
    planning = commands.add_parser("plan", help="what dvc repro would run, restore or skip, why, and what it costs")
    planning.add_argument("-S", "--set-param", action="append", default=[], metavar="key=value", dest="settings")
    planning.add_argument("--json", action="store_true", help="print one JSON object")
    planning.set_defaults(run=plan)
    estimating = commands.add_parser("estimate", help="disk, memory and time of the long stages, and what is here")
    estimating.add_argument("--verifier", type=Path, metavar="DIR|config.json", help="the model that is accelerated")
    estimating.set_defaults(run=estimate)
    doctoring = commands.add_parser("doctor", help="what of this environment would fail or slow a run, with the remedy")
    doctoring.add_argument("--json", action="store_true", help="print one JSON object")
    doctoring.set_defaults(run=doctor)
    comparing = commands.add_parser("compare", help="all experiments in one table: what differs, and what came of it")
    comparing.set_defaults(run=compare)
    shown = commands.add_parser("show-sample", help="one sample of data/samples, its supervised tokens coloured")
    shown.add_argument("wanted", metavar="N", help="its number, from 0 in order of id, or its sample_id")
    shown.add_argument("--colour", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal")
    shown.set_defaults(run=show_sample)
    closing = commands.add_parser("summary", help="the closing table of the pipeline in this folder")
    closing.set_defaults(run=summary)


def _positive(text: str) -> int:
    """An argument that is a count; argparse turns the ValueError into a wrong call."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 1024:
        raise ValueError(text)
    return int(text)


def check(given: argparse.Namespace) -> int:
    import importlib.util

    from eagle3.checks.checkpoint_check import check_checkpoint

    why = "--no-values"
    if not given.no_values and importlib.util.find_spec("numpy") is None:
        why, given.no_values = "numpy is not installed; pip install 'eagle3-pipeline[values]'", True

    def judge(folder: Path, verifier: VerifierConfig | None) -> Verdict:
        verdict, _ = check_checkpoint(
            folder,
            verifier,
            values=not given.no_values,
            verifier_folder=given.verifier,
            tensor_parallel_size=given.tensor_parallel_size,
            engine=given.engine,
        )
        if given.no_values:
            verdict.skip("values", why)
        if given.tensor_parallel_size and given.engine != "vllm":
            verdict.skip("tensor parallelism", "judged for vLLM alone")
        return verdict

    def repaired(verifier: VerifierConfig | None) -> Verdict:
        from eagle3.checks.repairs import write_repaired

        repairs = write_repaired(given.path, given.fix, lambda folder: judge(folder, verifier))
        given.repairs = repairs
        return repairs.verdict

    return _judge(given, repaired if given.fix else lambda verifier: judge(given.path, verifier))


def validate_config(given: argparse.Namespace) -> int:
    from eagle3.checks.config_check import check_config

    return _judge(given, lambda verifier: check_config(given.path, verifier, given.engine))


def simulate_load(given: argparse.Namespace) -> int:
    from eagle3.checks.checkpoint_check import check_checkpoint

    def judge(verifier: VerifierConfig | None) -> Verdict:
        return check_checkpoint(given.path, verifier, config_rules=False, engine=given.engine)[0]

    return _judge(given, judge)


def flatten(given: argparse.Namespace) -> int:
    from eagle3.formats.flattening import flatten_folder

    flatten_folder(given.source, given.target)
    print(f"{given.target}: flat config.json, the original as config_speculators.json, tensors byte for byte")
    return OK


def inspect(given: argparse.Namespace) -> int:
    from eagle3.checks.inspection import inspection

    if not given.path.exists():
        return _wrong_call(f"{given.path}: no such file or folder")
    rows = inspection(given.path)
    if given.json:
        _print_json(rows)
    else:
        print("\n".join(f"{label:<17}{text}" for label, text in rows.items()))
    return OK


def trace(given: argparse.Namespace) -> int:
    from eagle3.serve.trace import trace as traced
    from eagle3.serve.trace import trace_lines

    if not given.path.exists():
        return _wrong_call(f"{given.path}: no such file or folder")
    found = traced(given.path)
    lines = list(trace_lines(given.path, found))
    if given.json:
        _print_json(found.as_dict())
    else:
        print("\n".join(lines))
    return OK


def export(given: argparse.Namespace) -> int:
    from eagle3.exporting import export_folder
    from eagle3.formats.config_forms import Verifier
    from eagle3.problems import format_problems
    from eagle3.verifiers.verifier_config import read_verifier_config

    verifier = read_verifier_config(given.verifier) if given.verifier else None
    options = Verifier(name=given.verifier_name, num_speculative_tokens=given.num_speculative_tokens)
    verdict = export_folder(given.source, given.target, given.engine, verifier, options)
    if verdict.problems:
        print(format_problems(verdict.problems))
    print(f"{given.target}: config.json as {given.engine} reads it, every tensor with its bytes")
    return OK


def plan(given: argparse.Namespace) -> int:
    from eagle3.params import PARAMS_FILE
    from eagle3.plans.kill_faults import kill_faults
    from eagle3.plans.overrides import override
    from eagle3.plans.plan import plan as planned
    from eagle3.plans.plan_table import plan_rows, plan_table
    from eagle3.problems import format_problems, has_errors
    from eagle3.yaml12 import read_yaml

    if not Path("dvc.yaml").is_file():
        return _wrong_call("no dvc.yaml here: run it in the root of the repository")
    faults = list(kill_faults())
    if faults:
        print(format_problems(faults), file=sys.stderr)
    if has_errors(faults):
        return ERRORS
    rows = plan_rows(planned(override(read_yaml(PARAMS_FILE), given.settings)))
    if given.json:
        _print_json(rows)
    else:
        print(plan_table(rows))
    return OK


def estimate(given: argparse.Namespace) -> int:
    from eagle3.params import read_params
    from eagle3.plans.estimate import estimate as estimated
    from eagle3.plans.estimate import machine_memory, need_lines, shortages
    from eagle3.problems import format_problems, has_errors

    needs = estimated(read_params(), given.verifier)
    problems = list(shortages(needs, machine_memory()))
    print("\n".join([*need_lines(needs), format_problems(problems)]).rstrip())
    return ERRORS if has_errors(problems) else OK


def doctor(given: argparse.Namespace) -> int:
    from eagle3.plans.doctor import CHECKS, diagnose
    from eagle3.problems import format_problems, has_errors

    problems = diagnose()
    if given.json:
        _print_json([problem.as_dict() for problem in problems])
    else:
        print(format_problems(problems) or f"{len(CHECKS)} groups of checks, nothing found")
    return ERRORS if has_errors(problems) else OK


def compare(given: argparse.Namespace) -> int:
    from eagle3.plans.compare import compare as compared

    if not Path("dvc.yaml").is_file():
        return _wrong_call("no dvc.yaml here: run it in the root of the repository")
    print(compared())
    return OK


def show_sample(given: argparse.Namespace) -> int:
    from functools import partial

    from eagle3.params import read_params
    from eagle3.sampling.sample_view import show_sample
    from eagle3.verifiers.chat_tokenizer import load_tokenizer
    from eagle3.verifiers.verifier import resolve_verifier

    verifier = read_params().verifier
    tokenizer = load_tokenizer(resolve_verifier(verifier), verifier.trust_remote_code)
    colour = given.colour == "always" or (
        given.colour == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    print(show_sample(Path("data/samples"), given.wanted, partial(tokenizer.decode, skip_special_tokens=False), colour))
    return OK


def summary(given: argparse.Namespace) -> int:
    from eagle3.closing_table import closing_table

    print(closing_table())
    return OK


def _judge(given: argparse.Namespace, judge: Callable[[VerifierConfig | None], Verdict]) -> int:
    from eagle3.verifiers.verifier_config import read_verifier_config

    for path in (given.path, given.verifier):
        if path is not None and not path.exists():
            return _wrong_call(f"{path}: no such file or folder")
    verdict = judge(read_verifier_config(given.verifier) if given.verifier else None)
    _show(verdict, given.json, getattr(given, "repairs", None))
    return ERRORS if verdict.verdict == "error" else OK


def _show(verdict: Verdict, as_json: bool, repairs: Repairs | None = None) -> None:
    """The verdict; with `--fix` that of the copy, after what was changed and what was left."""
    from eagle3.problems import format_problems

    if as_json:
        _print_json(verdict.as_dict() | (repairs.as_dict() if repairs else {}))
        return
    if repairs:
        print(repairs.told())
    if verdict.problems:
        print(format_problems(verdict.problems))
    errors = sum(problem.severity == "error" for problem in verdict.problems)
    warnings = len(verdict.problems) - errors
    print(
        f"{verdict.verdict}: {errors} errors, {warnings} warnings; checked: {', '.join(verdict.checked) or 'nothing'}"
    )
    for each in verdict.not_checked:
        print(f"not checked: {each['what']} ({each['why']})")


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value))


def _refused(given: argparse.Namespace, error: InvalidInput) -> int:
    """A file that cannot be read at all is an error of what was judged, in the same form."""
    if hasattr(given, "json"):
        from eagle3.checks.config_check import Verdict

        verdict = Verdict(list(error.problems))
        verdict.skip("everything else", "a file could not be read")
        _show(verdict, given.json)
    else:
        print(error, file=sys.stderr)
    return ERRORS


def _wrong_call(message: str) -> int:
    print(f"eagle3: {message}", file=sys.stderr)
    return WRONG_CALL


if __name__ == "__main__":
    sys.exit(main())
