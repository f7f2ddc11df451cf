"""The row order of llama.cpp's rotary embedding: the converter's own reshape, and back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qconvert.quant.rotary_rows import interleave_halves, part_halves


@given(heads=st.integers(1, 9), half=st.integers(1, 17), width=st.integers(1, 3))
def test_interleaving_is_the_converters_reshape(heads: int, half: int, width: int) -> None:
    rows = np.arange(heads * 2 * half * width).reshape(-1, width)
    theirs = rows.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(rows.shape)
    assert (interleave_halves(rows, 2 * half) == theirs).all()
    assert (part_halves(theirs, 2 * half) == rows).all()


def test_neighbours_meet() -> None:
    assert interleave_halves(np.arange(4)[:, None], 4).ravel().tolist() == [0, 2, 1, 3]
