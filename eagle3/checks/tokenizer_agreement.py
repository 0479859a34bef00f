"""Whether a tokenizer beside a draft is the verifier's: its tokens and their ids, its added tokens, its chat template.

No server reads a draft's tokenizer. One that differs says that the draft was trained for another verifier, whose equal
sizes hide it (SafeAILab/EAGLE#258). Light: the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.checks.config_check import Verdict
from eagle3.formats.json_files import printable, read_json_object
from eagle3.problems import Problem

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# A vocabulary of 256,000 tokens with its merges has some 34 MB.
MAX_TOKENIZER_BYTES = 128 << 20
CONSEQUENCE = "the server answers, and the draft proposes the tokens of another text: only acceptance falls"


def compare_tokenizers(draft: Path, verifier: Path, verdict: Verdict) -> None:
    """Add to `verdict` what differs, or which of both folders has no tokenizer.json; nothing where neither has one.

    `InvalidInput` for a file that is no JSON.
    """
    there = [(folder / TOKENIZER).is_file() for folder in (draft, verifier)]
    if not any(there):
        return
    if not all(there):
        lacking = "verifier's" if there[0] else "draft's"
        verdict.skip("the draft's tokenizer against the verifier's", f"the {lacking} folder has no {TOKENIZER}")
        return
    verdict.problems += [*_token_problems(draft, verifier), *_template_problems(draft, verifier)]
    verdict.checked.append("tokenizer")


def _token_problems(draft: Path, verifier: Path) -> Iterator[Problem]:
    own, other = token_ids(draft / TOKENIZER), token_ids(verifier / TOKENIZER)
    apart = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if not apart:
        return
    token = next((each for each in apart if each in own and each in other), apart[0])
    ids = " and ".join(str(each.get(token, "none")) for each in (own, other))
    yield Problem(
        "tokenizer-other",
        TOKENIZER,
        f"{len(apart)} tokens with other ids than the verifier's, e.g. {printable(repr(token), 40)}: {ids}",
        "every token with the verifier's id",
        "serve this draft with the verifier that it was trained for, or train one for this verifier",
        CONSEQUENCE,
    )


def _template_problems(draft: Path, verifier: Path) -> Iterator[Problem]:
    own, other = _template(draft), _template(verifier)
    if own and other and own != other:
        yield Problem(
            "template-other",
            TEMPLATE if (draft / TEMPLATE).is_file() else SETTINGS,
            "another chat template than the verifier's",
            "the template that the server renders",
            "find out which one the draft was trained on; serve with that one (--chat-template)",
            "prompts that the draft was not trained on; " + CONSEQUENCE,
            severity="warning",
        )


def token_ids(path: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json: its model's vocabulary (a mapping, or Unigram's list) and the added tokens."""
    value = read_json_object(path, MAX_TOKENIZER_BYTES).value
    model = value.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids.update(vocabulary)
    elif isinstance(vocabulary, list):
        ids.update((str(row[0]), number) for number, row in enumerate(vocabulary) if isinstance(row, list) and row)
    added = value.get("added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and isinstance(each.get("content"), str):
            ids[each["content"]] = each.get("id", -1)
    return ids


def _template(folder: Path) -> Any:
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_bytes().decode("utf-8", "replace").strip()
    if not (folder / SETTINGS).is_file():
        return None
    found = read_json_object(folder / SETTINGS, MAX_TOKENIZER_BYTES).value.get("chat_template")
    return found.strip() if isinstance(found, str) else found
