"""Which servers run at once, and in which order they are asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle3.machine import DEFAULT, Machine
from eagle3.serve import measuring, serving
from eagle3.serve.greedy_ties import Difference, bf16_step
from eagle3.serve.measuring import Judged, Plan, apart, judged, measure
from eagle3.serve.question_turns import Asked
from eagle3.serve.serving import GREETING, Prompt, ask_in_turns, opened_clients
from eagle3.serve.vllm_command import ServerSettings
from eagle3.verifiers.chat_tokenizer import prompt_ids
from tests.counting import answer_to, counting_draft, counting_verifier, tied_verifier
from tests.test_serve_test_stage import right, sample
from tests.tiny import tiny_tokenizer

GREETED = prompt_ids(tiny_tokenizer(), [{"role": "user", "content": GREETING}])


def settings(path: Path, **machine: int) -> ServerSettings:
    return ServerSettings(path, 256, Machine(**{**vars(DEFAULT), **machine}))


def test_two_servers_run_at_once_where_memory_ports_and_devices_allow_it(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    needed = 2 * (1000 + (4 << 30) + (5 << 29))
    monkeypatch.setattr(measuring, "available_memory", lambda: needed)
    assert apart(settings(tmp_path, kv_cache_gib=4)) == ""
    assert apart(settings(tmp_path, kv_cache_gib=4, port=8000)) == "machine.yaml gives one port"
    assert apart(settings(tmp_path, kv_cache_gib=4, tensor_parallel_size=2)) == "several ranks"
    monkeypatch.setattr(measuring, "available_memory", lambda: needed - 1)
    assert apart(settings(tmp_path, kv_cache_gib=4)) == "two do not fit into memory"
    monkeypatch.setattr(measuring, "num_gpus", lambda: 8)
    assert apart(settings(tmp_path)) == "each takes a GPU's memory"


class Recorder:
    """Notes what a client is asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def warm_up(self, prompt: Prompt) -> str:
        return f"before {self.name}"

    def ask(self, prompt: Prompt) -> str:
        self.asked.append(self.name)
        return f"{self.name} {prompt.sample_id}"

    def counted(self, answers: list[str], before: str) -> tuple[int, str]:
        return len(answers), before


def test_servers_take_turns_and_the_first_of_a_block_is_the_last_of_the_one_before(monkeypatch):
    monkeypatch.setattr(serving, "TURN", 2)
    pauses: list[int] = []
    asked: list[str] = []
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: pauses.append(len(asked)))
    prompts = [Prompt(str(number), [1], 1) for number in range(5)]
    found = ask_in_turns([Recorder("a", asked), Recorder("b", asked)], prompts, "asked")
    assert "".join(asked) == "aabb" + "bbaa" + "ab"
    assert pauses == [0, 2, 6, 9]
    assert found == [([f"{name} {number}" for number in range(5)], (5, f"before {name}")) for name in "ab"]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_where_transformers_cannot_compute_the_verifier_its_own_server_judges(tmp_path):
    """The server gives the logits of the reference, to a rounding of bf16: the same tie, the same fault."""
    verifier = tied_verifier(tmp_path / "verifier")
    parted = [Difference("a", [60, 100], 1, (101, 102)), Difference("b", [60, 100], 1, (101, 5))]
    unknown = shutil.copytree(verifier, tmp_path / "unknown")
    (unknown / "config.json").write_text(json.dumps({"model_type": "another"}))
    with opened_clients([(settings(verifier), tmp_path / "server.log")], GREETED) as [alone]:
        asked = [(one, alone.next_logits(one.context, one.said)) for one in parted]
    expected, found = judged(settings(verifier), asked), judged(settings(unknown), asked)
    assert expected.by == "transformers, float32"
    assert "the server without the draft, for there is no reference: ValueError" in found.by
    for one, other in zip(found.differences, expected.differences, strict=True):
        assert one.is_tie == other.is_tie == (one.sample_id == "a")
        assert one.top_logit == pytest.approx(other.top_logit, abs=bf16_step(other.top_logit))
        assert one.steps_below_top == pytest.approx(other.steps_below_top, abs=2)


@pytest.mark.engine
@pytest.mark.long
def test_where_one_server_fits_they_are_measured_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "available_memory", lambda: 0)
    verifier = counting_verifier(tmp_path / "verifier")
    draft = counting_draft(tmp_path / "draft", verifier)
    rows = [sample(number, [1, 60, 61, last]) for number, last in enumerate((5, 100))]
    plan = Plan(rows, Asked([], lambda _: [], str, 256), 24, GREETED, [], False)
    served = ServerSettings(verifier, 256, DEFAULT, False, draft, 3)
    measured = measure(served, plan, {one.sample_id: right(one) for one in rows}, tmp_path)
    assert measured.order == "one after the other (two do not fit into memory)"
    assert [one.token_ids for one in measured.with_draft] == [answer_to(last, 24) for last in (5, 100)]
    assert [one.token_ids for one in measured.without_draft] == measured.sampled
    assert measured.counted.rounds > 0
    assert measured.judged == Judged([], "")
