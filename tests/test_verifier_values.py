"""Head and embedding against a verifier's that lies in one file or in shards, tied or not, in any float dtype."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eagle3.__main__ import main
from eagle3.checks.config_check import Verdict
from eagle3.checks.servers import SERVERS
from eagle3.checks.verifier_values import compare_with_verifier, floats
from eagle3.formats.flat_config import flatten
from eagle3.formats.safetensors_headers import read_header, write_header
from eagle3.verifiers.verifier_config import parse_verifier_config
from tests.drafts import FROZEN, NESTED, VERIFIER
from tests.drafts import TRAINED as TENSORS

V, K, H = 160, 40, 64
IDS = np.arange(K) * 3
CONFIG = {**VERIFIER, "vocab_size": V, "hidden_size": H}
HEAD, EMBED = "lm_head.weight", "embed_tokens.weight"


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The raw numbers of `values` in a safetensors dtype (bfloat16 and float8 cut, not rounded: one step at most)."""
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "F8_E5M2":
        return (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    return values.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype])


def save(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    header = write_header({name: (dtype, value.shape) for name, (dtype, value) in tensors.items()}, {})
    path.write_bytes(header + b"".join(value.tobytes() for _, value in tensors.values()))
    return path


def matrix(seed: int, rows: int = V) -> np.ndarray:
    """Rows with a common direction, as the embeddings of real models have it."""
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, H)) + random.standard_normal(H) / 2


OFFSETS = IDS - np.arange(K)
EMBEDDING, VERIFIER_HEAD = matrix(0), matrix(1)


@pytest.fixture
def verifier(tmp_path):
    """A verifier in two shards with an index, as the hub has them; a multi-token layer with an embedding of its own."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    own = {"model.layers.8.embed_tokens.weight": ("BF16", rounded(matrix(9), "BF16"))}
    embedding = {"model.embed_tokens.weight": ("BF16", rounded(EMBEDDING, "BF16"))}
    save(folder / "model-00001-of-00002.safetensors", own | embedding)
    save(folder / "model-00002-of-00002.safetensors", {HEAD: ("BF16", rounded(VERIFIER_HEAD, "BF16"))})
    names = dict.fromkeys([*own, *embedding], "model-00001-of-00002.safetensors")
    names[HEAD] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def judged(
    tmp_path, verifier, head=None, embed=None, d2t=OFFSETS, dtype="BF16", config=CONFIG, engine="vllm"
) -> Verdict:
    tensors = {} if d2t is None else {"d2t": ("I64", np.asarray(d2t, np.int64))}
    tensors |= {} if head is None else {HEAD: (dtype, rounded(head, dtype))}
    tensors |= {} if embed is None else {EMBED: (dtype, rounded(embed, dtype))}
    header = read_header(save(tmp_path / "draft.safetensors", tensors))
    verdict = Verdict()
    compare_with_verifier(
        {each.name: each for each in header.tensors},
        verifier,
        parse_verifier_config(config),
        verdict,
        SERVERS[engine].name,
    )
    return verdict


def codes(verdict: Verdict) -> list[str]:
    return [problem.code for problem in verdict.problems]


def test_equal_rows_are_a_frozen_head_and_the_same_embedding(tmp_path, verifier):
    verdict = judged(tmp_path, verifier, VERIFIER_HEAD[IDS], EMBEDDING)
    assert verdict.problems == verdict.not_checked == []
    assert verdict.checked == [
        "lm_head.weight against the verifier's: frozen, 40 of 40 rows equal",
        "embed_tokens.weight against the verifier's: the same, 160 of 160 rows equal",
    ]


def test_sglang_replaces_an_embedding_that_was_trained(tmp_path, verifier):
    trained = EMBEDDING.copy()
    trained[7] += 1
    assert codes(judged(tmp_path, verifier, embed=trained)) == []
    verdict = judged(tmp_path, verifier, embed=trained, engine="sglang")
    assert codes(verdict) == ["embedding-replaced"]
    assert "SGLang 0.5.23 puts the verifier's in its place" in verdict.problems[0].consequence
    assert codes(judged(tmp_path, verifier, VERIFIER_HEAD[IDS], EMBEDDING, engine="sglang")) == []


@pytest.mark.parametrize("change", [0.1, 0.5, 1.0])
def test_a_trained_head_may_differ(tmp_path, verifier, change):
    head = VERIFIER_HEAD[IDS] + change * np.random.default_rng(2).standard_normal((K, H))
    verdict = judged(tmp_path, verifier, head, EMBEDDING + change * matrix(3) / 2)
    assert verdict.problems == []
    assert "not the same, 0 of 40 rows equal" in verdict.checked[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_head_trained_from_random_numbers_is_no_wrong_map(tmp_path, verifier, seed):
    assert judged(tmp_path, verifier, matrix(100 + seed, K)).problems == []


TRAINED = 0.3 * np.random.default_rng(4).standard_normal((K, H))
SHIFTED = IDS + 1
WRONG_MAPS = {
    "verifier ids for offsets": (VERIFIER_HEAD[np.arange(K) * 2], np.arange(K) * 2, "write d2t - arange"),
    "shifted by one": (VERIFIER_HEAD[IDS], SHIFTED - np.arange(K), "tokens 1 lower: a shifted map"),
    "the head's order is by count": (VERIFIER_HEAD[IDS[::-1]], IDS - np.arange(K), "its order is not the head's"),
    "the head of the first tokens": (VERIFIER_HEAD[:K], IDS + 30 - np.arange(K), "row i belongs to token i"),
    "no map": (VERIFIER_HEAD[IDS + 40], None, "tokens that the map does not have"),
    "another head's map": (VERIFIER_HEAD[IDS], np.sort((IDS * 7 + 1) % V) - np.arange(K), "another head's"),
}


@pytest.mark.parametrize("trained", [0, TRAINED], ids=["frozen", "trained"])
@pytest.mark.parametrize(("head", "d2t", "said"), WRONG_MAPS.values(), ids=WRONG_MAPS)
def test_a_wrong_map_is_found_by_the_rows_and_named(tmp_path, verifier, head, d2t, said, trained):
    verdict = judged(tmp_path, verifier, head + trained, d2t=d2t)
    assert codes(verdict) == ["head-map"]
    assert said in verdict.problems[0].expected + verdict.problems[0].fix


def test_a_map_that_is_wrong_from_some_row_on_is_found(tmp_path, verifier):
    ids = IDS + (np.arange(K) > 30)
    assert codes(judged(tmp_path, verifier, VERIFIER_HEAD[IDS], d2t=ids - np.arange(K))) == ["head-map"]


def test_a_shifted_or_shuffled_embedding_is_found(tmp_path, verifier):
    for order in (np.roll(np.arange(V), 1), np.random.default_rng(5).permutation(V)):
        assert codes(judged(tmp_path, verifier, embed=EMBEDDING[order] + 0.1 * matrix(6))) == ["embedding-order"]


def test_an_embedding_of_another_model_or_basis_is_a_warning(tmp_path, verifier):
    basis, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((H, H)))
    for other in (matrix(8), EMBEDDING @ basis):
        verdict = judged(tmp_path, verifier, embed=other)
        assert (codes(verdict), verdict.verdict) == (["embedding-other"], "warning")


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64", "F8_E5M2"])
def test_the_same_rows_in_another_dtype_are_equal(tmp_path, verifier, dtype):
    values = floats(rounded(VERIFIER_HEAD, "BF16"), "BF16")
    verdict = judged(tmp_path, verifier, values[IDS], dtype=dtype)
    assert "frozen" in verdict.checked[0] or dtype == "F8_E5M2"
    assert verdict.problems == []


def test_a_wrong_map_is_found_in_float8(tmp_path, verifier):
    verdict = judged(tmp_path, verifier, VERIFIER_HEAD[IDS], d2t=SHIFTED - np.arange(K), dtype="F8_E5M2")
    assert codes(verdict) == ["head-map"]


def test_float8_e4m3_reads_as_torch_reads_it():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(floats(codes, "F8_E4M3"), wanted, equal_nan=True)


def test_a_tied_verifier_has_its_embedding_as_head(tmp_path):
    folder = tmp_path / "tied"
    folder.mkdir()
    save(folder / "model.safetensors", {"model.embed_tokens.weight": ("BF16", rounded(EMBEDDING, "BF16"))})
    verdict = judged(tmp_path, folder, EMBEDDING[IDS], config={**CONFIG, "tie_word_embeddings": True})
    assert verdict.checked == ["lm_head.weight against the verifier's: frozen, 40 of 40 rows equal (tied)"]
    untied = judged(tmp_path, folder, EMBEDDING[IDS])
    assert untied.not_checked[0]["why"] == (
        "the verifier's folder holds no lm_head and its config does not tie it to the embedding"
    )


def test_an_embedding_under_an_unknown_name_is_said_with_candidates(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    save(folder / "model.safetensors", {"emb.table": ("BF16", rounded(EMBEDDING, "BF16"))})
    verdict = judged(tmp_path, folder, embed=EMBEDDING)
    assert "candidates: emb.table [160, 64]" in verdict.not_checked[1]["why"]


def test_what_cannot_be_compared_is_said(tmp_path, verifier):
    outside = judged(tmp_path, verifier, VERIFIER_HEAD[IDS], d2t=np.full(K, 500))
    assert outside.not_checked[0]["why"].startswith("d2t names no row")
    assert judged(tmp_path, verifier).not_checked == [
        {"what": f"{name} against the verifier's", "why": "the draft has none"} for name in (HEAD, EMBED)
    ]
    narrow = judged(tmp_path, verifier, embed=EMBEDDING[:, :32])
    assert "another width" in narrow.not_checked[1]["why"]
    (verifier / "model-00002-of-00002.safetensors").unlink()
    assert "no such file" in judged(tmp_path, verifier, VERIFIER_HEAD[IDS]).not_checked[0]["why"]


def test_rows_of_zeros_and_nan_disturb_nothing(tmp_path, verifier):
    head = VERIFIER_HEAD[IDS].copy()
    head[3], head[5] = 0, np.nan
    assert judged(tmp_path, verifier, head).problems == []


@pytest.fixture
def folder(tmp_path):
    """A flat draft whose head is cut from the verifier's at IDS."""
    shapes = {**TENSORS, **FROZEN}
    random = np.random.default_rng(11)
    values = {
        name: (dtype, rounded(random.standard_normal(shape), "BF16"))
        for name, (dtype, shape) in shapes.items()
        if dtype == "BF16"
    }
    values[HEAD] = ("BF16", rounded(VERIFIER_HEAD[IDS], "BF16"))
    values[EMBED] = ("BF16", rounded(EMBEDDING, "BF16"))
    values["d2t"] = ("I64", IDS - np.arange(K))
    values["t2d"] = ("BOOL", np.isin(np.arange(V), IDS))
    draft = tmp_path / "draft"
    draft.mkdir()
    save(draft / "model.safetensors", values)
    (draft / "config.json").write_text(json.dumps(flatten(NESTED)))
    return draft


def test_check_compares_with_the_weights_of_the_verifier(folder, verifier, capsys):
    (verifier / "config.json").write_text(json.dumps(CONFIG))
    assert main(["check", str(folder), "--verifier", str(verifier), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["not_checked"]) == ("ok", [])
    assert "lm_head.weight against the verifier's: frozen, 40 of 40 rows equal" in found["checked"]
    assert main(["check", str(folder), "--verifier", str(verifier / "config.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["what"] for each in found["not_checked"]] == ["head and embedding against the verifier's"]


def test_broken_weights_of_the_verifier_are_a_problem(folder, verifier, capsys):
    (verifier / "config.json").write_text(json.dumps(CONFIG))
    (verifier / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 20)
    assert main(["check", str(folder), "--verifier", str(verifier)]) == 1
    assert "broken-safetensors: model-00002" in capsys.readouterr().out
