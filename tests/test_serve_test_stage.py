"""serve-test from its inputs to a release: real servers, a verifier and a draft whose every answer is known by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from eagle3.acceptance import Acceptance, acceptance_of, right_drafts, walk, without_loops
from eagle3.drafts.walk_files import write_walks
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.params import VerifierParams
from eagle3.sampling.samples import Sample, read_samples, write_samples
from eagle3.verifiers.verifier import resolve_verifier
from tests.code_deps import ROOT
from tests.counting import END, answer_to, counting_draft, counting_verifier, first_step

MAX_NEW_TOKENS = 24
PROMPTS = [[1, 60, 61, last] for last in (5, 6, 50, 100, 150, 200, 250, 300)]
PARITY = {"epoch_0": {"apart_in_bf16_steps": 1.25, "positions": 96}}
PARAMS = {
    "verifier": {"source": "verifier"},
    "sample": {
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_model_len": 512,
        "sources": [{"file": "tiny.jsonl"}],
        "mode": "regenerate",
    },
    "serve_test": {
        "min_rounds": 50,
        "min_acceptance_length": 1.2,
        "min_position_0_rate": 0.2,
        "max_gap_to_walk": 0.001,
        "questions": ["two.jsonl"],
        "sweep": [1, 3],
        "suite": "full",
    },
}


def sample(number: int, prompt: list[int], split: str = "eval") -> Sample:
    answer = answer_to(prompt[-1], MAX_NEW_TOKENS)
    mask = [False] * len(prompt) + [True] * len(answer)
    name = f"{split}{number}"
    return Sample(f"{name}-0", name, 0, split, [*prompt, *answer], mask, "stop" if answer[-1] == END else "length")


def right(one: Sample) -> list[int]:
    predictions = [[first_step(token) for token in one.input_ids], *[[-1] * len(one.input_ids)] * 7]
    return right_drafts(predictions, one.input_ids, one.num_prompt)


def walk_over(samples: list[Sample], loops: bool) -> dict:
    """What train would have recorded: the walk with the draft's first step, its further steps being always wrong."""
    table = {}
    for k in range(1, 9):
        total = Acceptance(0, (0,) * k)
        for one in samples:
            rounds = walk(right(one), one.num_prompt, k)
            total += acceptance_of(rounds if loops else without_loops(rounds, one.input_ids), k)
        table[str(k)] = total.as_dict()
    return {"val": table, "eval": table}


def write_inputs(folder: Path) -> None:
    """data/samples, data/draft and both reports, as the stages before leave them."""
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    for section, values in PARAMS.items():
        params[section].update(values)
    yaml.dump(params, folder / "params.yaml")
    counting_verifier(folder / "verifier")
    # the source is a parameter's word: relative to the folder the stage runs in
    os.chdir(folder)
    identity = resolve_verifier(VerifierParams("verifier", None, None, False)).identity()
    values = json.loads(json.dumps({name: dict(params[name]) for name in ("verifier", "sample")}))
    rows = [sample(number, prompt) for number, prompt in enumerate(PROMPTS)]
    write_samples(folder / "data/samples", rows)
    counts = {"train": 0, "val": 0, "eval": len(rows), "tokens": 1, "supervised_tokens": 1}
    samples = write_manifest(
        folder / "data/samples",
        Manifest("sample", values, {}, identity, {"vllm": "0.32.0"}, counts, {"max_new_tokens": MAX_NEW_TOKENS}),
    )
    hidden = Manifest("extract", {}, {"samples": samples.as_dict()}, identity)
    record = {"epoch": 0, "walk": walk_over(rows, True), "walk_without_loops": walk_over(rows, False)}
    decisions = {"best_epoch": 0, "draft": {"head_dim": 32}, "epochs": [record]}
    checkpoints = Manifest("train", {}, {"hidden_states": hidden.as_dict()}, identity, decisions=decisions)
    counting_draft(folder / "data/draft", folder / "verifier")
    write_walks(folder / "data/draft", {one.sample_id: right(one) for one in rows})
    write_manifest(
        folder / "data/draft",
        Manifest("flatten", {}, {"checkpoints": checkpoints.as_dict()}, identity, decisions={"epoch": 0}),
    )
    (folder / "machine.yaml").write_text("kv_cache_gib: 1\n")  # two servers are up at once
    (folder / "data/questions").mkdir()
    asked = [{"turns": ["Hello there", "And again"], "category": "greeting"}, {"turns": ["word " * 200]}]
    (folder / "data/questions/two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    for command in (["init", "-q"], ["add", "data/questions/two.jsonl"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    report = {"epochs": {"epoch_0": {"verdict": "ok", "problems": []}}, "errors": 0, "warnings": 0}
    (folder / "reports").mkdir()
    (folder / "reports/validate_config.json").write_text(json.dumps(report))
    (folder / "reports/simulate_weight_load.json").write_text(
        json.dumps({**report, "engine_level": {"level": "required", "parity": PARITY}})
    )


def serve_test(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stages.serve_test"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "VLLM_"))}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    for name in ("eagle3", "stages"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, folder / name)
    before = Path.cwd()
    try:
        write_inputs(folder)
    finally:
        os.chdir(before)
    return folder


def test_another_verifier_than_the_trained_one_is_refused_before_any_server_starts(repository):
    config = repository / "verifier/generation_config.json"
    kept = config.read_text()
    config.write_text(kept + "\n")
    done = serve_test(repository)
    config.write_text(kept)
    assert done.returncode == 1
    assert "verifier-changed" in done.stderr
    assert "serve-test: failed; nothing was recorded" in done.stderr
    assert "server" not in done.stdout


def test_a_changed_window_in_the_samples_manifest_is_refused(repository):
    path = repository / "data/samples/manifest.json"
    kept = path.read_text()
    path.write_text(kept.replace('"max_model_len": 512', '"max_model_len": "512"'))
    done = serve_test(repository)
    path.write_text(kept)
    assert done.returncode == 1
    assert "ERROR broken-manifest: manifest.json of stage sample: params.sample.max_model_len" in done.stderr


@pytest.fixture(scope="module")
def released(repository):
    done = serve_test(repository)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return repository / "data/release", done.stdout


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_server_accepts_exactly_what_the_walk_predicts(released):
    report = json.loads((released[0] / "serve_test.json").read_text())
    assert report["walk"] == {key: report["served"][key] for key in report["walk"]}
    assert report["against_walk"]["gap"] == 0.0
    assert report["against_walk"]["rounds"] == report["served"]["rounds"]
    assert report["against_walk"]["prompts"] == report["prompts"] == len(PROMPTS)
    assert report["served"]["rate_per_position"][0] > 0.2
    assert report["served"]["rate_per_position"][1:] == [0.0, 0.0]


@pytest.mark.engine
def test_answers_are_those_of_the_samples_with_and_without_the_draft(released, repository):
    report = json.loads((repository / "reports/serve_test.json").read_text())
    rows = read_samples(repository / "data/samples")
    assert report["new_tokens"] == sum(sum(one.loss_mask) for one in rows)
    assert report["greedy"]["faults"] == 0
    assert not [one for one in report["greedy"]["differences"] if not one["sample_id"].startswith("suite:tool_call")]
    assert report["samples_reproduced"]["share"] == 1.0
    assert all(gate["passed"] for gate in report["gates"].values())


@pytest.mark.engine
def test_the_release_is_the_draft_with_its_lineage_and_a_card(released, repository):
    folder, printed = released
    manifest = read_manifest(folder, "serve-test")
    verify_files(folder, manifest)
    assert (folder / "model.safetensors").stat().st_ino == (repository / "data/draft/model.safetensors").stat().st_ino
    assert set(manifest.files) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "provenance.json",
        "serve_test.json",
        "walk_eval.json",
    }
    card = (folder / "README.md").read_text()
    assert '--speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'' in card
    assert "tiny.jsonl" in card
    assert "9 gates passed" in printed
    everything = "".join(path.read_text() for path in folder.glob("*.json")) + card
    assert str(repository) not in everything


@pytest.mark.engine
def test_questions_are_asked_turn_by_turn_and_judged_like_prompts(released):
    report = json.loads((released[0] / "serve_test.json").read_text())
    questions = report["questions"]
    assert questions["turns"] == 2
    assert questions["too_long"] == ["two.jsonl:2:1"]
    assert list(questions["by_category"]) == ["greeting"]
    assert questions["by_category"]["greeting"]["turns"] == 2
    assert report["greedy"]["equal"] + report["greedy"]["ties"] == len(PROMPTS) + 2 + 4


@pytest.mark.engine
def test_the_suite_finds_no_fault_and_calls_out_the_engines_temperatures(released):
    report = json.loads((released[0] / "serve_test.json").read_text())
    assert report["suite"]["faults"] == []
    assert report["gates"]["suite_faults"]["passed"]
    assert [(row["concurrency"], row["temperature"]) for row in report["suite"]["with_draft"]] == [
        *((1, 0.0), (8, 0.0)),
        *((1, 1.0), (8, 1.0)),
    ]


@pytest.mark.engine
def test_both_servers_were_up_and_asked_in_turns(released, repository):
    folder, printed = released
    speed = json.loads((folder / "serve_test.json").read_text())["speed"]
    assert speed["order"] == "in turns of 8 prompts"
    low, high = speed["speed_up_per_prompt_interval_95"]
    assert 0 < low <= speed["speed_up_per_prompt"] <= high
    assert "), the median\n" in printed


@pytest.mark.engine
def test_each_number_of_drafted_tokens_has_its_row(released, repository):
    rows = (repository / "reports/speed.csv").read_text().splitlines()
    assert rows[0] == "num_speculative_tokens,acceptance_length,tokens_per_second,speed_up"
    assert [row.split(",")[0] for row in rows[1:]] == ["0", "1", "3"]
    # the draft's first step alone is ever right
    lengths = [float(row.split(",")[1]) for row in rows[1:]]
    assert lengths[0] == 1.0
    assert lengths[1] == lengths[2] > 1.2
    assert released[1].count(", the fastest here") == 1


@pytest.mark.engine
def test_the_plot_has_one_row_a_position(released, repository):
    lines = (repository / "reports/acceptance.csv").read_text().splitlines()
    assert lines[0] == "position,served,served_low,served_high,walk"
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2"]


def changed(folder: Path, **values: object) -> str:
    """Set values of serve_test; the file's text before."""
    yaml, path = YAML(), folder / "params.yaml"
    text = path.read_text()
    params = yaml.load(text)
    params["serve_test"].update({"suite": "greedy", "sweep": [], **values})
    yaml.dump(params, path)
    return text


def tree(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.engine
def test_a_missed_gate_fails_with_its_numbers_and_leaves_the_last_release_as_it_is(released, repository):
    before = changed(repository, min_acceptance_length=1.9, min_position_0_rate=0.9)
    made = tree(repository / "data/release", repository / "reports")
    done = serve_test(repository)
    (repository / "params.yaml").write_text(before)
    assert done.returncode == 1
    assert done.stderr.count("ERROR gate-missed: serve_test.min_acceptance_length") == 2
    assert "found:       acceptance_length = 1.3" in done.stderr
    assert "expected:    at least 1.9" in done.stderr
    assert "ERROR gate-missed: serve_test.min_position_0_rate" in done.stderr
    assert "Traceback" not in done.stderr
    # every number is printed and kept, the passed ones too
    kept = Path(done.stdout.partition("every number measured: ")[2].splitlines()[0])
    report = json.loads((repository / kept).read_text())
    assert report["gates"]["gap_to_walk"]["passed"]
    assert not report["gates"]["acceptance_length"]["passed"]
    assert "acceptance length     1.3" in done.stdout
    assert tree(repository / "data/release", repository / "reports") == made
