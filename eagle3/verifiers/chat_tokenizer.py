"""The verifier's tokenizer and chat template: prompts as token ids, exactly as the server renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3.problems import invalid
from eagle3.verifiers.verifier import Verifier


class TemplateRefusal(Exception):
    """The chat template does not take this conversation (no system role, say)."""


def load_tokenizer(verifier: Verifier, trust_remote_code: bool) -> Any:
    """transformers' tokenizer of the local folder; what it cannot load is `InvalidInput`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(verifier.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise invalid(
            "no-tokenizer",
            f"verifier.source {verifier.source}",
            f"{type(error).__name__}: {' '.join(str(error).split())[:800]}",
            "a tokenizer that transformers loads",
            "copy the model's tokenizer files again; if it needs code of its own that you have read, set "
            "verifier.trust_remote_code to true",
        ) from error


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of the rendered messages and the generation prompt; no token is added around the template's own.

    `TemplateRefusal` where the template raises or renders nothing.
    """
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        raise TemplateRefusal(f"{type(error).__name__}: {error}"[:300]) from None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise TemplateRefusal("the template renders nothing")
    return list(ids)


def special_token_ids(tokenizer: Any, verifier: Verifier) -> list[int]:
    """Ascending ids of every special and added token, and of every end-of-turn id that the configs name."""
    ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for config in (verifier.text_config, verifier.config, _generation_config(verifier.path)):
        declared = config.get("eos_token_id")
        ids |= set(declared if isinstance(declared, list) else [declared]) - {None}
    return sorted(ids)


def _generation_config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise invalid(
            "verifier-config", str(path / "generation_config.json"), str(error), "JSON", "download the file again"
        ) from None
    return value if isinstance(value, dict) else {}
