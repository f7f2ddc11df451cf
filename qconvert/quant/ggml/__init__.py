"""Encodes rows as GGML blocks, byte for byte as llama-quantize, and decodes them."""

from __future__ import annotations

from qconvert.quant.ggml.decode import decode_rows
from qconvert.quant.ggml.encode import ENCODED, encode_rows, overflowed

__all__ = ["ENCODED", "decode_rows", "encode_rows", "overflowed"]
