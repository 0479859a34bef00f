"""Small real inputs of the train stage: greedy answers of a tiny verifier, its hidden states by a transformers forward,
and a vocabulary map. The stages that make these at scale have tests of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.formats.safetensors_headers import read_header
from eagle3.manifests import Manifest, read_manifest, write_manifest
from eagle3.states.fp8 import quantise
from eagle3.states.hidden_states import SampleStates

AUX_LAYER_IDS = [1, 3, 5]
SAMPLES = {"stage": "sample", "decisions": {"note": "the same for hidden states and vocabulary map"}}


class States:
    """The read side of `HiddenStates` over samples in memory."""

    def __init__(self, *samples: SampleStates) -> None:
        self._samples = {sample.sample_id: sample for sample in samples}
        self.sample_ids = list(self._samples)

    def get(self, sample_id: str) -> SampleStates:
        return self._samples[sample_id]

    def split_of(self, sample_id: str) -> str:
        return self._samples[sample_id].split


def write_hidden_states(
    folder: Path, verifier: Path, identity: dict, splits: dict[str, int], new_tokens: int = 24
) -> None:
    """One shard with splits[split] samples: random prompts of 6, 11 or 17 tokens, greedy answers of `new_tokens`."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.bfloat16).eval()
    names = [split for split, count in splits.items() for _ in range(count)]
    lengths = [(6, 11, 17)[number % 3] for number in range(len(names))]
    last = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.update(x=args[0]))
    samples: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for length in set(lengths):
        numbers = [number for number, each in enumerate(lengths) if each == length]
        tokens = _greedy(model, length, len(numbers), new_tokens)
        with torch.no_grad():
            hidden = model.model(tokens, output_hidden_states=True).hidden_states
        states = torch.stack([*(hidden[k] for k in AUX_LAYER_IDS), last["x"]], 2)
        samples |= {number: (tokens[row], states[row]) for row, number in enumerate(numbers)}
    hook.remove()
    ordered = [samples[number] for number in range(len(names))]
    masks = [torch.arange(length + new_tokens) >= length for length in lengths]
    tensors = {
        "hidden_states": torch.cat([states for _, states in ordered]),
        "input_ids": torch.cat([tokens for tokens, _ in ordered]).int(),
        "loss_mask": torch.cat(masks),
        "offsets": torch.tensor([0, *(length + new_tokens for length in lengths)]).cumsum(0),
    }
    ids = [f"s{number:04}" for number in range(len(names))]
    metadata = {"sample_ids": json.dumps(ids), "splits": json.dumps(names), "num_prompt": json.dumps(lengths)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "shard-0000000000000000.safetensors", metadata=metadata)
    decisions = {"aux_layer_ids": AUX_LAYER_IDS, "hidden_size": model.config.hidden_size, "dtype": "bfloat16"}
    write_manifest(folder, Manifest("extract", {}, {"samples": SAMPLES}, identity, decisions=decisions))


def store_as_fp8(folder: Path, target: Path) -> None:
    """The same samples, stored as `extract.store_dtype: fp8` stores them."""
    target.mkdir(parents=True)
    for path in folder.glob("shard-*"):
        tensors = load_file(path)
        parts = [quantise(states) for states in tensors["hidden_states"].split(tensors["offsets"].diff().tolist())]
        stored, scales, squares = (list(each) for each in zip(*parts, strict=True))
        tensors |= {"hidden_states": torch.cat(stored), "scales": torch.cat(scales), "squares": torch.stack(squares)}
        save_file(tensors, target / path.name, metadata=read_header(path).metadata)
    write_manifest(target, replace(read_manifest(folder, "extract"), files={}))


def _greedy(model: Any, length: int, count: int, new_tokens: int) -> torch.Tensor:
    """`count` random prompts of `length` tokens with their greedy answers, [count, length + new_tokens]."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, model.config.vocab_size, (count, length), generator=generator)
    for _ in range(new_tokens):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


def write_vocab_map(folder: Path, draft_vocab_size: int, vocab_size: int, samples: dict = SAMPLES) -> None:
    """Every second id first, then the odd ones from below: a map that is not the identity."""
    chosen = sorted([*range(0, vocab_size, 2), *range(1, vocab_size, 2)][:draft_vocab_size])
    folder.mkdir(parents=True)
    if draft_vocab_size < vocab_size:
        ids = torch.tensor(chosen)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        save_file({"d2t": ids - torch.arange(draft_vocab_size), "t2d": t2d}, folder / "vocab_map.safetensors")
    decisions = {"draft_vocab_size": draft_vocab_size, "vocab_size": vocab_size}
    write_manifest(folder, Manifest("vocab-map", {}, {"samples": samples}, decisions=decisions))


def random_states(count: int, length: int, num_aux: int, hidden: int = 64, vocab_size: int = 320) -> States:
    """`count` samples of the val split and one of train, random tokens, states of another size in every layer."""
    generator = torch.Generator().manual_seed(num_aux)
    size = 1.0 + torch.arange(num_aux + 1).unsqueeze(1)
    return States(
        *(
            SampleStates(
                f"s{number}",
                "val" if number < count else "train",
                4,
                (torch.randn(length, num_aux + 1, hidden, generator=generator) * size).bfloat16(),
                torch.randint(3, vocab_size, (length,), generator=generator).int(),
                torch.arange(length) >= 4,
            )
            for number in range(count + 1)
        )
    )
