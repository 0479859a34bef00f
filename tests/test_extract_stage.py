"""The stage with the real engine on a tiny verifier: resumed and incremental runs, checks of the states, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle3.formats.safetensors_headers import read_header
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.params import VerifierParams
from eagle3.sampling.samples import Sample, read_samples, write_samples
from eagle3.states.extraction import input_problems
from eagle3.states.hidden_states import HiddenStates
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from tests.tiny import tiny_verifier

ROOT = Path(__file__).parent.parent
SPLITS = ("train", "train", "train", "val", "eval")
WINDOW = 64
EXTRACT = {"aux_layer_ids": [1, 3, 5], "samples_per_shard": 4, "parity_samples": 3}


def verifier_in(folder: Path) -> Verifier:
    return resolve_verifier(VerifierParams(str(folder / "verifier"), None, None, False))


def greedy_samples(verifier: Path, count: int) -> list[Sample]:
    """Random prompts of 5 to 24 tokens with greedy answers of 12; the ids are hashes, as the sample stage's are."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        prompt = torch.randint(3, 320, (1, 5 + number % 20), generator=generator)
        ids = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=2)[0].tolist()
        mask = [index >= prompt.shape[1] for index in range(len(ids))]
        name = f"{number * 2654435761 % 2**32:08x}"
        samples.append(Sample(name, name, 0, SPLITS[number % 5], ids, mask, "length"))
    return samples


def write_inputs(folder: Path, samples: list[Sample]) -> None:
    shutil.rmtree(folder / "data" / "samples", ignore_errors=True)
    write_samples(folder / "data" / "samples", samples)
    identity = {**verifier_in(folder).identity(), "source": "verifier"}
    decisions = {"vocab_size": 320, "special_token_ids": [0, 1, 2], "greedy_splits": ["train", "val", "eval"]}
    made = Manifest("sample", {"sample": {"max_model_len": WINDOW}}, verifier=identity, decisions=decisions)
    write_manifest(folder / "data" / "samples", made)


def make_repository(folder: Path, samples: list[Sample] | None = None) -> Path:
    """What the stage reads: code, dvc.yaml, params.yaml, samples, a tiny verifier, machine.yaml."""
    for name in ("eagle3", "stages"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, folder / name)
    tiny_verifier(folder / "verifier")
    (folder / "machine.yaml").write_text("cpu_threads: 1\nkv_cache_gib: 1\n")
    set_params(folder, verifier={"source": "verifier"}, extract=EXTRACT)
    write_inputs(folder, samples or greedy_samples(folder / "verifier", 30))
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
        [sys.executable, "-m", "stages.extract"],
        **{"cwd": folder, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )


def run_stage(folder: Path, status: int = 0) -> str:
    """What it said: its last line, or, where it must fail, its problems."""
    stage = start_stage(folder)
    stdout, stderr = stage.communicate(timeout=300)
    assert stage.returncode == status, stderr[-4000:]
    return stderr if status else stdout.splitlines()[-1]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "data" / "hidden_states").iterdir())}


def shards_of(folder: Path) -> dict[str, int]:
    home = folder / ".dvc" / "tmp" / "eagle3" / "extract"
    return {path.name: path.stat().st_ino for path in home.glob("shard-*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = make_repository(tmp_path_factory.mktemp("finished"))
    return folder, run_stage(folder)


@pytest.fixture
def copy(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


@pytest.mark.engine
def test_the_stage_stores_every_sample_and_says_what_it_made(finished):
    folder, said = finished
    manifest = read_manifest(folder / "data" / "hidden_states", "extract")
    verify_files(folder / "data" / "hidden_states", manifest)
    samples = read_samples(folder / "data" / "samples")
    states = HiddenStates(folder / "data" / "hidden_states")
    assert states.sample_ids == [sample.sample_id for sample in samples]
    for sample in samples:
        stored = states.get(sample.sample_id)
        assert stored.hidden_TAH.shape == (len(sample.input_ids), 4, 64)
        assert stored.input_ids_T.tolist() == list(sample.input_ids)
        assert stored.loss_mask_T.tolist() == list(sample.loss_mask)
        assert (stored.split, stored.num_prompt) == (sample.split, sample.num_prompt)
    tokens = sum(len(sample.input_ids) for sample in samples)
    assert manifest.counts == {"samples": 30, "tokens": tokens, "shards": len(shards_of(folder))}
    assert manifest.decisions == {
        **{"aux_layer_ids": [1, 3, 5], "hidden_size": 64, "num_hidden_layers": 6, "dtype": "bfloat16"},
        "parity": {"samples": 3, "witness": "transformers, float32"},
    }
    assert manifest.inputs["samples"] == read_manifest(folder / "data" / "samples", "sample").as_dict()
    assert said.startswith(f"extract: 30 samples, {tokens} tokens, {len(shards_of(folder))} shards, 0.00 GB (")
    assert str(folder) not in (folder / "data" / "hidden_states" / "manifest.json").read_text()


@pytest.mark.engine
def test_a_killed_run_over_fewer_samples_is_continued_to_the_bytes_of_a_clean_one(finished, copy):
    samples = read_samples(copy / "data" / "samples")
    shutil.rmtree(copy / "data")
    shutil.rmtree(copy / ".dvc")
    write_inputs(copy, samples[:-1])
    stage = start_stage(copy)
    while not shards_of(copy) and stage.poll() is None:
        time.sleep(0.002)
    stage.send_signal(signal.SIGKILL)
    assert stage.wait(timeout=30) == -signal.SIGKILL
    survived, all_shards = shards_of(copy), shards_of(finished[0])
    assert 0 < len(survived) < len(all_shards)
    assert not (copy / "data" / "hidden_states").exists()

    write_inputs(copy, samples)
    assert f"({len(all_shards.keys() - survived.keys())} made now" in run_stage(copy)
    assert bytes_of(copy) == bytes_of(finished[0])
    assert shards_of(copy).items() >= survived.items()
    assert not list((copy / ".dvc" / "tmp" / "eagle3" / "extract").glob(".shard-*"))


@pytest.mark.engine
def test_a_second_run_needs_no_engine(finished, copy):
    assert run_stage(copy).endswith("(all made by an earlier run)")
    assert bytes_of(copy) == bytes_of(finished[0])


@pytest.mark.engine
def test_other_layers_reuse_no_shard(finished, copy):
    set_params(copy, extract={"aux_layer_ids": [1, 3, 4]})
    assert f"({len(shards_of(finished[0]))} made now" in run_stage(copy)
    assert set(bytes_of(copy)) & set(bytes_of(finished[0])) == {"manifest.json"}
    first = read_samples(copy / "data" / "samples")[0].sample_id
    old, new = (HiddenStates(each / "data" / "hidden_states").get(first).hidden_TAH for each in (finished[0], copy))
    assert new[:, 1].equal(old[:, 1])
    assert not new[:, 2].equal(old[:, 2])


@pytest.mark.engine
def test_fp8_halves_the_states_and_the_manifest_tells_its_error(finished, copy):
    """The shards are checked against the answers and against the witness like those of bf16."""
    set_params(copy, extract={"store_dtype": "fp8"})
    assert f"({len(shards_of(finished[0]))} made now" in run_stage(copy)
    decisions = read_manifest(copy / "data" / "hidden_states", "extract").decisions
    assert decisions["dtype"] == "fp8"
    told = decisions["relative_error"]
    assert list(told) == ["1", "3", "5", "6"]
    old, new = (HiddenStates(each / "data" / "hidden_states") for each in (finished[0], copy))
    assert old.sample_ids == new.sample_ids
    before, after = (torch.cat([one.get(name).hidden_TAH[1:] for name in one.sample_ids]).float() for one in (old, new))
    errors = ((after - before).norm(dim=(0, 2)) / before.norm(dim=(0, 2))).tolist()
    assert list(told.values()) == [pytest.approx(error, abs=1e-4) for error in errors]
    assert 0.01 < min(errors) < max(errors) < 0.04
    assert new.get(new.sample_ids[0]).stored_TAH.element_size() == 1
    assert not set(bytes_of(copy)) & set(bytes_of(finished[0])) - {"manifest.json"}


@pytest.mark.engine
def test_states_that_do_not_give_the_answers_fail_the_stage_and_leave_the_output(finished, copy):
    """The answers of the file are made up: no greedy verifier said them."""
    kept = bytes_of(copy)
    invented = [
        replace(one, input_ids=[*one.input_ids[: one.num_prompt], *[7] * 12])
        for one in read_samples(copy / "data" / "samples")
    ]
    write_inputs(copy, invented)
    assert "ERROR states-of-other-answers: extract: shard-" in run_stage(copy, status=1)
    assert bytes_of(copy) == kept


@pytest.mark.engine
def test_states_without_parity_fail_the_stage_though_an_earlier_run_made_them(finished, copy):
    """A shard that was changed on the disk: the engine is not asked again, the witness is."""
    kept = bytes_of(copy)
    [first, *_] = HiddenStates(copy / "data" / "hidden_states").sample_ids
    for path in (copy / ".dvc" / "tmp" / "eagle3" / "extract").glob("shard-*"):
        if first in json.loads(read_header(path).metadata["sample_ids"]):
            data = bytearray(path.read_bytes())
            size = int.from_bytes(data[:8], "little")
            begin, end = (8 + size + at for at in json.loads(data[8 : 8 + size])["hidden_states"]["data_offsets"])
            states = torch.frombuffer(data, dtype=torch.bfloat16, offset=begin, count=(end - begin) // 2)
            states.view(-1, 4, 64)[:, 1] = states.view(-1, 4, 64)[:, 2]
            path.write_bytes(data)
    said = run_stage(copy, status=1)
    assert f"ERROR states-without-parity: extract: sample {first}, layer id 3" in said
    assert "nearer to layer id 4" in " ".join(said.split())
    assert bytes_of(copy) == kept


def test_changed_weights_and_impossible_layers_are_refused_together(tmp_path):
    folder = make_repository(tmp_path, [Sample("a", "a", 0, "train", [1, 5, 6], [False, True, True], "stop")])
    tiny_verifier(folder / "verifier", seed=1)
    set_params(folder, extract={"aux_layer_ids": [1, 6, 9]})
    said = run_stage(folder, status=1)
    for code in ("aux-layer-final: extract.aux_layer_ids[1]", "aux-layer-range: extract.aux_layer_ids[2]"):
        assert f"ERROR {code}" in said
    assert "ERROR other-verifier: data/samples" in said
    assert f"verifier.sha256={verifier_in(folder).sha256}" in "".join(said.split())
    assert "extract: failed; nothing was recorded" in said
    assert not (folder / "data" / "hidden_states").exists()


def test_a_sample_file_that_is_not_its_manifests_is_refused(tmp_path):
    one = Sample("a", "a", 0, "train", [1, 5, 6], [False, True, True], "stop")
    folder = make_repository(tmp_path, [one])
    write_samples(folder / "data" / "samples", [replace(one, input_ids=[1, 5, 7])])
    assert "ERROR changed-file: data/samples/samples.parquet" in run_stage(folder, status=1)


def test_the_verifier_of_the_samples_is_accepted(tmp_path):
    verifier = resolve_verifier(VerifierParams(str(tiny_verifier(tmp_path / "verifier")), None, None, False))
    assert list(input_problems(Manifest("sample", verifier=verifier.identity()), verifier, [0, 5])) == []
