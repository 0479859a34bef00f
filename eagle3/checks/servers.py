"""The servers that a checkpoint is judged for, and the words that rules true of both need of each.

Sources: vllm 0.32.0, model_executor/parameter.py, models/utils.py (AutoWeightsLoader); sglang 0.5.23,
srt/models/llama_eagle3.py (load_weights), srt/layers/linear.py, srt/layers/utils/common.py (pad_or_narrow_weight).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Server:
    """unknown: what happens to a tensor without a parameter; resized: to one of another size; cast: to another dtype.

    unset: what a parameter holds that no tensor fills. bad_id, same_id: a d2t with an id outside the vocabulary, or
    with one id twice. own_keys: fields of a config that no other server reads.
    """

    name: str
    unknown: str
    resized: str
    cast: str
    unset: str
    bad_id: str
    same_id: str
    own_keys: frozenset[str] = frozenset()


VLLM = Server(
    name="vLLM 0.32.0",
    unknown="refuses",
    resized="narrows a larger tensor without a word and refuses a smaller one",
    cast="casts every tensor to the verifier's dtype",
    unset="what memory held",
    bad_id="writes logits out of bounds at the first draft step",
    same_id="lets one draft id overwrite another's logit",
)
SGLANG = Server(
    name="SGLang 0.5.23",
    unknown="drops without a word",
    resized="narrows a larger tensor without a word, refuses a smaller one or fills it up with zeros",
    cast="casts every tensor to the dtype of the draft's config",
    unset="its initial value: norms are 1, other weights random or what memory held",
    bad_id="proposes tokens that do not exist",
    same_id="proposes one token under two draft ids",
    own_keys=frozenset({"use_aux_norm"}),
)
SERVERS = {"vllm": VLLM, "sglang": SGLANG}
