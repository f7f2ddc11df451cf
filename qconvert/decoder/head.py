"""Logits: the one product that leaves the decoder in float32, whatever it computes in.

Rounding logits to bfloat16 alone costs 4e-4 to 6e-4 nats of KL divergence, as much as a good 8-bit
quantization, and turns 3 to 4 % of the likeliest tokens.
Legend: O words (rows of the head), I hidden width, N rows of the input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qconvert.decoder.storage import DenseWeight, Readable

_BLOCK_WORDS = 1024
"""Words converted to float32 at a time: 3.6 MB for a hidden width of 896, which stays in cache."""
MOST_SINGLE_ROWS = 2
"""Rows up to which reading the head once per row beats converting it (7.5 or 10.5 against 27 ms for
the 8- or 16-bit head of Qwen2.5-0.5B, one core of an AMD EPYC, Zen 4)."""
_ZERO = 128


@dataclass(frozen=True, slots=True)
class Int8Head:
    """A head rounded to 8 bits at load: `(code - 128) * scale`, codes uint8 [O, I], scales [O].

    Half the bytes of a 16-bit head, which for a small model are most of what a token costs.
    """

    codes_OI: Tensor
    scales_O: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OI.shape[0], self.codes_OI.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.codes_OI.nbytes + self.scales_O.nbytes

    def rows(self, index: slice) -> Tensor:
        """Rows of the head, float32 [R, I]."""
        return (self.codes_OI[index].float() - _ZERO) * self.scales_O[index, None]


Head = Readable | Int8Head


def int8_head(head: Readable) -> Int8Head:
    """A head as int8 with one scale per word, the largest magnitude at 127."""
    out, width = head.shape
    device = head.rows(slice(0, 1)).device
    codes_OI = torch.empty(out, width, dtype=torch.uint8, device=device)
    scales_O = torch.empty(out, device=device)
    for start in range(0, out, _BLOCK_WORDS):
        block = slice(start, start + _BLOCK_WORDS)
        w_RI = head.rows(block).float()
        scales_R = w_RI.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        codes_OI[block] = (w_RI / scales_R[:, None]).round_().add_(_ZERO).to(torch.uint8)
        scales_O[block] = scales_R
    return Int8Head(codes_OI, scales_O)


def multiply_float32(x_NI: Tensor, head: Head, start: int, stop: int) -> Tensor:
    """`x W[start:stop]^T`, float32 [N, stop - start]."""
    x_NI = x_NI.float()
    if len(x_NI) <= MOST_SINGLE_ROWS and x_NI.device.type == "cpu" and x_NI.shape[1] % 16 == 0:
        words = slice(start, stop)
        if isinstance(head, Int8Head):
            return torch.stack([_multiply_codes(x_I, head, words) for x_I in x_NI])
        if isinstance(head, DenseWeight) and head.w_OI.dtype == torch.bfloat16:
            return torch.stack([_single(x_I, head.w_OI[words]) for x_I in x_NI])
    return _multiply_blocks(x_NI, head, start, stop)


def _single(x_I: Tensor, w_OI: Tensor) -> Tensor:
    from qconvert.decoder.gemv import multiply_row

    return multiply_row(x_I.contiguous(), w_OI)


def _multiply_codes(x_I: Tensor, head: Int8Head, words: slice) -> Tensor:
    return (_single(x_I, head.codes_OI[words]) - _ZERO * x_I.sum()) * head.scales_O[words]


def _multiply_blocks(x_NI: Tensor, head: Head, start: int, stop: int) -> Tensor:
    """A bounded block of words after the other, in float32."""
    y_NO = x_NI.new_empty(len(x_NI), stop - start)
    scratch_RI = x_NI.new_empty(min(_BLOCK_WORDS, stop - start), x_NI.shape[1])
    for first in range(start, stop, _BLOCK_WORDS):
        last = min(first + _BLOCK_WORDS, stop)
        w_RI = head.rows(slice(first, last))
        if w_RI.dtype != torch.float32:
            w_RI = scratch_RI[: last - first].copy_(w_RI)
        torch.mm(x_NI, w_RI.T, out=y_NO[:, first - start : last - start])
    return y_NO
