"""The real engine's states against an independent forward by transformers, however the engine batches them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.layer_ids import stored_layer_ids
from eagle3.machine import DEFAULT
from eagle3.problems import InvalidInput
from eagle3.states import extraction
from eagle3.states.extraction import extract_shards, extracted
from eagle3.states.hidden_states import map_shard, read_states
from eagle3.states.shard_file import ShardFile
from eagle3.states.shard_plan import Shard, plan_shards
from eagle3.states.shard_scratch import LOW_WATER_BYTES, require_space
from eagle3.states.vllm_engine import prepare_environment, start_engine, stop_engine
from tests.test_disk_full import PAGE, mounts
from tests.tiny import tiny_verifier

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parent.parent
NUM_LAYERS, HIDDEN = 6, 64
LAYER_IDS = stored_layer_ids([0, 2, 3, 5], NUM_LAYERS)
# Sizes at which a prompt of 200 tokens is prefilled in chunks, prompts of one prefix share cached blocks, and eight
# prompts that advance together need more blocks than there are: vLLM 0.32.0 preempts some, which start again.
SMALL = {
    **{"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32, "enable_prefix_caching": True},
    **{"num_gpu_blocks_override": 14, "long_prefill_token_threshold": 16, "scheduler_reserve_full_isl": False},
    "disable_log_stats": False,
}
WINDOW = 256
# Relative L2: bf16 against float32 through six layers of wide weights, and a layer against its neighbour.
SAME, STRANGE = 0.06, 0.3


@dataclass(frozen=True)
class Stored:
    sample_id: str
    input_ids: list[int]
    split: str = "train"
    num_prompt: int = 1

    @property
    def loss_mask(self) -> list[bool]:
        return [False, *[True] * (len(self.input_ids) - 1)]


def random_samples() -> list[Stored]:
    """Eight prompts of 2 to 255 tokens; half of them begin with the same 100."""
    draw = random.Random(0)
    lengths = [2, 31, 64, 101, 140, 200, 254, WINDOW - 1]
    prefix = draw.choices(range(3, 320), k=100)
    drawn = [draw.choices(range(3, 320), k=length) for length in lengths]
    return [
        Stored(f"s{number}", ([*prefix, *ids[100:]] if number % 2 else ids)[: lengths[number]])
        for number, ids in enumerate(drawn)
    ]


SAMPLES = random_samples()


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


@pytest.fixture(scope="module")
def engine(verifier: Path) -> Any:
    prepare_environment(DEFAULT)
    from eagle3.states.hidden_states_connector import engine_options

    llm = start_engine(verifier, DEFAULT, WINDOW, False, **engine_options(LAYER_IDS), **SMALL)
    yield llm
    stop_engine(llm)


@pytest.fixture(scope="module")
def references(verifier: Path) -> dict[str, torch.Tensor]:
    """Sample -> [T, n + 1, H]: every id by transformers in float32, the last one before the final norm."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    found = {}
    for sample in SAMPLES:
        with torch.no_grad():
            states = model.model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
        found[sample.sample_id] = torch.stack([*(state[0] for state in states[:-1]), before_norm[-1][0]], 1)
    return found


def shard_of(samples: list[Stored]) -> Shard:
    (shard,) = plan_shards(samples, {"layer_ids": LAYER_IDS}, 10**18, len(LAYER_IDS), HIDDEN)
    return shard


def extract(engine: Any, samples: list[Stored], folder: Path) -> list[torch.Tensor]:
    """States [T, A + 1, H] float32 of each sample, all in one batch."""
    shard = shard_of(samples)
    ran: list[int] = []
    with extracted(engine, shard, folder / shard.name, ran.append):
        pass
    assert sorted(ran) == sorted(len(sample.input_ids) for sample in samples)
    return samples_of(folder / shard.name)


def samples_of(path: Path) -> list[torch.Tensor]:
    tensors = map_shard(path)
    return [part.float() for part in tensors["hidden_states"].split(tensors["offsets"].diff().tolist())]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_every_stored_slice_is_the_layer_that_its_id_means(engine, references, tmp_path):
    for sample, states in zip(SAMPLES, extract(engine, SAMPLES, tmp_path), strict=True):
        assert len(states) == len(sample.input_ids)
        for index, layer_id in enumerate(LAYER_IDS):
            assert distance(states[:, index], references[sample.sample_id][:, layer_id]) < SAME
            for other in {layer_id - 1, layer_id + 1} & set(range(NUM_LAYERS + 1)):
                assert distance(states[:, index], references[sample.sample_id][:, other]) > STRANGE


def num_preemptions(engine: Any) -> int:
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


def test_batching_chunks_and_preemption_leave_the_states_of_a_sample_alone(engine, tmp_path):
    before = num_preemptions(engine)
    together = extract(engine, SAMPLES, tmp_path)
    after = num_preemptions(engine)
    assert after > before
    for sample, states in zip(SAMPLES, together, strict=True):
        (alone,) = extract(engine, [sample], tmp_path)
        assert states.shape == alone.shape == (len(sample.input_ids), len(LAYER_IDS), HIDDEN)
        assert distance(states, alone) < SAME
    assert num_preemptions(engine) == after


def test_a_shard_is_the_same_bytes_whatever_ran_before_it(engine, tmp_path):
    path = tmp_path / shard_of(SAMPLES[:5]).name
    extract(engine, SAMPLES[:5], tmp_path)
    first = path.read_bytes()
    extract(engine, SAMPLES[3:], tmp_path)
    extract(engine, SAMPLES[:5], tmp_path)
    assert path.read_bytes() == first


def test_states_of_cached_tokens_are_stored_too(engine, references, tmp_path):
    from vllm import SamplingParams

    from eagle3.states.hidden_states_connector import destination

    extract(engine, SAMPLES[-1:], tmp_path)
    shard = shard_of(SAMPLES[-1:])
    with ShardFile(tmp_path / shard.name, shard) as file:
        sampling = SamplingParams(temperature=0, max_tokens=1, extra_args=destination(file.path, *file.place_of(0)))
        prompt = {"prompt_token_ids": SAMPLES[-1].input_ids}
        (output,) = engine.generate([prompt], [sampling], use_tqdm=False)
        while file.missing([0]):
            engine.llm_engine.step()
    assert output.num_cached_tokens >= 96
    (states,) = samples_of(tmp_path / shard.name)
    assert distance(states[:, -1], references[SAMPLES[-1].sample_id][:, NUM_LAYERS]) < SAME


def test_where_no_answer_is_greedy_the_token_that_the_engine_says_next_must_be_found(engine, tmp_path, monkeypatch):
    """Answers at a temperature, or given: states of the layer before do not give it."""
    done = extract_shards(engine, [shard_of(SAMPLES)], tmp_path, LAYER_IDS, ())
    assert (done.asked, done.found) == (len(SAMPLES), len(SAMPLES))

    def of_the_layer_before(tensors, rows, states=slice(None)):
        return read_states(tensors, rows, -2 if states == -1 else states)

    monkeypatch.setattr(extraction, "read_states", of_the_layer_before)
    with pytest.raises(InvalidInput, match="states-of-other-answers"):
        extract_shards(engine, [shard_of(SAMPLES)], tmp_path, LAYER_IDS, ())


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes, mounted for a process of its own, through which others see it."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size} small "{folder}" && echo mounted && read until'
    words = ["unshare", "-rm", "sh", "-c", mount]
    with subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mounted\n"
        yield Path(f"/proc/{holder.pid}/root{folder}")


@mounts
def test_extraction_stops_at_the_low_water_mark_and_goes_on_when_there_is_room(engine, tmp_path):
    shards = [shard_of(SAMPLES[begin : begin + 2]) for begin in (0, 2, 4, 6)]
    clean, size = tmp_path / "clean", sum(shard.num_bytes + PAGE for shard in shards) + 8 * PAGE
    clean.mkdir()
    extract_shards(engine, shards, clean, LAYER_IDS, ())
    with small_disk(tmp_path / "small", LOW_WATER_BYTES + size) as disk:
        require_space(disk, shards, shards)
        ballast = disk / "of another program"
        ballast.write_bytes(bytes(size - sum(shard.num_bytes for shard in shards) + 1))
        with pytest.raises(InvalidInput, match=r"no-space"):
            require_space(disk, shards, shards)
        with pytest.raises(InvalidInput, match="low-water"):
            extract_shards(engine, shards, disk, LAYER_IDS, ())
        ballast.unlink()
        made = {path.name for path in disk.iterdir()}
        assert {shards[0].name} <= made < {shard.name for shard in shards}
        missing = [shard for shard in shards if shard.name not in made]
        require_space(disk, shards, missing)
        extract_shards(engine, missing, disk, LAYER_IDS, ())
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == {
            path.name: path.read_bytes() for path in clean.iterdir()
        }


# Fails in the middle of a shard: the file becomes one that takes no byte, or one of the engine's processes is killed.
FAILING = """
import os, signal, sys
from pathlib import Path
from dataclasses import replace
import psutil
from eagle3.file_faults import file_fault
from eagle3.machine import DEFAULT
from eagle3.problems import InvalidInput
from eagle3.states.extraction import extracted
from eagle3.states.vllm_engine import prepare_environment, start_engine
from tests.test_hidden_states_connector import LAYER_IDS, SAMPLES, WINDOW, shard_of

def fill_the_disk():
    for path in Path("shards").glob(".shard-*"):
        path.unlink()
        path.symlink_to("/dev/full")

def kill_a_worker():
    for child in psutil.Process().children():
        if "Worker_TP1" in child.name():
            child.kill()

def fail(num_tokens):
    {fault}()

def processes():
    return [child.pid for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()]

if __name__ == "__main__":
    machine = replace(DEFAULT, tensor_parallel_size={workers}, kv_cache_gib=1)
    prepare_environment(machine)
    from eagle3.states.hidden_states_connector import engine_options

    options = dict(engine_options(LAYER_IDS), max_num_seqs=2)
    engine = start_engine(Path({verifier!r}), machine, WINDOW, False, **options)
    shard = shard_of(SAMPLES)
    try:
        with extracted(engine, shard, Path("shards") / shard.name, fail):
            pass
    except InvalidInput as error:
        print(error.problems[0].code, error.problems[0].found)
    except Exception as error:
        print(file_fault(error, "shards").code, error)
    print("left:", os.listdir("shards"))
    print("processes:", *processes(), flush=True)
    os._exit(0)  # as by a kill: nobody is asked to leave
"""


def alive(pid: str) -> bool:
    path = Path("/proc", pid, "stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@dataclass(frozen=True)
class Said:
    """The last lines of the script."""

    problem: str
    left: str
    processes: list[str]


def run_script(folder: Path, script: str) -> Said:
    (folder / "script.py").write_text(script)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with open(folder / "said", "w") as out, open(folder / "errors", "w") as errors:
        # files: a pipe would stay open, and be waited for, as long as any orphan lived
        done = subprocess.run(
            [sys.executable, "script.py"],
            **{"cwd": folder, "env": {**clean, "PYTHONPATH": str(ROOT)}, "stdout": out, "stderr": errors},
            check=False,
        )
    assert done.returncode == 0, (folder / "errors").read_text()[-4000:]
    problem, left, processes = ["", "", "", *(folder / "said").read_text().splitlines()][-3:]
    return Said(problem, left, processes.split()[1:])


@pytest.mark.timeout(100)  # less than the silence that was waited for before a failed write ended the engine
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_write_that_fails_ends_the_extraction_at_once(verifier, tmp_path, workers):
    """With two workers they are processes of their own, and vLLM quotes the error."""
    said = run_script(tmp_path, FAILING.format(fault="fill_the_disk", workers=workers, verifier=str(verifier)))
    assert said.problem.startswith("no-space ")
    assert "No space left on device" in said.problem
    assert said.left == "left: []"
    assert len(said.processes) == (workers if workers > 1 else 0)
    wait_for_their_end(said.processes)


@pytest.mark.long
def test_a_worker_that_dies_in_the_middle_is_one_problem(verifier, tmp_path):
    said = run_script(tmp_path, FAILING.format(fault="kill_a_worker", workers=2, verifier=str(verifier)))
    assert said.problem.startswith("engine ")
    assert said.left == "left: []"
    wait_for_their_end(said.processes)


def wait_for_their_end(processes: list[str]) -> None:
    deadline = time.monotonic() + 20
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


TWO_WORKERS = """
from pathlib import Path
from dataclasses import replace
from eagle3.machine import DEFAULT
from eagle3.states.extraction import extract_shards
from eagle3.states.vllm_engine import prepare_environment, start_engine
from tests.test_hidden_states_connector import LAYER_IDS, SAMPLES, WINDOW, shard_of

if __name__ == "__main__":
    machine = replace(DEFAULT, tensor_parallel_size=2, kv_cache_gib=1)
    prepare_environment(machine)
    from eagle3.states.hidden_states_connector import engine_options

    engine = start_engine(Path({verifier!r}), machine, WINDOW, False, **engine_options(LAYER_IDS))
    folder = Path({folder!r})
    folder.mkdir()
    done = extract_shards(engine, [shard_of(SAMPLES)], folder, LAYER_IDS, ())
    assert done.found == done.asked == len(SAMPLES), done
"""


@pytest.mark.long
def test_two_workers_write_the_states_of_one(engine, verifier, tmp_path):
    """Tensor parallel: the connector runs in processes of its own, rank 0 alone writes and has the head's logits."""
    run_script(tmp_path, TWO_WORKERS.format(verifier=str(verifier), folder=str(tmp_path / "two")))
    two = samples_of(tmp_path / "two" / shard_of(SAMPLES).name)
    for found, expected in zip(two, extract(engine, SAMPLES, tmp_path), strict=True):
        assert distance(found, expected) < SAME
