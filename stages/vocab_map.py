"""data/samples -> data/vocab_map; by hand, in the repository's root: python -m stages.vocab_map."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3.drafts.vocab_map import choose_ids, count_answered, coverage, map_of, write_vocab_map
from eagle3.manifests import Manifest, read_manifest, verify_files, write_manifest
from eagle3.problems import invalid
from eagle3.sampling.conversations import SPLITS
from eagle3.sampling.samples import token_columns
from eagle3.stage_guard import Stage, run_stage

SAMPLES = Path("data/samples")
# Below this share of held-out tokens the draft's vocabulary itself holds acceptance down noticeably.
LOW_COVERAGE = 0.97


def run(stage: Stage) -> None:
    """Train and val alone choose: eval's coverage is what unseen text will get. K = V writes no map."""
    made = read_manifest(SAMPLES, "sample")
    verify_files(SAMPLES, made)
    vocab_size, draft_vocab_size = made.decided_size("vocab_size"), stage.params.vocab_map.draft_vocab_size
    every_special, template = (made.decided_list(f"{name}_token_ids", int) for name in ("special", "template"))
    counts_SV = count_answered(token_columns(SAMPLES), len(SPLITS), vocab_size)
    train_V, val_V, eval_V = (counts_SV[SPLITS.index(split)] for split in ("train", "val", "eval"))
    if not train_V.any():
        found, fix = "no answered token in train", "dvc repro --single-item --force sample"
        raise invalid("no-answers", str(SAMPLES), found, "answers that tell which tokens the draft needs", fix)
    # tokenizers may name special tokens that the model has no row for; nothing can ever generate them
    special = [token_id for token_id in every_special if token_id < vocab_size]
    ids_K = choose_ids(train_V, val_V, {*special, *template}, draft_vocab_size)

    folder = stage.out("data/vocab_map")
    folder.mkdir(parents=True)
    if draft_vocab_size < vocab_size:
        write_vocab_map(folder, *map_of(ids_K, vocab_size))
    decisions = {
        "draft_vocab_size": draft_vocab_size,
        "vocab_size": vocab_size,
        "coverage_train": round(coverage(train_V, ids_K), 6),
        "coverage_val": round(coverage(val_V, ids_K), 6),
        "coverage_eval": round(coverage(eval_V, ids_K), 6),
        "special_token_ids": special,
        "template_token_ids": template,
        "special_token_ids_without_a_row": sorted({*every_special} - {*special}),
    }
    counts = {
        "train_tokens": int(train_V.sum()),
        "val_tokens": int(val_V.sum()),
        "eval_tokens": int(eval_V.sum()),
        "distinct_train_tokens": int((train_V > 0).sum()),
        "never_answered": int((train_V[ids_K] == 0).sum()),
    }
    inputs = {"samples": made.as_dict()}
    write_manifest(folder, Manifest("vocab-map", stage.values, inputs, made.verifier, {}, counts, decisions))
    held_out = decisions["coverage_eval"]
    if held_out < LOW_COVERAGE:
        print(
            f"WARNING: the draft cannot propose {1 - held_out:.1%} of the held-out (eval) answers' tokens; "
            f"raise vocab_map.draft_vocab_size ({draft_vocab_size}), or sample more conversations",
            flush=True,
        )
    covered = f"{decisions['coverage_train']:.2%} of train, {held_out:.2%} of held-out eval"
    no_map = "" if draft_vocab_size < vocab_size else " (all: no map)"
    print(f"vocab-map: {draft_vocab_size} of {vocab_size} tokens{no_map}, which cover {covered}", flush=True)


if __name__ == "__main__":
    sys.exit(run_stage("vocab-map", run))
