"""The rules that a draft's config must keep, one function each, named by the truth it checks.

The first line of a rule's docstring is its text in the README; `Source:` says where the server does what is claimed.
Rules that also look at tensors are in `eagle3.checks.tensor_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle3.checks.draft_config import SCHEMA, DraftConfig, place
from eagle3.checks.servers import SERVERS, Server
from eagle3.formats.config_formats import ARCHITECTURES, WITHOUT_EFFECT, unknown_keys
from eagle3.formats.json_files import printable, spelled
from eagle3.formats.safetensors_headers import TensorHeader
from eagle3.problems import Change, Fix, Problem, changes_of, told
from eagle3.verifiers.verifier_config import VerifierConfig

VLLM = SERVERS["vllm"].name
# The variant's class and type as every trainer writes them; vLLM knows more spellings of the class.
ARCHITECTURE_OF = {
    "llama": "LlamaForCausalLMEagle3",
    "qwen3": "Eagle3Qwen3ForCausalLM",
    "mla": "Eagle3DeepseekV2ForCausalLM",
}
MODEL_TYPE_OF = {"llama": "llama", "qwen3": "qwen3", "mla": "deepseek_v2"}
# Absent, these have another value under another model_type.
DEFAULTS_DIFFER = {"head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "vocab_size"}
# torch attributes that name a floating dtype; the draft's own is replaced by the verifier's in any case.
DTYPES = {"bfloat16", "float16", "half", "float32", "float", "float64", "double"}
# Keys of other drafters that say which layers they read; `eagle3.checks.aux_id_rules` turns them down.
FOREIGN_IDS = {"target_layer_ids", "layer_ids", "dspark_target_layer_ids", "dflash_config"}
# Written by ModelOpt's exporter into eagle_config, read by no server.
MODELOPT = {
    "next_layer_regular", "parallel_draft_heads_num_layers", "parallel_draft_step",
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What a rule may look at. `tensors` have canonical names (layers.0, never midlayer); empty = config alone.

    tensor_parallel_size: the GPUs that the draft will be divided among, where that is known.
    """

    config: DraftConfig
    tensors: Mapping[str, TensorHeader]
    verifier: VerifierConfig | None
    server: Server = SERVERS["vllm"]
    tensor_parallel_size: int | None = None

    def place(self, key: str) -> str:
        """Where a field stands in the file."""
        return place(key, self.config.nested)

    def problem(self, code: str, key: str, found: Any, expected: str, fix: Fix, consequence: str) -> Problem:
        value = "absent" if found is None else printable(found) if isinstance(found, str) else spelled(found)
        changes = changes_of(fix)
        words = fix if isinstance(fix, str) else told(changes)
        return Problem(code, self.place(key), value, expected, words, consequence, changes=changes)

    def warning(self, code: str, key: str, found: Any, expected: str, fix: Fix, consequence: str) -> Problem:
        return replace(self.problem(code, key, found, expected, fix, consequence), severity="warning")

    def write(self, key: str, value: Any) -> Change:
        """The certain repair that gives a field its right value."""
        return Change("write", self.place(key), value)

    def remove(self, key: str) -> Change:
        return Change("remove", self.place(key))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, or () where it is not there."""
        return self.tensors[name].shape if name in self.tensors else ()


Rule = Callable[[Given], Iterator[Problem]]


def layer_kind(tensors: Mapping[str, TensorHeader]) -> str | None:
    """The variant whose attention has these tensors (canonical names); None without tensors of a layer."""
    attention = "layers.0.self_attn."
    if not any(name.startswith(attention) for name in tensors):
        return None
    if f"{attention}kv_a_proj_with_mqa.weight" in tensors:
        return "mla"
    return "qwen3" if f"{attention}q_norm.weight" in tensors else "llama"


def class_is_named(given: Given) -> Iterator[Problem]:
    """`architectures` names an EAGLE-3 class.

    Source: vllm/transformers_utils/configs/eagle.py (prefix Eagle3), vllm/model_executor/models/registry.py.
    """
    names = given.config.raw.get("architectures") or []
    if given.config.nested or any(name in ARCHITECTURES for name in names):
        return
    right = [ARCHITECTURE_OF[layer_kind(given.tensors) or "llama"]]
    fix = given.write("architectures", right)
    if any(f"Eagle3{name}" in ARCHITECTURES for name in names):
        taken = next(f"Eagle3{name}" for name in names if f"Eagle3{name}" in ARCHITECTURES)
        consequence = (
            f"{VLLM} puts Eagle3 in front and builds {taken}; SGLang builds an ordinary model and drops the draft"
        )
        yield given.warning("class-name", "architectures", names, spelled(right), fix, consequence)
    else:
        consequence = f"{VLLM} has no such draft class and refuses (SGLang: KeyError or an ordinary model)"
        yield given.problem("class-name", "architectures", names or None, spelled(right), fix, consequence)


def model_type_fits_the_class(given: Given) -> Iterator[Problem]:
    """`model_type` is that of the class: llama, qwen3 or deepseek_v2.

    Source: transformers' AutoConfig; vllm/transformers_utils/model_arch_config_convertor.py, is_deepseek_mla.
    """
    found, variant = given.config.raw.get("model_type"), given.config.variant
    right = MODEL_TYPE_OF[variant]
    if found == right or given.config.nested or layer_kind(given.tensors) not in (None, variant):
        return  # class_is_that_of_the_tensors says it
    fix: Fix = given.write("model_type", right)
    if variant == "llama" and found in ("qwen2", "phi3", "mistral", "qwen3"):
        if given.config.absent & DEFAULTS_DIFFER:
            fix = f'write model_type: "{right}" and every size: the types have other defaults'
        consequence = f"{VLLM} builds the Llama draft, and takes what the config leaves out from {found}'s defaults"
        yield given.warning("model-type", "model_type", found, right, fix, consequence)
    else:
        consequence = (
            f"{VLLM} does not treat the draft as MLA (another KV layout and head size), or refuses"
            if variant == "mla"
            else f"transformers 5.19.0 does not know the type, or {VLLM} builds another class"
        )
        yield given.problem("model-type", "model_type", found, right, fix, consequence)


def heads_divide(given: Given) -> Iterator[Problem]:
    """hidden_size is a multiple of the heads, the heads are a multiple of the kv heads, head_dim is even.

    Source: transformers 5.19.0 validate_architecture and validate_rope; vllm/model_executor/layers/linear.py (divide).
    """
    config = given.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.hidden_size % heads:
        consequence = "transformers 5.19.0 refuses: hidden size is not a multiple of the number of heads"
        expected = f"a divisor of hidden_size {config.hidden_size}"
        yield given.problem("heads", "num_attention_heads", heads, expected, "correct the sizes", consequence)
    if heads % kv_heads:
        consequence = f"{given.server.name} groups query heads by kv heads and fails or mixes them up"
        expected = f"a divisor of num_attention_heads {heads}"
        yield given.problem("heads", "num_key_value_heads", kv_heads, expected, "correct the sizes", consequence)
    if config.head_dim % 2 and config.variant != "mla":
        consequence = "transformers 5.19.0 refuses an odd rotary dimension"
        yield given.problem("heads", "head_dim", config.head_dim, "an even number", "correct head_dim", consequence)


def activation_is_silu(given: Given) -> Iterator[Problem]:
    """`hidden_act` is silu.

    Source: vllm/model_executor/models/llama.py, LlamaMLP.
    """
    found = given.config.raw.get("hidden_act", "silu")
    if found != "silu":
        consequence = f"{given.server.name} refuses: unsupported activation, only silu"
        fix = 'train with silu: hidden_act: "silu" is right only if the draft was trained so'
        yield given.problem("activation", "hidden_act", found, '"silu"', fix, consequence)


def epsilon_is_given(given: Given) -> Iterator[Problem]:
    """`rms_norm_eps` is written: no tensor tells it.

    Source: transformers 5.19.0, LlamaConfig.rms_norm_eps = 1e-6.
    """
    if "rms_norm_eps" in given.config.absent:
        consequence = f"{given.server.name} takes 1e-06, whatever the draft was trained with"
        yield given.problem("epsilon", "rms_norm_eps", None, "the value of the training", "write it", consequence)


def norms_are_said(given: Given) -> Iterator[Problem]:
    """norm_before_residual and norm_output are written: no tensor tells them.

    Source: vllm/model_executor/models/llama_eagle3.py; configs/speculators/algos.py (default True when nested).
    """
    config = given.config
    if "norm_before_residual" in config.absent:
        if config.nested:
            consequence = f"{VLLM} takes true for this format, false for a flat config; converters have written both"
            fix = "write true for drafts trained by speculators, false for SafeAILab, SpecForge or ModelOpt heads"
            yield given.problem("norm-flag", "norm_before_residual", None, "true or false", fix, consequence)
        else:
            consequence = f"{VLLM} takes false, as SafeAILab, SpecForge and ModelOpt train; speculators trains true"
            yield given.warning("norm-flag", "norm_before_residual", None, "true or false", "write it", consequence)
    if "norm_output" in config.absent:
        consequence = f"{VLLM} takes false; a draft trained with true would lose acceptance from the second token on"
        yield given.warning("norm-flag", "norm_output", None, "true or false", "write it", consequence)


def norms_agree(given: Given) -> Iterator[Problem]:
    """At most one norm stands before fc, and `eagle_config` does not contradict the top level.

    Source: llama_eagle3.py, LlamaModel (eagle_config first); speculators 0.9.0, models/eagle3/config.py.
    """
    config, raw = given.config, given.config.raw
    inner = raw.get("eagle_config", {}).get("norm_before_fc")
    if inner is not None and raw.get("norm_before_fc") not in (None, inner):
        consequence = f"{given.server.name} takes the value in eagle_config"
        fix: Fix = "write the same value twice, or once"
        if given.tensors:
            right = "input_norm.weight" in given.tensors
            fix = tuple(given.write(place, right) for place in ("eagle_config.norm_before_fc", "norm_before_fc"))
        yield given.problem("norm-flag", "norm_before_fc", raw["norm_before_fc"], spelled(inner), fix, consequence)
    if config.norm_before_fc and config.fc_norm:
        consequence = f"{given.server.name} applies both norms one after the other; speculators 0.9.0 refuses the pair"
        yield given.problem("norm-flag", "fc_norm", True, "false beside norm_before_fc", "keep one", consequence)
    if config.variant == "mla" and (raw.get("norm_before_fc") or inner):
        consequence = f"{given.server.name}'s MLA draft has no such norm: the flag is ignored"
        yield given.problem("norm-flag", "norm_before_fc", True, "false", "train without it", consequence)


def head_is_its_own(given: Given) -> Iterator[Problem]:
    """`tie_word_embeddings` is false: the head of a draft is not its embedding.

    Source: ignored by vllm/model_executor/models/llama_eagle3.py; read by sglang 0.5.23, models/llama_eagle3.py.
    """
    if given.config.raw.get("tie_word_embeddings") is True:
        consequence = f"{VLLM} ignores it; SGLang 0.5.23 uses the embedding as the head"
        fix = given.write("tie_word_embeddings", False)
        yield given.warning("tied-head", "tie_word_embeddings", True, "false", fix, consequence)


def dtype_has_a_name(given: Given) -> Iterator[Problem]:
    """`dtype` and `torch_dtype` name a floating dtype of torch, the verifier's.

    Source: transformers 5.19.0, PreTrainedConfig (getattr(torch, dtype)); vllm/config/speculative.py (dtype=target's).
    """
    verifier = given.verifier.dtype if given.verifier else None
    for key in ("dtype", "torch_dtype"):
        found = given.config.raw.get(key)
        if found is not None and found not in DTYPES:
            consequence = "AttributeError: torch has no such attribute"
            right = _dtype_of_the_tensors(given) or verifier or "bfloat16"
            yield given.problem("dtype", key, found, spelled(right), given.write(key, right), consequence)
        elif found is not None and verifier and found != verifier:
            consequence = f"{VLLM} casts the draft to {verifier} without a word"
            if verifier == "float16":
                consequence += "; values over 65504 become infinite"
            yield given.warning("dtype", key, found, f'"{verifier}", the verifier\'s', "convert the draft", consequence)


def _dtype_of_the_tensors(given: Given) -> str | None:
    """The dtype that all float tensors share."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    found = {names[each.dtype] for each in given.tensors.values() if each.dtype in names}
    return found.pop() if len(found) == 1 else None


def keys_are_known(given: Given) -> Iterator[Problem]:
    """Every key is one that a server reads, or one known to do nothing.

    Source: the schema of eagle3/checks/draft_config.py, and the keys of public checkpoints.
    """
    known = set(SCHEMA) | WITHOUT_EFFECT | given.server.own_keys
    for problem in unknown_keys(set(given.config.raw) - known - FOREIGN_IDS, known, given.server.name):
        yield replace(problem, where=given.place(problem.where))
    eagle = {"eagle_aux_hidden_state_layer_ids", "norm_before_fc", "use_aux_hidden_state"}
    inner = set(given.config.raw.get("eagle_config", {}))
    yield from (
        replace(problem, where=given.place(f"eagle_config.{problem.where}"))
        for problem in unknown_keys(inner - eagle - MODELOPT, eagle, given.server.name)
    )


CONFIG_RULES: tuple[Rule, ...] = (
    class_is_named,
    model_type_fits_the_class,
    heads_divide,
    activation_is_silu,
    epsilon_is_given,
    norms_are_said,
    norms_agree,
    head_is_its_own,
    dtype_has_a_name,
    keys_are_known,
)
