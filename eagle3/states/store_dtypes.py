"""How hidden states lie in a shard: in the verifier's bf16, or as 8-bit floats with a scale for each state."""

from __future__ import annotations

from eagle3.formats.safetensors_headers import num_bytes

BFLOAT16, FP8 = "bfloat16", "fp8"
# The value of extract.store_dtype -> safetensors' name of what is stored.
STORE_DTYPES = {BFLOAT16: "BF16", FP8: "F8_E4M3"}


def bytes_per_token(store_dtype: str, num_states: int, hidden_size: int) -> int:
    """The states of one token, the scales of fp8 included.

    >>> bytes_per_token("bfloat16", 4, 7168), bytes_per_token("fp8", 4, 7168)
    (57344, 28688)
    """
    states = num_bytes(STORE_DTYPES[store_dtype], (num_states, hidden_size))
    return states + (num_bytes("F32", (num_states,)) if store_dtype == FP8 else 0)
