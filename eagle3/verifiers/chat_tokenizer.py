"""The verifier's tokenizer and chat template: prompts as token ids, exactly as the server renders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.formats.json_files import read_json_object
from eagle3.problems import invalid
from eagle3.verifiers.verifier import Verifier

GENERATION_CONFIG = "generation_config.json"


class TemplateRefusal(Exception):
    """The chat template does not take this conversation (no system role, say)."""


def load_tokenizer(verifier: Verifier, trust_remote_code: bool) -> Any:
    """transformers' tokenizer of the local folder; what it cannot load is `InvalidInput`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(verifier.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # of a broken tokenizer.json tokenizers 0.23.3 raises `Exception` itself
        raise invalid(
            "no-tokenizer",
            f"verifier.source {verifier.source}",
            f"{type(error).__name__}: {' '.join(str(error).split())[:800]}",
            "a tokenizer that transformers loads",
            "copy the model's tokenizer files again; if it needs code of its own that you have read, set "
            "verifier.trust_remote_code to true",
        ) from error


@dataclass(frozen=True)
class Chat:
    """The tokenizer and chat template of one verifier.

    end_ids: tokens at which vLLM ends a turn. vocab_size: rows of the embedding; tokenizers can name more tokens.
    """

    tokenizer: Any
    end_ids: frozenset[int]
    vocab_size: int

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """What the server prefills before it answers `messages`."""
        return prompt_ids(self.tokenizer, messages, tools)

    def history_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """`messages` as they stand, nothing opened after them."""
        return prompt_ids(self.tokenizer, messages, tools, add_generation_prompt=False)

    def said(self, output_ids: Sequence[int]) -> str | None:
        """The content that a client of the server gets for generated ids, and sends back as history.

        None where special tokens stand inside (channels, tool calls): there the server's parsers of reasoning and
        tools decide what is content, and plain text would be a history that no client sends.
        """
        ids = list(output_ids[:-1] if output_ids[-1] in self.end_ids else output_ids)
        if not set(ids).isdisjoint(self.tokenizer.all_special_ids):
            return None
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def load_chat(verifier: Verifier, trust_remote_code: bool) -> Chat:
    tokenizer = load_tokenizer(verifier, trust_remote_code)
    ends = {tokenizer.eos_token_id, *_end_ids(_generation_config(verifier.path), GENERATION_CONFIG)} - {None}
    return Chat(tokenizer, frozenset(ends), verifier.text_config["vocab_size"])


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the rendered messages and the generation prompt; no token is added around the template's own.

    `TemplateRefusal` where the template raises or renders nothing.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template is a program that came with the model: it can raise anything
        raise TemplateRefusal(f"{type(error).__name__}: {error}"[:300]) from None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise TemplateRefusal("the template renders nothing")
    return list(ids)


def special_token_ids(tokenizer: Any, verifier: Verifier) -> list[int]:
    """Ascending ids of every special and added token, and of every end-of-turn id that the configs name."""
    ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for config in (verifier.text_config, verifier.config):
        ids |= _end_ids(config, "config.json")
    return sorted(ids | _end_ids(_generation_config(verifier.path), GENERATION_CONFIG))


def template_token_ids(chat: Chat) -> list[int]:
    """Ascending ids of what the chat template says around an empty question and answer; none where it refuses them."""
    question, answer = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
    try:
        return sorted({*chat.prompt_ids([question]), *chat.history_ids([question, answer])})
    except TemplateRefusal:
        return []


def _end_ids(config: dict[str, Any], name: str) -> set[int]:
    """Its `eos_token_id`: one id, a list of them, or none."""
    declared = config.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if any(type(token) is not int for token in ids):
        where, expected = f"the verifier's {name}: eos_token_id", "a token id, or a list of them"
        raise invalid("verifier-config", where, repr(declared)[:200], expected, f"mend eos_token_id in {name}")
    return set(ids)


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION_CONFIG
    return read_json_object(path).value if path.exists() else {}
