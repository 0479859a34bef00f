"""Parity: hidden states and tokens through vLLM's own draft class, against the logits that training had for them.

One request per start p of a probe (see eagle3.formats.parity_probe). It prefills its document up to p, as a server has
done when it drafts there, then reads one token a step; the state that goes into step s is what step s - 1 gave:

    step 0   tokens b..p with the verifier's states of b..p, positions 0..p-b       logits of the last
    step 1   token p+1 with the state that step 0 gave at p, position p-b+1
    step 2   token p+2 with the state that step 1 gave, position p-b+2

The class, its layers, rope, attention kernel and cache, head and vocabulary map are vLLM's; only its scheduler is not
there. Training fed itself the same tokens, so the two may differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.checks.engine_load import Engine
from eagle3.formats.checkpoint_files import PROBE
from eagle3.formats.parity_probe import ParityProbe, read_probe
from eagle3.problems import InvalidInput, Problem, format_problems


@dataclass(frozen=True)
class Parity:
    """apart: the largest difference of any logit, in bfloat16 steps, with the (step, start) where it lies.

    A step is that at the largest logit of a position. other_ids: draft rows that mean another token in the server.
    demoted: how far below its own, in steps, training put the token that the server proposes, at the worst position.
    """

    positions: int
    apart: float
    where: tuple[int, int]
    other_ids: int
    demoted: float

    def as_dict(self) -> dict[str, Any]:
        return {"positions": self.positions, "apart_in_bf16_steps": round(self.apart, 2)}


def is_possible() -> bool:
    """Only vLLM's CPU build has an attention kernel for the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def skipped_parity(folders: list[Path], required: bool) -> dict[str, dict[str, Any]]:
    """The report of a build that cannot be asked for logits, with a warning; `InvalidInput` where they are required."""
    problem = Problem(
        "no-parity",
        "simulate_weight_load.engine_level",
        "a GPU build of vLLM, which has no attention kernel for the CPU",
        "vLLM's CPU build, whose logits are compared with those of training",
        "run it where requirements/cpu.lock is installed"
        + (", or go without: dvc exp run -S simulate_weight_load.engine_level=load" if required else ""),
        "a wrong norm flag, rope, map or head loads without a word; then only the walk against the server shows it",
        "error" if required else "warning",
    )
    if required:
        raise InvalidInput(problem)
    print(format_problems([problem]))
    return {folder.name: {"skipped": "vLLM's CPU build is needed"} for folder in folders}


def epochs_parity(engine: Engine, folders: list[Path], max_steps: float) -> dict[str, dict[str, Any]]:
    """The parity of each checkpoint folder by its name; `InvalidInput` with every one that is not as trained.

    max_steps: how many bfloat16 steps the logits may be apart.
    """
    found = {}
    for folder in folders:
        probe = read_probe(folder / PROBE)
        _, model, config = engine.draft(folder)
        found[folder.name] = parity_of(served_logits(model, config, probe), probe)
    problems = [problem for name, parity in found.items() for problem in parity_problems(name, parity, max_steps)]
    if problems:
        raise InvalidInput(*problems)
    return {name: parity.as_dict() for name, parity in found.items()}


def parity_of(served_SPV: torch.Tensor, probe: ParityProbe) -> Parity:
    """Compare the server's logits over the verifier's vocabulary, -inf where the draft has no token."""
    trained, served = probe.logits.float(), served_SPV[..., probe.token_ids].float()
    proposed = torch.isfinite(served_SPV[0, 0]).nonzero().squeeze(1)
    other_ids = len(set(proposed.tolist()) ^ set(probe.token_ids.tolist()))
    step_SP1 = 2.0 ** (trained.abs().amax(-1, keepdim=True).log2().floor() - 7)
    apart_SPK = ((served - trained).abs() / step_SP1).nan_to_num(nan=float("inf"))
    farthest = int(apart_SPK.amax(-1).argmax())
    chosen = trained.gather(-1, served.nan_to_num(nan=float("-inf")).argmax(-1, keepdim=True))
    demoted = float(((trained.amax(-1, keepdim=True) - chosen) / step_SP1).max())
    where = divmod(farthest, trained.shape[1])
    return Parity(trained[..., 0].numel(), float(apart_SPK.max()), where, other_ids, demoted)


def parity_problems(name: str, parity: Parity, max_steps: float) -> Iterator[Problem]:
    """Everything in which a served checkpoint is not the trained one."""
    found = []
    if parity.other_ids:
        found.append(f"{parity.other_ids} draft rows mean other tokens")
    if not parity.apart <= max_steps:
        step, start = parity.where
        found.append(f"logits {parity.apart:.4g} bf16 steps apart (unrolled step {step}, start {start} of the probe)")
    if parity.demoted > max_steps:
        found.append(f"a token proposed that lay {parity.demoted:.4g} bf16 steps below training's own")
    if found:
        yield Problem(
            "parity",
            name,
            "; ".join(found),
            f"the logits of training within {max_steps:g} bf16 steps, and its tokens",
            "compare config.json with the training (norm flags, rope, aux layers, map, head); dvc repro -f flatten",
            "the server answers, and only acceptance falls",
        )


def served_logits(model: Any, config: Any, probe: ParityProbe) -> torch.Tensor:
    """What vLLM's draft `model`, built under `config`, says at every step and start, [S, P, V] over verifier ids.

    Its weights are repacked for the CPU's matrix products, as after every load by a server, and serve no other purpose.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    begins, starts = probe.begins(), probe.starts
    places = [torch.arange(begin, start + 1) for begin, start in zip(begins.tolist(), starts.tolist(), strict=True)]
    lengths = starts - begins + 1
    last = lengths.cumsum(0) - 1
    rows = torch.cat(places)
    steps = len(probe.logits)
    if not model.has_own_embed_tokens:  # the server shares the verifier's, whose rows the probe carries
        model.model.embed_tokens.weight.data[probe.input_ids] = probe.embeddings
    outputs = []
    with torch.inference_mode(), set_current_vllm_config(config):
        process_weights_after_loading(model, config.speculative_config.draft_model_config, torch.device("cpu"))
        requests = _Requests(config, lengths, steps)
        states = model.combine_hidden_states(probe.aux_states[rows])
        positions = torch.cat([torch.arange(len(place)) for place in places])
        hidden, states = requests.forward(model, probe.input_ids[rows], positions, states)
        hidden, states = hidden[last], states[last]
        outputs.append(model.compute_logits(hidden))
        for step in range(1, steps):
            hidden, states = requests.forward(model, probe.input_ids[starts + step], lengths - 1 + step, states)
            outputs.append(model.compute_logits(hidden))
    return torch.stack(outputs).float()


class _Requests:
    """The cache of P requests of `lengths` tokens that are about to draft `steps` more, and vLLM's calls around it."""

    def __init__(self, config: Any, lengths: torch.Tensor, steps: int) -> None:
        self.config, self.seen = config, torch.zeros_like(lengths)
        # every Attention registers itself here when it is built
        self.layers = config.compilation_config.static_forward_context
        self.block_size = config.cache_config.block_size
        per_request = -(-int(lengths.max() + steps) // self.block_size)
        self.table = torch.arange(len(lengths) * per_request, dtype=torch.int32).view(len(lengths), per_request)
        for layer in self.layers.values():
            shape = (self.table.numel(), layer.num_kv_heads, self.block_size, 2 * layer.head_size)
            layer.bind_kv_cache(torch.zeros(shape, dtype=layer.kv_cache_torch_dtype))

    def forward(
        self, model: Any, tokens_N: torch.Tensor, positions_N: torch.Tensor, states_NH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of every request, side by side: (what the head reads, what the next step gets), [N, H]."""
        from vllm.forward_context import set_forward_context

        counts = torch.ones_like(self.seen) if len(tokens_N) == len(self.seen) else self._counts(positions_N)
        self.seen = self.seen + counts
        owner_N = torch.arange(len(counts)).repeat_interleave(counts)
        slots_N = self.table[owner_N, positions_N // self.block_size].long() * self.block_size
        slots_N = slots_N + positions_N % self.block_size
        metadata = {name: self._metadata(name, layer, counts, slots_N) for name, layer in self.layers.items()}
        slots = dict.fromkeys(self.layers, slots_N)
        with set_forward_context(metadata, self.config, num_tokens=len(tokens_N), slot_mapping=slots):
            hidden, states = model(input_ids=tokens_N, positions=positions_N, hidden_states=states_NH)
        return hidden, states

    @staticmethod
    def _counts(positions_N: torch.Tensor) -> torch.Tensor:
        """Prefills begin at position 0."""
        begins = torch.cat([(positions_N == 0).nonzero().squeeze(1), torch.tensor([len(positions_N)])])
        return begins.diff()

    def _metadata(self, name: str, layer: Any, counts: torch.Tensor, slots_N: torch.Tensor) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        begins = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        common = CommonAttentionMetadata(
            query_start_loc=begins,
            query_start_loc_cpu=begins,
            seq_lens=self.seen.int(),
            num_reqs=len(counts),
            num_actual_tokens=len(slots_N),
            max_query_len=int(counts.max()),
            max_seq_len=int(self.seen.max()),
            block_table_tensor=self.table,
            slot_mapping=slots_N,
        )
        spec = layer.get_kv_cache_spec(self.config)
        builder = layer.get_attn_backend().get_builder_cls()(spec, [name], self.config, torch.device("cpu"))
        return builder.build(0, common)
