"""A repository whose slow stages are stand-ins, for faults that have nothing to do with engines.

The bodies of sample, extract, train and serve-test are replaced by deterministic functions of their declared inputs;
the guard around them, DVC, Git and the other four stages are real. A stand-in writes as its stage does: pieces that
survive a kill in scratch, outputs and manifest at the end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.code_deps import ROOT
from tests.repository import environment, set_params

HEAD = '''\
"""Stand-in for the stage: a deterministic function of its declared inputs. STAND_IN_SECONDS: pause after a piece."""

import hashlib, json, os, sys, time
from pathlib import Path

from eagle3.atomic_files import atomic_path, link_or_copy, sha256_of_json, write_json, write_text
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.stage_guard import Stage, run_stage
from eagle3.yaml12 import read_yaml

VERIFIER_ID = {"source": "org/model", "revision": "0" * 40, "sha256": "a" * 64}


def pause():
    time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))


def write_reports(stage, digest, **reports):
    """Every report that dvc.yaml names for the stage: those given by the stem of their names, else a number or two."""
    spec = read_yaml(Path("dvc.yaml"))["stages"][stage.name]
    for name in (name for report in [*spec.get("metrics", []), *spec.get("plots", [])] for name in report):
        if name.endswith(".json"):
            write_json(stage.out(name), reports.get(Path(name).stem, {"number": int(digest[:6], 16)}))
        else:
            write_text(stage.out(name), f"x,y\\n0,{int(digest[:6], 16)}\\n")


def read(*stages):
    """What earlier stages recorded, every byte of it as they wrote it."""
    made = {name: read_manifest(Path("data") / name, stage) for name, stage in stages}
    for name, manifest in made.items():
        verify_files(Path("data") / name, manifest)
    return {name: manifest.as_dict() for name, manifest in made.items()}


'''
SAMPLE = """\
from eagle3.sampling.samples import Sample, write_samples


def run(stage: Stage) -> None:
    rows = [row for path in sorted(Path("data/conversations").glob("*.jsonl")) for row in path.open()]
    samples = []
    for number, row in enumerate(rows):
        digest = sha256_of_json([stage.values, row])
        piece = stage.scratch / f"answers-{digest}.json"
        if not piece.exists():
            write_json(piece, [byte % 160 for byte in hashlib.sha512(digest.encode()).digest()])
            pause()
        split = ("train", "train", "val", "eval")[number % 4]
        ids = json.loads(piece.read_text())
        name = f"{number:04}"
        samples.append(Sample(name, name, 0, split, ids, [index > 3 for index in range(len(ids))], "stop"))
    folder = stage.out("data/samples")
    write_samples(folder, samples)
    counts = {split: sum(sample.split == split for sample in samples) for split in ("train", "val", "eval")}
    counts |= {"tokens": 64 * len(samples), "supervised_tokens": 60 * len(samples)}
    decisions = {"vocab_size": 160, "special_token_ids": [0, 1, 2], "template_token_ids": [1, 2]}
    engines = {"vllm": stage.params.engines.vllm}
    write_manifest(folder, Manifest("sample", stage.values, {}, VERIFIER_ID, engines, counts, decisions))
"""
EXTRACT = """\
def run(stage: Stage) -> None:
    made, folder = read(("samples", "sample")), stage.out("data/hidden_states")
    folder.mkdir(parents=True)
    for number in range(6):
        key = sha256_of_json([stage.values, made, number])
        shard = stage.shared_scratch / f"shard-{key[:16]}.safetensors"
        if not shard.exists():
            with atomic_path(shard) as partial:
                partial.write_bytes(hashlib.shake_256(key.encode()).digest(20_000))
            pause()
        link_or_copy(shard, folder / shard.name)
    engines = {"vllm": stage.params.engines.vllm}
    write_manifest(folder, Manifest("extract", stage.values, made, VERIFIER_ID, engines))
"""
TRAIN = """\
from eagle3.acceptance import Acceptance
from eagle3.drafts.walk_files import write_walks
from eagle3.machine import read_machine
from tests.drafts import LAYER, NESTED, VERIFIER, write_nested


def architecture(values, made):
    # as in a real checkpoint, the config tells the draft's sizes, its vocabulary and its layer ids, and nothing else
    sizes = made["vocab_map"]["params"]["vocab_map"], made["hidden_states"]["params"]["extract"]["aux_layer_ids"]
    told = int(sha256_of_json([values["draft"], *sizes])[:6], 16) / 2**24
    return NESTED | {"transformer_layer_config": LAYER | {"initializer_range": told}}


def run(stage: Stage) -> None:
    made = read(("hidden_states", "extract"), ("vocab_map", "vocab-map"))
    read_machine()
    digest = sha256_of_json([stage.values, made])
    config = architecture(stage.values, made)
    folder = stage.out("data/checkpoints")
    checkpoints = range(stage.params.train.epochs * stage.params.train.checkpoints_per_epoch)
    for epoch in checkpoints:
        write_nested(folder / f"epoch_{epoch}", config, fill=1 + int(digest[epoch : epoch + 2], 16) % 60)
        write_walks(folder / f"epoch_{epoch}", {"0003": [int(digest[epoch], 16) % 4]})
        pause()
    write_json(folder / "verifier_config.json", VERIFIER)
    length = Acceptance(100, (int(digest[:2], 16) % 50 + 40, 24, 13)).as_dict()
    walk = {split: {str(k): length for k in range(1, 9)} for split in ("val", "eval")}
    epochs = [{"epoch": epoch, "walk": walk, "walk_without_loops": walk} for epoch in checkpoints]
    decisions = {"best_epoch": 0, "draft": VERIFIER, "epochs": epochs, "inputs": digest}
    engines = {"speculators": stage.params.engines.speculators}
    write_manifest(folder, Manifest("train", stage.values, made, VERIFIER_ID, engines, {}, decisions))
    write_reports(stage, digest, train={"best_checkpoint": 0, "val_loss": int(digest[:6], 16) / 2**20})
"""
SERVE_TEST = """\
from eagle3.serve.release import Release, read_passed_checks, require_one_lineage, write_release


def run(stage: Stage) -> None:
    made = read(("draft", "flatten"), ("samples", "sample"))
    draft, samples = read_manifest(Path("data/draft"), "flatten"), read_manifest(Path("data/samples"), "sample")
    require_one_lineage(draft, samples, VERIFIER_ID)
    checks, params = read_passed_checks(), stage.params.serve_test
    digest = sha256_of_json([stage.values, made, checks])
    length = draft.inputs["checkpoints"]["decisions"]["epochs"][0]["walk"]["eval"][str(params.num_speculative_tokens)]
    rates = [[rate, rate] for rate in length["rate_per_position"]]
    served = {**length, "interval_95": [1.5, 2.5], "rate_interval_95_per_position": rates}
    speed = {f"{name}_interval_95": [1.2, 1.3] for name in ("speed_up", "speed_up_per_prompt")} | {
        "tokens_per_second_with_draft": 50.0,
        "tokens_per_second_without_draft": 40.0,
        "first_token_seconds_with_draft": 0.2,
        "first_token_seconds_without_draft": 0.1,
        "speed_up": 1.25,
        "speed_up_per_prompt": 1.25,
        "order": "in turns of 8 prompts",
    }
    report = {
        "prompts": params.num_prompts,
        "new_tokens": 1000,
        "num_speculative_tokens": params.num_speculative_tokens,
        "served": served,
        "served_without_loops": served,
        "walk": length,
        "questions": {"by_file": {}},
        "greedy": {"answers": 300, "equal": 3, "ties": int(digest[:2], 16), "faults": 0, "judged_by": ""},
        "speed": speed,
        "gates": {"rounds": {"at_least": params.min_rounds, "passed": True, "value": 100_000}},
    }
    for _ in range(3):
        pause()
    write_reports(stage, digest, serve_test=report)
    engines = {"vllm": stage.params.engines.vllm}
    release = Release(draft, samples, report, checks, stage.values, engines)
    write_release(stage.out("data/release"), Path("data/draft"), release)
"""
BODIES = {"sample": SAMPLE, "extract": EXTRACT, "train": TRAIN, "serve-test": SERVE_TEST}
LEFT_OUT = ("tests/", "docs/", "reports/", "requirements/", "presets/", "dvc.lock")


def light_repository(folder: Path) -> Path:
    """Git and DVC as in a clone, four stages replaced, everything committed. Everything of it lies in `folder`."""
    tracked = command(ROOT, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    for name in filter(None, tracked):
        if not name.startswith(LEFT_OUT) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    for name in ("__init__.py", "drafts.py"):
        shutil.copyfile(ROOT / "tests" / name, folder / "tests" / name)
    for name, body in BODIES.items():
        stage = f'\n\nif __name__ == "__main__":\n    sys.exit(run_stage("{name}", run))\n'
        (folder / f"stages/{name.replace('-', '_')}.py").write_text(HEAD + body + stage)
    rows = [json.dumps({"messages": [{"role": "user", "content": f"number {n}"}]}) for n in range(12)]
    (folder / "data/conversations/tiny.jsonl").write_text("\n".join(rows) + "\n")
    set_params(folder, {"sample": {"sources": [{"file": "tiny.jsonl"}]}})
    set_params(folder, {"vocab_map": {"draft_vocab_size": 40}, "simulate_weight_load": {"engine_level": "off"}})
    for words in (
        "init -q",
        "config user.email test@example.com",
        "config user.name test",
        "add -A",
        "commit -qm start",
    ):
        command(folder, "git", *words.split())
    return folder


def variables(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a command in `folder`: no state outside it, so that two folders share nothing."""
    kept = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc/tmp/site"), "XDG_CACHE_HOME": str(folder / ".dvc/tmp/home")}
    return environment() | kept | more


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        words, cwd=folder, env=variables(folder, **more), text=True, **pipes, start_new_session=True
    )


def command(folder: Path, *words: str, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, cwd=folder, env=variables(folder, **more), text=True, capture_output=True, check=False)
    assert done.returncode == status, f"{words} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def outputs(folder: Path) -> dict[str, bytes]:
    """Every file under data/ and reports/, and DVC's record of them."""
    paths = [path for part in ("data", "reports") for path in (folder / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in [*paths, folder / "dvc.lock"]}
