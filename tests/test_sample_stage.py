"""The stage with the real engine on a tiny verifier: exact masks, same bytes after a kill, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.machine import DEFAULT
from eagle3.manifests import read_manifest, verify_files
from eagle3.problems import InvalidInput
from eagle3.sampling.answers import Answering, Generation, Prompt
from eagle3.sampling.conversations import Conversation
from eagle3.sampling.sample_making import blocks
from eagle3.sampling.samples import Sample, read_samples
from tests.tiny import tiny_tokenizer, tiny_verifier, write_conversations

ROOT = Path(__file__).parent.parent
# One thread: a tiny model gains nothing from two, and on busy cores two wait for each other.
MACHINE = "cpu_threads: 1\nkv_cache_gib: 1\n"
SAMPLE = {
    **{"sources": [{"file": "tiny.jsonl"}], "max_train": 140, "max_val": 4, "max_eval": 17, "min_eval": 2},
    **{"val_percent": 10, "eval_percent": 20, "max_new_tokens": 8, "max_model_len": 128, "temperature": 0.0},
    **{"mode": "regenerate", "max_turns": 1, "max_eval_similarity": 1.0, "top_p": 1.0, "max_num_seqs": 128},
}
TEXTS = [f"What is {number} times {number + 3}?" for number in range(230)]
# The first repeats the train opening that is first in line.
FAULTY = ["What is 172 times 175?", "why " * 200, " "]


def make_repository(folder: Path) -> Path:
    """What the stage reads: Git, dvc.yaml, params.yaml, conversations, a tiny verifier, machine.yaml."""
    for name in ("eagle3", "stages", "dvc.yaml", "params.yaml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, folder / name)
    tiny_verifier(folder / "verifier")
    write_conversations(folder / "data" / "conversations" / "tiny.jsonl", TEXTS + FAULTY)
    (folder / "machine.yaml").write_text(MACHINE)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "data"], cwd=folder, check=True)
    set_params(folder, sample=SAMPLE, verifier={"source": "verifier"})
    return folder


def set_params(folder: Path, **sections: dict[str, Any]) -> None:
    params = yaml.safe_load((folder / "params.yaml").read_text())
    for section, values in sections.items():
        params[section].update(values)
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


def start_stage(folder: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "VLLM_"))}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    return subprocess.Popen(
        [sys.executable, "-m", "stages.sample"],
        **{"cwd": folder, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )


def run_stage(folder: Path) -> str:
    stage = start_stage(folder)
    stdout, stderr = stage.communicate(timeout=300)
    assert stage.returncode == 0, stderr[-4000:]
    return stdout


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "data" / "samples").iterdir())}


def chunks(folder: Path) -> list[Path]:
    return sorted((folder / ".dvc" / "tmp" / "eagle3" / "sample").glob("*/answers-*.json"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = make_repository(tmp_path_factory.mktemp("finished"))
    return folder, run_stage(folder)


@pytest.mark.engine
def test_the_stage_accounts_for_every_row(finished: tuple[Path, str]) -> None:
    folder, said = finished
    manifest = read_manifest(folder / "data" / "samples", "sample")
    verify_files(folder / "data" / "samples", manifest)
    counts = manifest.counts
    assert counts["read"] == len(TEXTS) + 3 == counts["kept"] + counts["skipped"] + counts["failed"]
    assert {split: counts[split] for split in ("train", "val", "eval")} == {"train": 140, "val": 4, "eval": 17}
    reasons = manifest.decisions["skipped_by_reason"]
    assert {reasons[name] for name in ("duplicate", "too_long", "empty")} == {1}
    assert set(manifest.files) == {"samples.parquet", "skipped.jsonl"}
    assert manifest.decisions["special_token_ids"] == [0, 1, 2]
    around = tiny_tokenizer()("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert manifest.decisions["template_token_ids"] == sorted({*around["input_ids"]})
    assert said.splitlines()[-1].startswith(f"sample: read {len(TEXTS) + 3}, kept 161, ")
    assert str(folder) not in (folder / "data" / "samples" / "manifest.json").read_text()


@pytest.mark.engine
def test_masks_cover_what_was_generated_and_the_prompt_is_the_rendered_template(finished: tuple[Path, str]) -> None:
    tokenizer = tiny_tokenizer()
    samples = read_samples(finished[0] / "data" / "samples")
    assert len({sample.conversation_id for sample in samples}) == len(samples)
    for sample in samples:
        ids, split_at = list(sample.input_ids), sample.num_prompt
        prompt, answer = ids[:split_at], ids[split_at:]
        asked = tokenizer.decode(prompt).removeprefix("<|im_start|>user\n")
        assert asked.removesuffix("<|im_end|>\n<|im_start|>assistant\n") in TEXTS
        assert list(sample.loss_mask) == [False] * len(prompt) + [True] * len(answer)
        assert (answer[-1] == tokenizer.eos_token_id) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(answer) == SAMPLE["max_new_tokens"]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


@pytest.mark.engine
def test_a_killed_run_resumes_to_the_bytes_of_an_undisturbed_one(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = make_repository(tmp_path)
    stage = start_stage(folder)
    while not chunks(folder) and stage.poll() is None:
        time.sleep(0.02)
    stage.send_signal(signal.SIGKILL)
    assert stage.wait(timeout=30) == -signal.SIGKILL
    survived = {path: path.stat().st_mtime_ns for path in chunks(folder)}
    assert 0 < len(survived) < len(chunks(finished[0]))
    assert not (folder / "data" / "samples").exists()
    run_stage(folder)
    assert bytes_of(folder) == bytes_of(finished[0])
    assert {path: path.stat().st_mtime_ns for path in survived} == survived


THREE_TURNS = ["Hello", "How are you?", "And you?"]


@pytest.mark.engine
def test_turns_and_given_answers_from_two_weighted_sources_account_for_everything(tmp_path: Path) -> None:
    """mode keep, by the stage itself: train has the given answers, val and eval the verifier's own, turn by turn."""
    folder = make_repository(tmp_path)
    conversations = folder / "data" / "conversations"
    rows = [
        {
            "messages": [
                message
                for text in THREE_TURNS
                for message in (
                    {"role": "user", "content": f"{text} {number}"},
                    {"role": "assistant", "content": f"Fine {number}"},
                )
            ]
        }
        for number in range(60)
    ]
    (conversations / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run(["git", "add", "data"], cwd=folder, check=True)
    sources = [{"file": "tiny.jsonl"}, {"file": "turns.jsonl", "weight": 2.0}]
    changes = {"mode": "keep", "max_turns": 2, "sources": sources, "max_train": 30, "max_eval": 8}
    set_params(folder, sample=changes, verifier={"source": "verifier"})
    run_stage(folder)

    manifest = read_manifest(folder / "data" / "samples", "sample")
    counts, decisions = manifest.counts, manifest.decisions
    assert counts["read"] == len(TEXTS) + 3 + 60 == counts["kept"] + counts["skipped"] + counts["failed"]
    assert decisions["sources"]["turns.jsonl"] == {"layout": "messages", "rows": 60}
    turns = decisions["turns"]
    assert turns["read"] == turns["answered"] + sum(turns["left"].values())
    assert decisions["skipped_by_reason"]["no_answer"] > 0, "prompts alone have nothing to keep"
    samples, tokenizer = read_samples(folder / "data" / "samples"), tiny_tokenizer()
    for sample in samples:
        answers = tokenizer.decode([t for t, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on])
        if sample.split == "train":
            assert answers.count("Fine") == answers.count("<|im_end|>") == 2
            assert tokenizer.decode(sample.input_ids).count("<|im_start|>user") == 2
        else:
            assert "Fine" not in answers
    assert {sample.turn for sample in samples if sample.split == "eval"} <= {0, 1}
    assert (Counter(sample.split for sample in samples)["train"], counts["train"]) == (30, 30)

    shown = subprocess.run(
        [sys.executable, "-m", "eagle3", "show-sample", samples[0].sample_id],
        **{"cwd": folder, "text": True, "capture_output": True, "check": True},
    )
    assert samples[0].sample_id in shown.stdout
    assert "{+" in shown.stdout


@pytest.mark.engine
def test_other_weights_under_the_same_path_never_reuse_old_answers(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    before = set(chunks(folder))
    tiny_verifier(folder / "verifier", seed=1)
    run_stage(folder)
    assert bytes_of(folder)["samples.parquet"] != bytes_of(finished[0])["samples.parquet"]
    assert len(set(chunks(folder)) - before) == len(before)


@pytest.fixture(scope="module")
def engine(finished: tuple[Path, str]) -> Iterator[Any]:
    from eagle3.states.vllm_engine import start_engine, stop_engine
    from stages.sample import NO_PREFIX_CACHE

    machine = replace(DEFAULT, cpu_threads=1, kv_cache_gib=1)
    started = start_engine(finished[0] / "verifier", machine, 128, False, max_num_seqs=128, **NO_PREFIX_CACHE)
    yield started
    stop_engine(started)


def answering(engine: Any, scratch: Path, temperature: float = 0.0) -> Answering:
    return Answering(
        Generation("0" * 64, {"vllm": "0.32.0"}, 0, temperature, 1.0, 8, 128, 128), scratch, lambda: engine
    )


def prompts_of(samples: list[Sample]) -> list[Prompt]:
    return [Prompt(sample.sample_id, list(sample.input_ids[: sample.num_prompt])) for sample in samples]


@pytest.mark.engine
def test_eval_answers_are_those_of_one_request_at_a_time(
    finished: tuple[Path, str], engine: Any, tmp_path: Path
) -> None:
    samples = [row for row in read_samples(finished[0] / "data" / "samples") if row.split == "eval"]
    asked = prompts_of(samples)[::-1]
    answers = answering(engine, tmp_path)
    found = [one for begin in range(0, len(asked), 3) for one in answers.answers(asked[begin : begin + 3], "eval")]
    assert [answer.output_ids for answer in found] == [
        list(row.input_ids[row.num_prompt :]) for row in reversed(samples)
    ]


@pytest.mark.engine
def test_answers_of_another_batch_size_are_never_taken(finished: tuple[Path, str], engine: Any, tmp_path: Path) -> None:
    asked = prompts_of(read_samples(finished[0] / "data" / "samples")[:2])
    for number in (2, 1):
        generation = replace(answering(engine, tmp_path)._generation, max_num_seqs=number)
        assert len(Answering(generation, tmp_path, lambda: engine).answers(asked, "train")) == 2
    assert len([*tmp_path.glob("answers-*.json")]) == 2


@pytest.mark.parametrize("size", [1, 2, 8, 31, 128])
def test_a_conversation_more_changes_the_block_it_falls_in_and_hardly_another(size: int) -> None:
    rows = [Conversation("s", str(n), ({"role": "user", "content": str(n)},)) for n in range(2001)]
    before = list(blocks(rows[:2000], size))
    assert [row for block in before for row in block] == sorted(rows[:2000], key=lambda row: row.conversation_id)
    assert all(len(block) >= max(1, size // 2) for block in before[:-1])
    assert 0.7 * size <= 2000 / len(before) <= 1.1 * size
    changed = []
    for out in range(0, 2000, 100):
        other = list(blocks(rows[:out] + rows[out + 1 :], size))
        changed.append(sum(block not in before for block in other))
    assert max(changed) <= (2 if size > 8 else 6)  # the smaller they are, the more are passed until both end alike
    assert list(blocks([], size)) == []


@pytest.mark.engine
def test_at_a_temperature_the_seed_of_the_conversation_decides(
    finished: tuple[Path, str], engine: Any, tmp_path: Path
) -> None:
    asked = prompts_of(read_samples(finished[0] / "data" / "samples")[:6])
    runs = [
        answering(engine, tmp_path / name, temperature).answers(asked, "eval")
        for name, temperature in (("one", 1.0), ("two", 1.0), ("greedy", 0.0))
    ]
    assert runs[0] == runs[1] != runs[2]
    twins = [Prompt(name, asked[0].input_ids) for name in ("one", "two")]
    first, second = answering(engine, tmp_path, 1.0).answers(twins, "train")
    assert first.output_ids != second.output_ids
    narrow = replace(answering(engine, tmp_path, 1.0)._generation, top_p=0.001)
    greedy = Answering(narrow, tmp_path, lambda: engine).answers(asked, "eval")
    assert [answer.output_ids for answer in greedy] == [answer.output_ids for answer in runs[2]], "top_p reaches vLLM"


@pytest.mark.engine
def test_what_the_engine_refuses_is_bad_input_in_its_own_words(engine: Any) -> None:
    from vllm import SamplingParams

    from eagle3.states.vllm_engine import generate

    with pytest.raises(InvalidInput, match="out of vocabulary"):
        generate(engine, [[1, 9999]], [SamplingParams(max_tokens=2)])
    with pytest.raises(AssertionError):
        generate(engine, [[1] * 127], [SamplingParams(max_tokens=2)])
    assert generate(engine, [[1] * 126], [SamplingParams(max_tokens=2)])


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("engines", {"vllm": "0.31.0"}, ["engine-version", "engines.vllm=0.32.0"]),
        ("verifier", {"source": "elsewhere"}, ["verifier-missing", "verifier.source"]),
        ("verifier", {"sha256": "0" * 64}, ["verifier-changed", "verifier.sha256"]),
        ("sample", {"max_model_len": 513}, ["window", "sample.max_model_len"]),
        ("sample", {"max_model_len": 20}, ["too-few-prompts", "too_long"]),
        ("sample", {"min_eval": 100, "max_eval": 100}, ["too-few-prompts", "sample.min_eval"]),
        ("sample", {"sources": [{"file": "other.jsonl"}]}, ["source-absent", "source-unnamed"]),
        ("sample", {"temperature": "hot"}, ["sample.temperature"]),
    ],
)
def test_bad_input_is_one_message_and_leaves_everything_as_it_was(
    tmp_path: Path, section: str, change: dict[str, Any], said: list[str]
) -> None:
    folder = make_repository(tmp_path)
    (folder / "data" / "samples").mkdir()
    (folder / "data" / "samples" / "manifest.json").write_text("earlier")
    set_params(folder, **{section: change})
    stage = start_stage(folder)
    stdout, stderr = stage.communicate(timeout=120)
    assert stage.returncode == 1
    assert "Traceback" not in stdout + stderr
    for words in said:
        assert words in stderr
    assert bytes_of(folder) == {"manifest.json": b"earlier"}


def test_an_engine_that_cannot_start_is_bad_input(tmp_path: Path) -> None:
    from eagle3.states.vllm_engine import start_engine

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(InvalidInput, match="no_such_model") as error:
        start_engine(tmp_path, DEFAULT, 128, False)
    assert "machine.yaml" in error.value.problems[0].fix
