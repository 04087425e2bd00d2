"""Tensor names of GGUF files -> names in Hugging Face checkpoints, and the row order that llama.cpp changes.

Source: the tensor table of the ``gguf`` package and llama.cpp's conversion script. Must not load anything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Where a layer has four norms, the one before the MLP has another name."""
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.(weight|bias)$")


def hf_name(name: str, arch: str) -> str | None:
    """Return the checkpoint name of a GGUF tensor, or None for a tensor of another kind.

    Args:
        name: in the file.
        arch: ``general.architecture``.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    known = _IN_LAYER | _SANDWICH if arch == "gemma3" else _IN_LAYER
    if match is None or match[2] not in known:
        return None
    return f"model.layers.{match[1]}.{known[match[2]]}.{match[3]}"


def restore_values(name: str, tensor: torch.Tensor, arch: str, heads: int, kv_heads: int) -> torch.Tensor:
    """Undo what llama.cpp's conversion does to values and to their order.

    Args:
        name: checkpoint name.
        tensor: dequantised.
        arch: ``general.architecture``.
        heads: query heads.
        kv_heads: key heads.
    """
    if arch == "llama":
        return restore_row_order(name, tensor, heads, kv_heads)
    if arch == "gemma3" and name.endswith("norm.weight"):
        return tensor - 1  # stored ready to multiply by; checkpoints have the distance from 1
    return tensor


def restore_row_order(name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the query and key rows, which architecture ``llama`` has.

    There, the two halves of a head's rotary dimensions are interleaved; checkpoints keep one half after the other.

    Args:
        name: checkpoint name.
        tensor: rows first.
        heads: query heads.
        kv_heads: key heads.

    Returns:
        ``tensor`` with its rows in checkpoint order, or unchanged if it is neither a query nor a key projection.
    """
    match = _PERMUTED.search(name)
    if match is None:
        return tensor
    count = heads if match[1] == "q" else kv_heads
    rows = tensor.shape[0]
    return tensor.reshape(count, rows // count // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
