"""Rules that compare the sizes in a draft's config with the shapes of its tensors and name the right size.

The simulated load (`eagle3.checks.simulated_load`) finds that a tensor does not fit; these say which field is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eagle3.checks.config_rules import VLLM, Given
from eagle3.checks.draft_config import MLA_DEFAULTS
from eagle3.problems import Fix, Problem

ATTN = "layers.0.self_attn"
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64")
HIDDEN_AXES = {
    "norm.weight": 0, "fc.weight": 0, "layers.0.hidden_norm.weight": 0, "layers.0.input_layernorm.weight": 0,
    "layers.0.mlp.gate_proj.weight": 1, "layers.0.mlp.down_proj.weight": 0,
}  # fmt: skip
INTERMEDIATE_AXES = {
    "layers.0.mlp.gate_proj.weight": 0, "layers.0.mlp.up_proj.weight": 0, "layers.0.mlp.down_proj.weight": 1,
}  # fmt: skip


def sizes_are_those_of_the_tensors(given: Given) -> Iterator[Problem]:
    """Every size in the config is the one that the tensors have.

    Source: vllm/model_executor/parameter.py (a larger tensor is narrowed), linear.py, llama_eagle3.py.
    """
    config = given.config
    q, k = given.shape(f"{ATTN}.q_proj.weight"), given.shape(f"{ATTN}.k_proj.weight")
    fc = given.shape("fc.weight")
    wanted: dict[str, int | None] = {
        "hidden_size": _common(given, HIDDEN_AXES),
        "intermediate_size": _common(given, INTERMEDIATE_AXES),
    }
    if config.variant == "mla":
        wanted |= _mla_sizes(given)
    elif len(q) == len(k) == 2 and q[1] == k[1] == 2 * config.hidden_size:
        wanted |= _head_sizes(given, q[0], k[0])
    for key, right in wanted.items():
        taken = getattr(config, key) if hasattr(config, key) else config.raw.get(key, MLA_DEFAULTS.get(key))
        if right and right != taken:  # a tensor without rows names no size
            found = None if key in config.absent else taken
            default = f"takes {taken}, " if found is None else ""
            consequence = f"{given.server.name} {default}{given.server.resized}"
            expected = f"{right}, as in the tensors"
            certain = key != "head_dim" or key in config.absent
            fix: Fix = given.write(key, right) if certain else _or_the_heads(given, right)
            yield given.problem("size", key, found, expected, fix, consequence)
    if len(fc) == 2 and config.use_aux:
        yield from _fc_width(given, fc)


def _common(given: Given, axes: Mapping[str, int]) -> int | None:
    """The size that all these tensors have on their axis; None where they differ: then it is a tensor that is wrong."""
    sizes = {given.shape(name)[axis] for name, axis in axes.items() if len(given.shape(name)) > axis}
    return sizes.pop() if len(sizes) == 1 else None


def _mla_sizes(given: Given) -> dict[str, int | None]:
    """The sizes of latent attention, each from the tensor that has it alone."""
    heads = given.config.num_attention_heads
    kv_rank, kv_a = given.shape(f"{ATTN}.kv_a_layernorm.weight"), given.shape(f"{ATTN}.kv_a_proj_with_mqa.weight")
    q_rank, q_b = given.shape(f"{ATTN}.q_a_layernorm.weight"), given.shape(f"{ATTN}.q_b_proj.weight")
    q_b = q_b or given.shape(f"{ATTN}.q_proj.weight")
    kv_b, o = given.shape(f"{ATTN}.kv_b_proj.weight"), given.shape(f"{ATTN}.o_proj.weight")
    if [len(each) for each in (kv_rank, kv_a, q_b, kv_b, o)] != [1, 2, 2, 2, 2] or len(q_rank) > 1:
        return {}
    rope, q_head, value = kv_a[0] - kv_rank[0], q_b[0] // heads, o[1] // heads
    if rope <= 0 or q_head <= rope or kv_b[0] != heads * (q_head - rope + value):
        return {}
    return {
        "kv_lora_rank": kv_rank[0],
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": q_head - rope,
        "v_head_dim": value,
        "q_lora_rank": q_rank[0] if q_rank else None,
    }


def _or_the_heads(given: Given, head_dim: int) -> str:
    """Rows are heads times head_dim: where both are written, either may be the wrong one."""
    config = given.config
    heads = head_dim * config.num_attention_heads // config.head_dim
    other = f", or num_attention_heads: {heads} if head_dim {config.head_dim} is right" if heads else ""
    return f"write head_dim: {head_dim}{other}"


def _head_sizes(given: Given, q_rows: int, k_rows: int) -> dict[str, int | None]:
    """The head sizes that q and k rows allow: with as few fields wrong as possible, head_dim where nothing tells."""
    config = given.config
    dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    if q_rows == heads * dim and k_rows % dim == 0:
        return {"num_key_value_heads": k_rows // dim}
    if "head_dim" not in config.absent and k_rows == kv_heads * dim and q_rows % dim == 0:
        return {"num_attention_heads": q_rows // dim}
    head_dim, rest = divmod(q_rows, heads)
    if rest or not head_dim or not k_rows or k_rows % head_dim:
        return {}
    return {"head_dim": head_dim, "num_key_value_heads": k_rows // head_dim}


def _fc_width(given: Given, fc: tuple[int, ...]) -> Iterator[Problem]:
    config = given.config
    if fc[0] != config.hidden_size or not fc[1] or fc[1] == config.num_aux * config.target_hidden_size:
        return
    ids = config.ids or config.nested_ids
    count = len(ids) or config.num_aux
    wide = given.verifier.hidden_size if given.verifier and given.verifier.hidden_size else config.target_hidden_size
    if fc[1] == count * config.target_hidden_size:
        return  # fc_width_follows_the_ids says it
    if fc[1] % wide == 0 and wide == config.target_hidden_size:
        right = fc[1] // wide
        fix: Fix = f"write {given.place('num_aux_hidden_states')}: {right} and the {right} layer ids"
        expected = f"{right}: fc.weight takes {fc[1]} = {right} x {wide}"
        consequence = f"{given.server.name} builds fc for {config.num_aux} states and refuses the tensor"
        found = config.raw.get("num_aux_hidden_states")
        yield given.problem("fc-width", "num_aux_hidden_states", found, expected, fix, consequence)
    elif fc[1] % count == 0:
        right = fc[1] // count
        found = None if "target_hidden_size" in config.absent else config.target_hidden_size
        known = given.verifier.hidden_size if given.verifier else None
        fix = (
            given.write("target_hidden_size", right) if known == right or ids else f"write target_hidden_size: {right}"
        )
        built = [config.hidden_size, count * config.target_hidden_size]
        consequence = f"{given.server.name} builds fc {built} and refuses the tensor"
        expected = f"{right}: fc.weight takes {fc[1]} = {count} x {right}"
        yield given.problem("width", "target_hidden_size", found, expected, fix, consequence)


def draft_vocabulary_is_the_heads(given: Given) -> Iterator[Problem]:
    """`draft_vocab_size` is the number of rows of lm_head, and the length of d2t.

    Source: llama_eagle3.py, Eagle3LlamaForCausalLM (ParallelLMHead, draft_id_to_target_id).
    """
    config = given.config
    head = given.shape("lm_head.weight")
    absent = "draft_vocab_size" in config.absent
    if len(head) == 2 and head[0] and head[0] != config.draft_vocab_size:
        found = None if absent else config.draft_vocab_size
        took = f"{VLLM} takes vocab_size for it: " if absent else f"{VLLM}: "
        d2t = given.shape("d2t")
        fix = (
            given.write("draft_vocab_size", head[0])
            if d2t in ((), (head[0],))
            else f"cut d2t for {head[0]} rows, or lm_head to {d2t[0]}"
        )
        consequence = f"{took}AssertionError without any text"
        yield given.problem("vocabulary", "draft_vocab_size", found, f"{head[0]}, rows of lm_head", fix, consequence)
    elif absent and head:
        consequence = f"{VLLM} takes vocab_size, which is what lm_head has"
        yield given.warning("vocabulary", "draft_vocab_size", None, str(config.vocab_size), "write it", consequence)


def vocabulary_is_that_of_the_tensors(given: Given) -> Iterator[Problem]:
    """`vocab_size` is the number of rows of embed_tokens and the length of t2d.

    Source: llama_eagle3.py, VocabParallelEmbedding; t2d is skipped by the server and tells the verifier's vocabulary.
    """
    config = given.config
    for name in ("embed_tokens.weight", "t2d"):
        shape = given.shape(name)
        if shape and shape[0] and shape[0] != config.vocab_size:
            known = given.verifier.vocab_size if given.verifier else None
            certain = known in (None, shape[0])
            fix = given.write("vocab_size", shape[0]) if certain else f"rebuild {name} with {known} rows"
            consequence = (
                f"{given.server.name} refuses: AssertionError" if name != "t2d" else "the map is for another vocabulary"
            )
            yield given.problem(
                "vocabulary", "vocab_size", config.vocab_size, f"{shape[0]}, as in {name}", fix, consequence
            )
    t2d = given.tensors.get("t2d")
    if t2d and t2d.dtype not in ("BOOL", "U8", *INTEGERS):
        consequence = "no server reads it, but it is no mask"
        yield Problem("vocabulary", "t2d", t2d.dtype, "BOOL", "export it as bool", consequence, "warning")
