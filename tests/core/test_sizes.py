"""Sizes as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.sizes import parse_size

SIZES = {
    "0": 0,
    "1234": 1234,
    "500MB": 500_000_000,
    "5GB": 5 * 10**9,
    "5gb": 5 * 10**9,
    "2GiB": 2 << 30,
    "1.5 KiB": 1536,
    "1.5K": 1500,
    " 3 T ": 3 * 10**12,
    "7B": 7,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str) -> None:
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "5 G B", "1,5GB", "5PB", "nan", "5GBB", "5.GB"])
def test_what_is_no_size_shows_how_one_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 500MB, 5GB or 2GiB"):
        parse_size(text)


@given(st.integers(0, 1 << 53))
def test_a_plain_number_of_bytes_is_itself(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes
