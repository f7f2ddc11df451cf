"""Limits the cost of reconstructing BPE merges, which tries every way to split each token."""

from __future__ import annotations

from collections.abc import Iterable

from qconvert.errors import CorruptCheckpoint

MAX_TOKEN_LENGTH = 512  # the longest in use has 128 bytes
MAX_WORK = 1 << 28  # sum of squared token lengths; vocabularies in use have 2^24


def check_lengths(where: str, lengths: Iterable[int]) -> None:
    """Raises CorruptCheckpoint, beginning with `where`, for tokens longer than any trained vocabulary has."""
    work = 0
    for number, length in enumerate(lengths):
        work += length**2
        if length > MAX_TOKEN_LENGTH:
            raise CorruptCheckpoint(
                f"{where}: token {number:,} has a length of {length:,}, over {MAX_TOKEN_LENGTH}"
            )
        if work > MAX_WORK:
            raise CorruptCheckpoint(f"{where}: its tokens are longer than those of any tokenizer")
