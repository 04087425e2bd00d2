"""Gated DeltaNet mixer: one packed projection, causal convolution, gated delta rule, gated norm, output.

Heads are split over ranks by key head. The state is float32 whatever the activations are, and the projection of decay
and rate is never quantised: their error would grow with every token. Must not know where states are kept.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.arena import KvArena, LayerState
from headrace.attention.select import AttentionNeed
from headrace.attention.step import StateRows, StepContext
from headrace.base.errors import InvariantError
from headrace.config.decoder import DecoderConfig, DeltaNet
from headrace.layers.context import ModelContext
from headrace.layers.linear import ColumnLinear, RowLinear, Targets, copy_part, ordered_part
from headrace.ops.activation.rows import by_rows
from headrace.ops.norm.eager import rms_norm, unit_rms_norm
from headrace.ops.recurrent import delta
from headrace.ops.recurrent.conv import ConvPlan, causal_conv, plan_conv
from headrace.types.cache_specs import LayerCache, RecurrentSpec, StatePart
from headrace.weights.target import WeightTarget

_UNIT_EPS = 1e-6
"""Added to the square sum of queries and keys (transformers and fla)."""


class DeltaNetMixer:
    """Gated DeltaNet (arXiv 2412.06464) with the packed projections of Qwen3-Next.

    Args:
        context: where it runs.
        decoder: dimensions; has ``delta``.
        layer_index: position in the model.
    """

    def __init__(self, context: ModelContext, decoder: DecoderConfig, layer_index: int) -> None:
        shape = decoder.delta
        if shape is None:
            raise InvariantError("a recurrent layer without its dimensions")
        tp = context.tp
        self._shape, self._context, self.layer_index = shape, context, layer_index
        self._keys = tp.share(shape.key_heads, "linear_num_key_heads")
        self._values = self._keys * shape.value_heads // shape.key_heads
        self._eps = decoder.rms_eps
        first = tp.rank * self._keys
        packed, rates = _packed_rows(shape, first, self._keys)
        exact = replace(context, quantization="none")
        full_rows = 2 * (shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim)
        self._mixed = ColumnLinear(
            context, decoder.hidden_size, (ordered_part("in_proj_qkvz", full_rows, packed),), bias=False
        )
        self._rates = ColumnLinear(
            exact, decoder.hidden_size, (ordered_part("in_proj_ba", 2 * shape.value_heads, rates),), bias=False
        )
        width = self._values * shape.value_dim
        self._output = RowLinear(
            context,
            "out_proj",
            full_columns=shape.value_heads * shape.value_dim,
            first=tp.rank * width,
            columns=width,
            out_features=decoder.hidden_size,
            bias=False,
        )
        self._widths = (self._keys * shape.key_dim, self._keys * shape.key_dim, width)
        device = context.device
        self._conv = torch.empty(shape.conv_tokens, sum(self._widths), dtype=context.dtype, device=device)
        self._decay = torch.empty(self._values, device=device)
        self._decay_bias = torch.empty(self._values, device=device)
        self._norm = torch.empty(shape.value_dim, device=device)
        self._state: LayerState | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        own = sum(tensor.nbytes for tensor in (self._conv, self._decay, self._decay_bias, self._norm))
        return own + self._mixed.held_bytes + self._rates.held_bytes + self._output.held_bytes

    def caches(self) -> list[LayerCache]:
        """Declare what the layer keeps on this rank: the newest inputs of the convolution, and the state."""
        shape = self._shape
        tail = StatePart("conv", (shape.conv_tokens - 1, sum(self._widths)), self._context.dtype.itemsize)
        state = StatePart("state", (self._values, shape.key_dim, shape.value_dim), 4)
        return [LayerCache(self.layer_index, RecurrentSpec((tail, state)))]

    def attention_needs(self) -> list[AttentionNeed]:
        """Declare no attention."""
        return []

    def bind_cache(self, arena: KvArena) -> None:
        """Take the layer's state memory."""
        self._state = arena.state(self.layer_index, {"conv": self._context.dtype, "state": torch.float32})

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix ("model.layers.0.linear_attn.")."""
        shape, rank = self._shape, self._context.tp.rank
        values = slice(rank * self._values, (rank + 1) * self._values)
        channels = _conv_rows(shape, rank * self._keys, self._keys)
        full = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim

        def load_conv(weight: Tensor) -> None:
            self._conv.copy_(weight[channels, 0].t())

        def load_decay(logs: Tensor) -> None:
            self._decay.copy_(-logs[values].float().exp())

        return {
            **self._mixed.targets(prefix),
            **self._rates.targets(prefix),
            **self._output.targets(prefix),
            f"{prefix}conv1d.weight": WeightTarget((full, 1, shape.conv_tokens), load_conv),
            f"{prefix}A_log": WeightTarget((shape.value_heads,), load_decay),
            f"{prefix}dt_bias": WeightTarget((shape.value_heads,), copy_part(self._decay_bias, values)),
            f"{prefix}norm.weight": WeightTarget((shape.value_dim,), copy_part(self._norm)),
        }

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        for part in (self._mixed, self._rates, self._output):
            part.finalize()

    def __call__(self, x: Tensor, turn: object, step: StepContext) -> Tensor:
        """Return [T, H] for x [T, H].

        Args:
            x: [T, H].
            turn: not used: the layer has no rotary positions.
            step: of the runner.

        Mutates:
            the working states of the step's rows.
        """
        if self._state is None:
            raise InvariantError(f"layer {self.layer_index} has no state memory: bind_cache() was not called")
        rows, shape, exact = self._state.rows(step), self._shape, self._context.invariant
        mixed, channels = self._mixed(x), sum(self._widths)
        plan: ConvPlan = step.once(
            ("conv", shape.conv_tokens), lambda: plan_conv(rows.tokens, shape.conv_tokens, x.device)
        )
        tails = self._state.read("conv", rows)
        taken, tails = causal_conv(mixed[:, :channels], self._conv, tails, plan, invariant=exact)
        self._state.write("conv", rows, tails)
        inputs = delta.DeltaInputs(*self._heads(taken), *self._decay_and_rate(x))
        states = self._state.read("state", rows)
        out = (_scan if exact else _run)(inputs, states, rows)
        self._state.write("state", rows, states)
        gate = mixed[:, channels:].float()
        gate = by_rows(gate, lambda part: F.silu(part, inplace=True)) if exact else F.silu(gate)
        normed = rms_norm(out, self._norm, self._eps).reshape(x.shape[0], -1)
        return self._output(normed.mul_(gate).to(x.dtype))

    def _heads(self, taken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries and keys, one a value head, and values; [T, heads, dim] fp32."""
        shape, tokens = self._shape, taken.shape[0]
        q, k, v = (part.float() for part in taken.split(self._widths, dim=-1))
        q, k = (part.reshape(tokens, self._keys, shape.key_dim) for part in (q, k))
        # x / sqrt(sum of squares + eps) is the RMS norm with eps / D, divided by sqrt(D); queries are scaled once more.
        eps, root = _UNIT_EPS / shape.key_dim, shape.key_dim**-0.5
        q, k = unit_rms_norm(q, eps).mul_(root * root), unit_rms_norm(k, eps).mul_(root)
        repeats = self._values // self._keys
        q, k = (part.repeat_interleave(repeats, dim=1) for part in (q, k))
        return q, k, v.reshape(tokens, self._values, shape.value_dim)

    def _decay_and_rate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log decay and the rate (beta) of each value head; [T, heads] fp32."""
        rate, drive = self._rates(x).float().chunk(2, dim=-1)
        drive = drive + self._decay_bias
        if not self._context.invariant:
            return F.softplus(drive) * self._decay, torch.sigmoid(rate)
        softened = by_rows(drive, lambda part: part.copy_(F.softplus(part)))
        return softened * self._decay, by_rows(rate, torch.sigmoid_)


def _scan(inputs: delta.DeltaInputs, states: Tensor, rows: StateRows) -> Tensor:
    """Go through every row token by token; mutates ``states`` [R, heads, K, V]."""
    parts, first = [], 0
    for state, tokens in zip(states, rows.tokens, strict=True):
        parts.append(delta.scan(inputs.part(slice(first, first + tokens)), state))
        first += tokens
    return torch.cat(parts)


def _run(inputs: delta.DeltaInputs, states: Tensor, rows: StateRows) -> Tensor:
    """Compute rows of one token together and the others in chunks; mutates ``states`` [R, heads, K, V]."""
    if len(rows.tokens) == inputs.v.shape[0]:
        return delta.step(inputs, states)
    out = torch.empty_like(inputs.v)
    first, singles, places = 0, [], []
    for index, tokens in enumerate(rows.tokens):
        if tokens == 1:
            singles.append(index)
            places.append(first)
        else:
            part = slice(first, first + tokens)
            out[part] = delta.chunked(inputs.part(part), states[index])
        first += tokens
    if singles:
        at, of = torch.tensor(places, device=out.device), torch.tensor(singles, device=out.device)
        picked = states.index_select(0, of)
        out.index_copy_(0, at, delta.step(inputs.picked(at), picked))
        states.index_copy_(0, of, picked)
    return out


def _packed_rows(shape: DeltaNet, first: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return the rows of in_proj_qkvz (as q, k, v, z) and of in_proj_ba (as b, a) of some key heads.

    The checkpoint has, for one key head after the other, its query, its key, and the values and gates of its value
    heads; and likewise the b and a of its value heads.
    """
    repeats = shape.value_heads // shape.key_heads
    values = repeats * shape.value_dim
    rows = torch.arange(shape.key_heads * 2 * (shape.key_dim + values)).view(shape.key_heads, -1)[first : first + heads]
    parts = rows.split((shape.key_dim, shape.key_dim, values, values), dim=1)
    rates = torch.arange(2 * shape.value_heads).view(shape.key_heads, 2, repeats)[first : first + heads]
    return torch.cat([part.flatten() for part in parts]), rates.transpose(0, 1).flatten()


def _conv_rows(shape: DeltaNet, first: int, heads: int) -> Tensor:
    """Return the channels of some key heads: of all queries, all keys and all values, one kind after the other."""
    repeats, keys = shape.value_heads // shape.key_heads, shape.key_heads * shape.key_dim
    own = torch.arange(first * shape.key_dim, (first + heads) * shape.key_dim)
    width = repeats * shape.value_dim
    values = torch.arange(2 * keys + first * width, 2 * keys + (first + heads) * width)
    return torch.cat((own, keys + own, values))
