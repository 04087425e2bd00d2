"""Tiny random models of transformers with every weight perturbed, and a runner that drives ours step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.attention.contract import RowBatch
from headrace.attention.select import load_backend
from headrace.config.decoder import parse_decoder
from headrace.models.registry import CausalModel, ModelContext, build_model
from headrace.parallel.groups import TensorParallel
from headrace.types.cache_specs import GroupLayout

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
}


def reference(case: str, **changes: Any) -> Any:
    """Return transformers' model of a case, perturbed, in fp32."""
    return _reference(case, tuple(sorted((key, _freeze(value)) for key, value in changes.items())))


@functools.cache
def _reference(case: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    import transformers

    stem, fields = CASES[case]
    thawed = {key: dict(value) if isinstance(value, tuple) else value for key, value in changes}
    config = getattr(transformers, stem + "Config")(**{**_COMMON, **fields, **thawed})
    torch.manual_seed(7)
    with torch.inference_mode(False), torch.no_grad():
        model = getattr(transformers, stem + "ForCausalLM")(config).eval()
        perturb(model)
    return model


def _freeze(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


def perturb(model: Any) -> None:
    """Matrices N(0, 1.5 / sqrt(fan in)); vectors += 0.3 N(0, 1): nothing stays at a constant that hides its absence."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def decoder_of(model: Any) -> Any:
    """Return our dimensions of a transformers model."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    return parse_decoder(config)


def load(model: CausalModel, weights: dict[str, Tensor]) -> None:
    """Fill and finalize our model from a state dict; every target exactly once."""
    targets = model.weight_targets()
    for name, target in targets.items():
        tensor = weights[name]
        assert tuple(tensor.shape) == target.shape, name
        target.load(tensor)
    model.finalize()


class Runner:
    """Our model with KV memory; rows are named, and each keeps its own block table."""

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
        self.backend = load_backend(backend)
        invariant = backend == "torch_exact"
        context = ModelContext(dtype, device, tp or TensorParallel(), quantization, self.backend, invariant)
        self.model = build_model(decoder_of(oracle), context)
        load(self.model, oracle.state_dict())
        caches = self.model.layer_caches()
        group = GroupLayout(0, caches[0].spec, [c.layer_index for c in caches], block_tokens, num_blocks)
        assert caches[0].spec.dtype_bytes == self.model.cache_dtype.itemsize
        self.kv = self.backend.allocate(group, self.model.cache_dtype, device)
        self.model.bind_cache(self.kv)
        self._block_tokens, self._device = block_tokens, device
        generator = torch.Generator().manual_seed(shuffle_seed)
        self._free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.tables: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}

    def hidden(self, rows: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Compute one step: each row's next tokens. Returns the hidden states of each row's tokens."""
        starts, counts, tables, ids, positions = [], [], [], [], []
        for name, tokens in rows:
            start = self.done.setdefault(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self._block_tokens < start + len(tokens):
                table.append(self._free.pop())
            starts.append(start)
            counts.append(len(tokens))
            tables.append(list(table))
            ids.extend(tokens)
            positions.extend(range(start, start + len(tokens)))
            self.done[name] = start + len(tokens)
        step = self.backend.prepare(RowBatch(starts, counts, tables))
        token_ids = torch.tensor(ids, device=self._device)
        out = self.model.forward(token_ids, torch.tensor(positions, device=self._device), step)
        parts = out.split(counts)
        return {name: part for (name, _), part in zip(rows, parts, strict=True)}

    def logits(self, rows: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """As `hidden`, then the logits of every token."""
        return {name: self.model.logits(part) for name, part in self.hidden(rows).items()}

    def share_prefix(self, source: str, target: str, tokens: int) -> None:
        """Let a new row begin with whole blocks of another, as a prefix hit does."""
        assert tokens % self._block_tokens == 0
        self.tables[target] = self.tables[source][: tokens // self._block_tokens]
        self.done[target] = tokens


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Return token ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(oracle: Any, ids: Sequence[int]) -> Tensor:
    """Return transformers' logits [T, vocabulary] of a whole sequence."""
    out: Tensor = oracle(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return out
