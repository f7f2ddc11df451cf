"""Permutes the rows of attention heads between the two RoPE conventions.

transformers rotates row i of a head with row i + head_dim / 2 (NeoX); llama.cpp's `llama` graph rotates
neighbouring rows. Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import numpy as np


def interleave_halves(rows_RI: np.ndarray, head_dim: int) -> np.ndarray:
    """Permutes whole heads from transformers' order to llama.cpp's; R is a multiple of `head_dim`."""
    heads = rows_RI.reshape(-1, 2, head_dim // 2, rows_RI.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows_RI.shape)


def part_halves(rows_RI: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes `interleave_halves`."""
    heads = rows_RI.reshape(-1, head_dim // 2, 2, rows_RI.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows_RI.shape)
