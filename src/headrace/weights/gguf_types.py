"""Sizes of the GGUF tensor types that Headrace reads.

A table only; must not import torch or numpy. Unpacking is in `gguf_dequant`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """Storage of one tensor type.

    Attributes:
        name: name in llama.cpp, such as ``Q4_1``.
        block_values: values in one block.
        block_bytes: bytes of one block.
        quantized: True if values share scales.
    """

    name: str
    block_values: int
    block_bytes: int
    quantized: bool = True


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, quantized=False),
    1: GgmlType("F16", 1, 2, quantized=False),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2, quantized=False),
}
"""Supported types by their number in the file."""

TYPE_BY_NAME: dict[str, GgmlType] = {item.name: item for item in TYPES.values()}

OTHER_TYPE_NAMES: dict[int, str] = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of types that exist but are refused, for the error message."""
