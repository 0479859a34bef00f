"""A tiny random Llama verifier with a real tokenizer and chat template, for tests that run the real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Learned merges make some tokens longer than a byte; the text only has to be literal.
CORPUS = [
    "Hello, how are you today? I am fine, thank you. What is your name? Tell me about the weather and the stars.",
    "The quick brown fox jumps over the lazy dog. What is the answer to the question? It is what you make of it.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_verifier(path: Path, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE, **config: Any) -> Path:
    """Write the verifier into `path` and return it; `config` overrides fields of its `LlamaConfig`.

    Defaults: vocabulary 320, hidden 64, 6 layers, 4 heads, 2 kv heads, window 512, bf16, 0.8 MB of weights; head_dim
    32, the least that vLLM's CPU attention takes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(chat_template)
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        # wide weights: answers vary, and few logits tie in bf16
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **config,
    }
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.bfloat16)
    torch.random.set_rng_state(state)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Byte-level BPE of 320 tokens with the three special tokens of ChatML; turns end with <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2], unk_token=SPECIAL[0]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_conversations(path: Path, texts: list[str]) -> Path:
    """A JSONL file of one-turn conversations, as `data/conversations/` takes it."""
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
