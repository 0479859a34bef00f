"""The logits of training against vLLM's own class and attention kernel, and every way to serve another draft."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checks.engine_load import Engine, engine
from eagle3.checks.engine_parity import Parity, epochs_parity, parity_of, parity_problems, served_logits
from eagle3.drafts.checkpoints import FROZEN, TRAINED, write_epoch
from eagle3.drafts.draft_architecture import resolve_architecture
from eagle3.drafts.draft_model import build_draft
from eagle3.drafts.parity import MAX_POSITIONS, probe_of, probe_rows
from eagle3.drafts.training_data import Document, read_documents
from eagle3.formats.checkpoint_files import PROBE
from eagle3.formats.flattening import flatten_checkpoint
from eagle3.formats.parity_probe import ParityProbe, read_probe, write_probe
from eagle3.params import DraftParams, VerifierParams, read_params
from eagle3.problems import InvalidInput
from eagle3.verifiers.verifier import Verifier, resolve_verifier
from tests.code_deps import ROOT
from tests.tiny import tiny_verifier
from tests.training_inputs import States, random_states

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]
PARAMS = read_params(ROOT / "params.yaml")
DRAFT, BOUND = PARAMS.draft, PARAMS.simulate_weight_load.max_logit_steps
K, STEPS = 64, 3
H, NOISE = 256, 0.05
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
FC_NORMS = {"none": (False, False), "norm_before_fc": (True, False), "fc_norm": (False, True)}
ARCHITECTURES = {
    f"{fc}, residual {before}, output {output}": replace(
        DRAFT, norm_before_residual=before, norm_before_fc=whole, fc_norm=each, norm_output=output
    )
    for (fc, (whole, each)), before, output in itertools.product(FC_NORMS.items(), (False, True), (False, True))
} | {
    "two layers": replace(DRAFT, num_hidden_layers=2),
    "two layers, other norms": replace(DRAFT, num_hidden_layers=2, norm_before_residual=False, norm_output=False),
    "one query per key head": replace(DRAFT, num_key_value_heads=4),
    "yarn": replace(DRAFT, rope_parameters=YARN),
    "window": replace(DRAFT, sliding_window=64),
    "biases": replace(DRAFT, attention_bias=True),
}

CASES = [(name, 3) for name in ARCHITECTURES] + [
    ("norm_before_fc, residual True, output True", 4),
    ("fc_norm, residual False, output False", 4),
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    path = tiny_verifier(tmp_path_factory.mktemp("verifier"), hidden_size=H)
    return resolve_verifier(VerifierParams(str(path), None, None, False))


@pytest.fixture(scope="module")
def vllm(verifier) -> Iterator[Engine]:
    with engine(verifier.path / "config.json") as real:
        yield real


def served_checkpoint(verifier: Verifier, params: DraftParams, folder: Path, num_aux: int = 3) -> Path:
    """A draft with weights that matter, as train writes it and flatten rewrites it."""
    ids = torch.arange(K) * 3 + 1
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[ids] = True
    d2t = ids - torch.arange(K)
    architecture = resolve_architecture(params, verifier.text_config, K, [1, 2, 3, 5][-num_aux:])
    model = build_draft(architecture, verifier, (d2t, t2d), STEPS, 0)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:  # norms away from one, and weights wide enough for clear preferences
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * NOISE
            with torch.no_grad():  # as the file will hold it: no logit of a random draft stands out from its rounding
                tensor.copy_((tensor + noise).bfloat16())
    states = random_states(3, 40, num_aux, H)
    rows = probe_rows(states, val_documents(states, 128), 128, STEPS)
    nested = write_epoch(folder / "nested", 0, model, verifier.source)
    write_probe(nested / PROBE, probe_of(model, rows, d2t, STEPS))
    flatten_checkpoint(nested, folder / "epoch_0")
    return folder / "epoch_0"


def val_documents(states: States, total_seq_len: int) -> list[Document]:
    return read_documents(states, total_seq_len, STEPS).by_split["val"]


def parity(vllm: Engine, folder: Path) -> Parity:
    probe = read_probe(folder / PROBE)
    _, model, config = vllm.draft(folder)
    return parity_of(served_logits(model, config, probe), probe)


@pytest.mark.parametrize(("name", "num_aux"), CASES)
def test_what_was_trained_is_what_vllm_computes(vllm, verifier, tmp_path, name, num_aux):
    found = parity(vllm, served_checkpoint(verifier, ARCHITECTURES[name], tmp_path, num_aux))
    assert found.positions == STEPS * 3 * 8
    assert list(parity_problems(name, found, BOUND)) == [], found


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def edit_tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
        change(tensors)
        (folder / file).unlink()  # a hard link of the training's
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return edit


def swap(first: str, second: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(first)]:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def roll(name: str, places: int, dim: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensors[name].roll(places, dim).contiguous()})


def one_id_wrong(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][5] += 1


OTHERS = replace(DRAFT, norm_before_residual=False, norm_before_fc=False, norm_output=False)
FAULTS: dict[str, tuple[DraftParams, Callable[[Path], None]]] = {
    "norm_before_residual lost": (DRAFT, edit_config(norm_before_residual=False)),
    "norm_before_residual invented": (OTHERS, edit_config(norm_before_residual=True)),
    "norm_before_fc lost": (DRAFT, edit_config(norm_before_fc=False, eagle_config={"use_aux_hidden_state": True})),
    "norm_output lost": (DRAFT, edit_config(norm_output=False)),
    "norm_output invented": (OTHERS, edit_config(norm_output=True)),
    "fc_norm lost": (
        replace(OTHERS, fc_norm=True),
        lambda folder: (edit_config(fc_norm=False)(folder), edit_tensors(TRAINED, without("fc_norm"))(folder))[0],
    ),
    "rope theta": (DRAFT, edit_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "yarn lost": (
        replace(DRAFT, rope_parameters=YARN),
        edit_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    ),
    "epsilon": (DRAFT, edit_config(rms_norm_eps=0.1)),
    "window invented": (DRAFT, edit_config(sliding_window=9, layer_types=["sliding_attention"])),
    "key heads regrouped": (DRAFT, edit_tensors(TRAINED, roll("layers.0.self_attn.k_proj.weight", 32, 0))),
    "aux layers in another order": (DRAFT, edit_tensors(TRAINED, roll("fc.weight", H, 1))),
    "layers in another order": (
        replace(DRAFT, num_hidden_layers=2),
        edit_tensors(TRAINED, swap("layers.0.mlp", "layers.1.mlp")),
    ),
    "head of other rows": (DRAFT, edit_tensors(FROZEN, roll("lm_head.weight", 1, 0))),
    "one id of the map": (DRAFT, edit_tensors(FROZEN, one_id_wrong)),
    "another embedding": (DRAFT, edit_tensors(FROZEN, roll("embed_tokens.weight", 1, 0))),
}  # fmt: skip


def without(prefix: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_that_is_served_otherwise_is_found(vllm, verifier, tmp_path, fault):
    params, plant = FAULTS[fault]
    folder = served_checkpoint(verifier, params, tmp_path)
    plant(folder)
    with pytest.raises(InvalidInput, match=r"(?s)parity: epoch_0.*only acceptance falls"):
        epochs_parity(vllm, [folder], BOUND)


def test_the_embedding_may_be_the_verifiers(vllm, verifier, tmp_path):
    whole = served_checkpoint(verifier, DRAFT, tmp_path)
    flatten_checkpoint(tmp_path / "nested/epoch_0", tmp_path / "epoch_1", frozenset({"embed_tokens.weight"}))
    assert (
        epochs_parity(vllm, [tmp_path / "epoch_1"], BOUND)["epoch_1"] == epochs_parity(vllm, [whole], BOUND)["epoch_0"]
    )


def test_a_window_inside_the_context_is_served_with_fewer_keys_than_it_was_trained_with(vllm, verifier, tmp_path):
    """speculators 0.9.0 lets every unrolled step look back from where it started; a server's window moves on."""
    found = parity(vllm, served_checkpoint(verifier, replace(DRAFT, sliding_window=9), tmp_path))
    assert found.apart > 2 * BOUND
    assert found.where[0] > 0, "step 0 sees the same keys"


def test_a_missing_or_damaged_probe_is_refused(vllm, verifier, tmp_path):
    folder = served_checkpoint(verifier, DRAFT, tmp_path)
    data = (folder / PROBE).read_bytes()
    (folder / PROBE).unlink()
    for content in (None, b"", data[:-100], b"x" * 200):
        if content is not None:
            (folder / PROBE).write_bytes(content)
        with pytest.raises(InvalidInput, match=r"parity-probe: .*parity\.probe"):
            epochs_parity(vllm, [folder], BOUND)


PLAIN = ParityProbe(
    torch.zeros(6, 4).bfloat16(),
    torch.arange(6),
    torch.zeros(6, 2).bfloat16(),
    torch.tensor([0, 6]),
    torch.tensor([2]),
    torch.tensor([[[1.0, 200.0]]]),
    torch.tensor([1, 3]),
)


def served(*values: float) -> torch.Tensor:
    return torch.tensor([[values]])


def told(*values: float) -> str:
    return "".join(problem.found for problem in parity_problems("epoch_0", parity_of(served(*values), PLAIN), 4.0))


def test_differences_count_in_steps_of_the_largest_logit():
    low = float("-inf")
    assert parity_of(served(low, 1.0, low, 200.0, low), PLAIN) == Parity(1, 0.0, (0, 0), 0, 0.0)
    # bfloat16 has steps of 1 between 128 and 256
    assert parity_of(served(low, 1.0, low, 204.0, low), PLAIN).apart == 4.0
    assert told(low, 1.0, low, 204.0, low) == ""
    assert told(low, 6.0, low, 200.0, low) == "logits 5 bf16 steps apart (unrolled step 0, start 0 of the probe)"
    found = told(low, 1.0, 200.0, low, low)
    assert found.startswith("2 draft rows mean other tokens; logits ")
    assert found.endswith("a token proposed that lay 199 bf16 steps below training's own")
    assert "logits inf bf16 steps apart" in told(low, float("nan"), low, 200.0, low)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("starts", torch.tensor([6]), "outside"),
        ("offsets", torch.tensor([0, 3, 3, 6]), "offsets"),
        ("aux_states", torch.zeros(5, 4).bfloat16(), r"aux_states \[5, 4\]"),
        ("aux_states", torch.full((6, 4), float("nan")).bfloat16(), "not finite"),
        ("logits", torch.zeros(1, 1, 3), r"logits \[1, 1, 3\]"),
        ("input_ids", torch.arange(6).int(), "int64"),
        ("logits", torch.zeros(1, 1, 2).bfloat16(), "float32"),
    ],
)
def test_a_probe_that_contradicts_itself_is_refused(tmp_path, field, value, found):
    tensors = {**vars(PLAIN), field: value}
    save_file(tensors, tmp_path / PROBE)
    with pytest.raises(InvalidInput, match=found):
        read_probe(tmp_path / PROBE)


def test_the_probe_takes_the_beginnings_of_a_few_documents():
    states = random_states(7, 300, 3, H)
    rows = probe_rows(states, val_documents(states, 512), 512, STEPS)
    assert [document.positions for document in rows.documents] == [
        MAX_POSITIONS,
        MAX_POSITIONS,
        512 - 2 * MAX_POSITIONS,
    ]
    assert len(rows.rows(0)) == 1
