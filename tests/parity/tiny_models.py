"""Tiny random models of transformers with every weight perturbed, and a runner that drives ours step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.attention.arena import KvArena
from headrace.attention.contract import RowBatch
from headrace.attention.step import StepContext
from headrace.config.decoder import parse_decoder
from headrace.models.registry import CausalModel, ModelContext, build_model
from headrace.parallel.groups import TensorParallel
from headrace.types.cache_specs import CacheSpec, GroupLayout, KvLayout, LayerCache, RecurrentSpec
from headrace.types.plans import BlockCopy

VOCAB = 256
CPU = torch.device("cpu")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied_biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_one_kv_head": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3_tied_biased": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3_capped": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
        },
    ),
    "llama4_no_norm": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 12,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 2,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_next_dense": (
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "full_attention_interval": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
}
"""Name -> (stem of transformers' classes, fields)."""

FAMILIES = ("gemma3", "gemma3_capped", "llama4", "llama4_no_norm", "qwen3_next", "qwen3_next_dense")
"""Cases that are not of Llama's shape."""


def reference(case: str, **changes: Any) -> Any:
    """Return transformers' model of a case, perturbed, in fp32."""
    return _reference(case, tuple(sorted((key, _freeze(value)) for key, value in changes.items())))


@functools.cache
def _reference(case: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    import transformers

    stem, fields = CASES[case]
    thawed = {key: dict(value) if isinstance(value, tuple) else value for key, value in changes}
    named = stem + ("TextConfig" if stem in ("Gemma3", "Llama4") else "Config")
    config = getattr(transformers, named)(**{**_COMMON, **fields, **thawed})
    torch.manual_seed(7)
    with torch.inference_mode(False), torch.no_grad():
        model = getattr(transformers, stem + "ForCausalLM")(config).eval()
        perturb(model)
    return model


def _freeze(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


_CALMER = {"linear_attn.in_proj": 0.2, "linear_attn.out_proj": 1 / 3}
"""Factors on matrices of small gated delta nets. At the usual size they amplify rounding: transformers in fp32 is then
3e-4 and more from itself in fp64, and a router near a tie flips. So it is below 3e-5."""


def perturb(model: Any) -> None:
    """Matrices N(0, 1.5 / sqrt(fan in)); vectors += 0.3 N(0, 1): nothing stays at a constant that hides its absence."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            # A stack of experts, or a convolution of one channel each: the sum runs over one dimension.
            factor = next((value for part, value in _CALMER.items() if part in name), 1.0)
            parameter.normal_(0, factor * 1.5 / max(parameter.shape[1:]) ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def decoder_of(model: Any) -> Any:
    """Return our dimensions of a transformers model."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    return parse_decoder(config)


def checkpoint(oracle: Any) -> dict[str, Tensor]:
    """Return a model's tensors as its checkpoints have them: transformers packs the experts of Qwen3-Next in memory."""
    found: dict[str, Tensor] = {}
    packed = type(oracle).__name__.startswith("Qwen3Next")
    for name, tensor in oracle.state_dict().items():
        if packed and name.endswith("experts.gate_up_proj"):
            for index, expert in enumerate(tensor):
                for part, rows in zip(("gate", "up"), expert.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{index}.{part}_proj.weight")] = rows
        elif packed and name.endswith("experts.down_proj"):
            for index, expert in enumerate(tensor):
                found[name.replace("down_proj", f"{index}.down_proj.weight")] = expert
        else:
            found[name] = tensor
    return found


def load(model: CausalModel, weights: dict[str, Tensor]) -> None:
    """Fill and finalize our model from a state dict; every target exactly once."""
    targets = model.weight_targets()
    for name, target in targets.items():
        tensor = weights[name]
        assert tuple(tensor.shape) == target.shape, name
        target.load(tensor)
    model.finalize()


def small_layout(caches: Sequence[LayerCache], block_tokens: int, num_blocks: int) -> KvLayout:
    """Return a memory with room for ``num_blocks`` blocks a group; layers with one spec form a group."""
    members: dict[CacheSpec, list[LayerCache]] = {}
    for cache in caches:
        members.setdefault(cache.spec, []).append(cache)
    num_blocks *= len(members)
    granule_bytes, groups = 64, []
    for index, (spec, layers) in enumerate(members.items()):
        tokens = 0 if isinstance(spec, RecurrentSpec) else block_tokens
        granules = -(-spec.block_bytes(tokens) * len(layers) // granule_bytes)
        groups.append(GroupLayout(index, spec, [c.layer_index for c in layers], tokens, num_blocks, granules))
    widest = max(group.block_granules for group in groups)
    return KvLayout(groups, granule_bytes, widest, num_blocks - 1)


class Runner:
    """Our model with KV memory; rows are named, and each keeps its own block table for each group."""

    def __init__(
        self,
        oracle: Any,
        *,
        backend: str = "torch_sdpa",
        quantization: Any = "none",
        dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
        block_tokens: int = 4,
        num_blocks: int = 400,
        shuffle_seed: int = 3,
        device: torch.device = CPU,
    ) -> None:
        context = ModelContext(dtype, device, tp or TensorParallel(), quantization, backend == "torch_exact")
        self.model = build_model(decoder_of(oracle), context)
        load(self.model, checkpoint(oracle))
        self.layout = small_layout(self.model.layer_caches(), block_tokens, num_blocks)
        names = {group.group: backend for group in self.layout.groups}
        self.arena = KvArena(self.layout, self.model.cache_dtype, device, names)
        self.model.bind_cache(self.arena)
        self._device = device
        generator = torch.Generator().manual_seed(shuffle_seed)
        places = torch.randperm(self.layout.num_extents, generator=generator) + 1
        self._free = (places * self.layout.null_granules).tolist()
        self.tables: dict[str, list[list[int]]] = {}
        self.done: dict[str, int] = {}

    def hidden(self, rows: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Compute one step: each row's next tokens. Returns the hidden states of each row's tokens."""
        starts, counts, ids, positions = [], [], [], []
        for name, tokens in rows:
            start = self.done.setdefault(name, 0)
            self._grow(name, start + len(tokens))
            starts.append(start)
            counts.append(len(tokens))
            ids.extend(tokens)
            positions.extend(range(start, start + len(tokens)))
            self.done[name] = start + len(tokens)
        batches = [
            RowBatch.of(starts, counts, [self.tables[name][group.group] for name, _ in rows])
            for group in self.layout.groups
        ]
        step = StepContext(torch.tensor(positions, device=self._device), batches)
        out = self.model.forward(torch.tensor(ids, device=self._device), step)
        self.arena.observe(out)
        parts = out.split(counts)
        return {name: part for (name, _), part in zip(rows, parts, strict=True)}

    def _grow(self, name: str, tokens: int) -> None:
        tables = self.tables.setdefault(name, [[] for _ in self.layout.groups])
        for group, table in zip(self.layout.groups, tables, strict=True):
            while len(table) < (-(-tokens // group.block_tokens) if group.block_tokens else 1):
                table.append(self._free.pop())

    def logits(self, rows: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """As `hidden`, then the logits of every token."""
        return {name: self.model.logits(part) for name, part in self.hidden(rows).items()}

    def share_prefix(self, source: str, target: str, tokens: int) -> None:
        """Let a new row begin with whole blocks of another, and with a copy of its state, as a prefix hit does.

        A state can be copied only where the source has just come.
        """
        self.tables[target] = []
        for group, table in zip(self.layout.groups, self.tables[source], strict=True):
            if group.block_tokens:
                assert tokens % group.block_tokens == 0
                self.tables[target].append(table[: tokens // group.block_tokens])
            else:
                assert self.done[source] == tokens
                fresh = self._free.pop()
                self.arena.copy([BlockCopy(group.group, table[0], fresh)])
                self.tables[target].append([fresh])
        self.done[target] = tokens


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Return token ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(oracle: Any, ids: Sequence[int]) -> Tensor:
    """Return transformers' logits [T, vocabulary] of a whole sequence."""
    out: Tensor = oracle(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return out
