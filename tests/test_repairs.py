"""`check --fix` over the corpus and over single faults: what is certain is repaired, the rest is left and said."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path

import pytest

from eagle3.__main__ import main
from eagle3.checks.checkpoint_check import check_checkpoint
from eagle3.checks.repairs import read_ids, write_repaired
from eagle3.formats.checkpoint_files import INDEX, read_checkpoint_tensors
from eagle3.formats.flat_config import flatten
from eagle3.formats.safetensors_headers import num_bytes, read_header, write_header
from eagle3.problems import InvalidInput
from eagle3.verifiers.verifier_config import parse_verifier_config, read_verifier_config
from tests.drafts import FROZEN, NESTED, TRAINED, VERIFIER, Weights, write_nested, write_tensors
from tests.test_corpus import BAD, GOOD, checkpoint

JUDGE = parse_verifier_config(VERIFIER)


def errors(problems) -> set[tuple[str, str]]:
    return {(each.code, each.where) for each in problems if each.severity == "error"}


def repaired(folder: Path, out: Path, verifier=JUDGE, values=False, engine="vllm"):
    return write_repaired(folder, out, lambda each: check_checkpoint(each, verifier, values=values, engine=engine)[0])


# Every problem that is an error has one right value.
REPAIRED = [
    "attention_under_another_name", "aux_states_switched_off", "class_of_qwen2", "class_of_the_verifier",
    "depth_of_the_verifier", "draft_vocabulary_absent", "draft_vocabulary_as_float", "draft_vocabulary_as_text",
    "draft_vocabulary_negative", "draft_vocabulary_of_another_head", "draft_vocabulary_zero", "dtype_auto",
    "dtype_bf16", "dtype_with_its_module", "embedding_of_the_wrapped_model", "fc_norm_without_its_flag",
    "flag_in_eagle_config_against_the_tensor", "float_for_a_size", "four_aux_layers_flat", "four_aux_layers_nested",
    "head_dim_absent", "head_trimmed", "head_under_another_name", "heads_of_another_model",
    "heads_that_do_not_divide", "ids_as_text", "ids_under_a_foreign_key", "input_norm_without_its_flag",
    "kv_heads_absent", "kv_heads_of_another_model", "layer_prefix_misspelled", "map_beside_equal_vocabularies",
    "map_of_floats", "map_of_two_dimensions", "mla_as_deepseek_v3", "mla_as_kimi_k2", "mla_as_llama",
    "mla_query_rank_null", "mla_ranks_absent", "mla_under_the_llama_class", "mla_value_dim_too_small",
    "model_type_absent", "names_of_mtp_layers", "names_with_an_unknown_prefix", "names_with_model",
    "names_with_module", "names_with_two_prefixes", "narrow_draft_without_target_width", "nested_and_flat_mixed",
    "nested_of_another_type", "null_for_a_flag", "optimizer_state", "positions_absent_nested",
    "qk_norms_under_llama", "qwen3_type_without_head_dim", "sglang_aux_states_switched_off",
    "sglang_class_of_the_verifier", "sglang_draft_vocabulary_absent", "sglang_gate_smaller_than_the_config",
    "sglang_ids_at_the_top_level_alone", "sglang_ids_in_vllms_numbering", "sglang_ids_of_a_deepseek_verifier",
    "sglang_input_norm_without_its_flag", "sglang_layer_prefix_misspelled", "sglang_null_beside_a_head",
    "sglang_positions_too_few", "sglang_rope_of_the_name_su", "sglang_tied_embeddings", "target_width_null",
    "text_for_a_float",
    "text_for_a_size", "text_for_the_classes", "unknown_model_type", "verifier_head_left_in",
    "vocabulary_of_the_tokenizer",
]  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *GOOD], ids=lambda case: f"{case.parent.name}/{case.name}")
def test_what_is_certain_is_gone_from_the_copy_and_nothing_new_comes(case, tmp_path):
    """And a repair is whole: a second one finds nothing more to do."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    arguments = checkpoint(case, source)
    verifier = read_verifier_config(Path(arguments[-1]))
    engine = arguments[arguments.index("--engine") + 1] if "--engine" in arguments else "vllm"
    before, _ = check_checkpoint(source, verifier, engine=engine)
    content = {path.name: path.read_bytes() for path in source.iterdir()}
    if case.name == "size_written_twice":
        with pytest.raises(InvalidInput, match="repeated-key"):
            repaired(source, out, verifier)
        assert os.listdir(tmp_path) == ["source"]
        return
    repairs = repaired(source, out, verifier, engine=engine)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == content, "the original is not touched"
    assert sorted(os.listdir(tmp_path)) == (["out", "source"] if repairs.changed else ["source"])
    left = errors(repairs.verdict.problems)
    assert left <= errors(before.problems)
    assert (left == set()) == (case.name in REPAIRED or case in GOOD)
    if repairs.changed:
        assert repaired(out, tmp_path / "again", verifier, engine=engine).changed == []


@pytest.fixture
def flat(tmp_path):
    """Our own flat checkpoint, which is ok without a warning."""
    return write_flat(tmp_path / "flat")


def write_flat(folder: Path, weights: Weights | None = None, **changes) -> Path:
    folder.mkdir()
    write_tensors(folder / "model.safetensors", weights or FROZEN | TRAINED, 3)
    config = flatten(NESTED) | changes
    kept = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def change(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


CERTAIN = {
    "size of the file": {"draft_vocab_size": 41},
    "numbers as text": {"hidden_size": "64", "rms_norm_eps": "1e-5", "num_hidden_layers": 1.0},
    "class and type of another model": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "depth of the verifier": {"num_hidden_layers": 32},
    "no size at all": {"draft_vocab_size": "absent", "num_key_value_heads": "absent"},
    "flags": {"norm_before_fc": False, "eagle_config": {"use_aux_hidden_state": False, "norm_before_fc": False}},
    "positions": {"max_position_embeddings": 128},
    "number of states": {"num_aux_hidden_states": 4},
    "tied": {"tie_word_embeddings": True},
    "rope twice": {"rope_scaling": {"rope_theta": 10000.0, "rope_type": "default"}},
}


@pytest.mark.parametrize("changes", CERTAIN.values(), ids=CERTAIN)
def test_a_checkpoint_whose_problems_are_all_certain_becomes_ok(changes, tmp_path):
    folder = write_flat(tmp_path / "flat", **changes)
    before, _ = check_checkpoint(folder, JUDGE)
    assert before.problems
    assert all(each.changes for each in before.problems if each.code not in FOLLOWS)
    repairs = repaired(folder, tmp_path / "out")
    assert (repairs.verdict.verdict, repairs.verdict.problems, repairs.left) == ("ok", [], [])
    wanted = json.loads((write_flat(tmp_path / "good") / "config.json").read_text())
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: found[key] for key in wanted if key not in ("eagle_config", "rope_scaling")} == {
        key: wanted[key] for key in wanted if key not in ("eagle_config", "rope_scaling")
    }


# What the server makes of the tensors because a size is wrong; the size's own problem carries the change.
FOLLOWS = ("window", "tensor-shape", "tensor-cut", "tensor-missing", "tensor-dropped", "unknown-tensor")


def test_the_words_of_the_fix_are_what_is_done(tmp_path):
    folder = write_flat(tmp_path / "flat", max_position_embeddings=128, tie_word_embeddings=True)
    before, _ = check_checkpoint(folder, JUDGE)
    done = repaired(folder, tmp_path / "out").changed
    for problem in before.as_dict()["problems"]:
        assert any(problem["fix"].startswith(each.removeprefix("config.json: ")) for each in done)
    assert len(done) == len(before.problems) == 2


def data_of(tensor) -> bytes:
    return tensor.file.read_bytes()[tensor.begin : tensor.end]


def test_names_are_changed_and_every_byte_kept_in_shards(tmp_path):
    folder = write_nested(tmp_path / "nested")
    header = read_header(folder / "model-trained.safetensors")
    prefixed = {f"module.{each.name}": (each.dtype, each.shape) for each in header.tensors}
    data = b"".join(map(data_of, header.tensors))
    (folder / "model-trained.safetensors").write_bytes(write_header(prefixed, {}) + data)
    weight_map = dict.fromkeys(FROZEN, "model-frozen.safetensors")
    weight_map |= dict.fromkeys(prefixed, "model-trained.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    repairs = repaired(folder, tmp_path / "out")
    assert repairs.verdict.problems == []
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert index == {name: weight_map.get(name, "model-trained.safetensors") for name in FROZEN | TRAINED}
    found = read_checkpoint_tensors(tmp_path / "out").tensors
    for each in header.tensors:
        assert data_of(found[each.name]) == bytes([1]) * num_bytes(each.dtype, each.shape)
    assert (
        os.stat(tmp_path / "out/model-frozen.safetensors").st_ino == os.stat(folder / "model-frozen.safetensors").st_ino
    ), "a file without a change costs no second copy"


def with_map(folder: Path, kind: str, shape: tuple[int, ...], ids, mask=None) -> Path:
    """A flat checkpoint with this d2t and this t2d."""
    weights = {**FROZEN, "d2t": (kind, shape)} | TRAINED
    write_flat(folder, weights)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    for tensor in read_header(path).tensors:
        if tensor.name == "d2t":
            data[tensor.begin : tensor.end] = array({"I64": "q", "I32": "i", "F32": "f"}[kind], ids).tobytes()
        elif tensor.name == "t2d" and mask is not None:
            data[tensor.begin : tensor.end] = bytes(each in mask for each in range(160))
        else:
            size = tensor.end - tensor.begin
            data[tensor.begin : tensor.end] = (b"\x01\x3c\x02\x3d" * size)[:size]
    path.write_bytes(data)
    return folder


IDS = list(range(0, 120, 3))
OFFSETS = [each - index for index, each in enumerate(IDS)]


@pytest.mark.parametrize(
    ("kind", "shape", "ids"),
    [
        ("I32", (40,), OFFSETS), ("F32", (40,), OFFSETS), ("I64", (1, 40), OFFSETS), ("I64", (40,), IDS),
        ("I32", (40, 1), OFFSETS), ("I32", (40,), IDS),
    ],
)  # fmt: skip
def test_maps_of_another_form_become_offsets(tmp_path, kind, shape, ids):
    folder = with_map(tmp_path / "flat", kind, shape, ids, IDS)
    repairs = repaired(folder, tmp_path / "out", values=True)
    d2t = read_checkpoint_tensors(tmp_path / "out").tensors["d2t"]
    assert (d2t.dtype, d2t.shape, read_ids(d2t)) == ("I64", (40,), OFFSETS)
    assert repairs.verdict.problems == []


def test_a_map_of_fractions_is_left(tmp_path):
    folder = with_map(tmp_path / "flat", "F32", (40,), [each + 0.5 for each in OFFSETS], IDS)
    repairs = repaired(folder, tmp_path / "out", values=True)
    assert repairs.left[0] == "write d2t as int64: not done, its numbers are not whole or not readable"
    assert not (tmp_path / "out").exists()


def test_a_lost_map_is_made_from_the_mask_where_it_fits_the_head(tmp_path):
    folder = with_map(tmp_path / "flat", "I64", (40,), OFFSETS, IDS)
    header = read_header(folder / "model.safetensors")
    rest = [each for each in header.tensors if each.name != "d2t"]
    data = b"".join(map(data_of, rest))
    (folder / "model.safetensors").write_bytes(
        write_header({each.name: (each.dtype, each.shape) for each in rest}, {}) + data
    )
    assert repaired(folder, tmp_path / "out", values=True).verdict.problems == []
    assert read_ids(read_checkpoint_tensors(tmp_path / "out").tensors["d2t"]) == OFFSETS


def test_a_map_beside_a_full_vocabulary_goes_only_when_it_is_zero(tmp_path):
    weights = {**FROZEN, "d2t": ("I64", (160,)), "lm_head.weight": ("BF16", (160, 64))} | TRAINED
    for fill, left in ((0, False), (1, True)):
        folder = write_flat(tmp_path / f"flat{fill}", draft_vocab_size=160)
        write_tensors(folder / "model.safetensors", weights, fill)
        repairs = repaired(folder, tmp_path / f"out{fill}")
        assert (tmp_path / f"out{fill}").exists() is not left
        assert any("d2t from the tensors: not done, it is not all zero" in each for each in repairs.left) is left


def test_a_repeated_key_is_gone_where_every_reader_takes_the_same(tmp_path):
    folder = write_flat(tmp_path / "flat")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"torch_dtype": "float16",' + text[1:])
    repairs = repaired(folder, tmp_path / "out")
    assert repairs.changed == ['config.json: keep the last torch_dtype: "bfloat16"']
    assert repairs.verdict.verdict == "ok"


def test_other_files_come_along(flat, tmp_path):
    (flat / "tokenizer.json").write_text("{}")
    (flat / "notes").mkdir()
    os.mkfifo(flat / "pipe")
    (flat / "config.json").write_text(
        (flat / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 65')
    )
    repairs = repaired(flat, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert repairs.left == ["notes: not copied", "pipe: not copied"]


def test_the_command_says_what_it_changed_and_refuses_a_place_that_is_taken(flat, tmp_path, capsys):
    change(flat, num_hidden_layers=40, rms_norm_eps=None)
    assert main(["check", "--no-values", str(flat), "--fix", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "changed: config.json: write num_hidden_layers: 1\n" in out
    assert "left:    epsilon: rms_norm_eps (write it)\nthe verdict on the copy:\nERROR epsilon" in out
    assert main(["check", str(flat), "--fix", str(tmp_path / "out")]) == 1
    assert "ERROR exists" in capsys.readouterr().out
    assert main(["check", "--no-values", str(flat), "--json", "--fix", str(tmp_path / "second")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"verdict", "problems", "checked", "not_checked", "changed", "left"}


def test_nothing_certain_means_no_copy(flat, tmp_path, capsys):
    assert main(["check", "--no-values", str(flat), "--fix", str(tmp_path / "out")]) == 0
    assert "nothing is certain, no copy was written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_what_is_no_eagle3_draft_is_left_alone(flat, tmp_path):
    change(flat, model_type="deepseek_mtp", use_cache=None)
    assert repaired(flat, tmp_path / "out").changed == []


def test_a_disk_that_fails_leaves_nothing_behind(flat, tmp_path, monkeypatch):
    (flat / "config.json").write_text(
        (flat / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": "64"')
    )

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eagle3.checks.repairs.link_or_copy", full)
    with pytest.raises(OSError, match="No space"):
        repaired(flat, tmp_path / "out")
    assert os.listdir(tmp_path) == ["flat"]
