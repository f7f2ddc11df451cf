"""Logits: the one product that leaves the decoder in float32, whatever it computes in.

Rounding logits to bfloat16 alone costs 4e-4 to 6e-4 nats of KL divergence, as much as a good 8-bit
quantization, and turns 3 to 4 % of the likeliest tokens.
Legend: O words (rows of the head), I hidden width, N rows of the input, D digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qconvert.decoder.storage import Readable

_BLOCK_WORDS = 1024
"""Words converted to float32 at a time: 3.6 MB for a hidden width of 896, which stays in cache."""
_DIGIT_BITS = 7
_DIGITS = 3
MOST_EXACT_ROWS = 4
"""Rows up to which three products of integers are faster than one in float32."""


@dataclass(frozen=True, slots=True)
class Int8Head:
    """A head rounded to 8 bits at load: `code * scale`, codes int8 [O, I] from -127 to 127, scales [O].

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
        return self.codes_OI[index] * self.scales_O[index, None]

    def multiply(self, x_NI: Tensor, words: slice) -> Tensor:
        """Logits of `words`, float32 [N, words]; x is rounded to 2^-20 of its row's largest element.

        The rounded x is an integer of three digits to base 128, each digit an int8 row of one exact
        integer product (`aten::_int_mm`).
        """
        digits_DNI, unit_N = _digits(x_NI)
        products = torch._int_mm(digits_DNI.flatten(0, 1), self.codes_OI[words].T)
        total_NO = torch.zeros(len(x_NI), products.shape[1], device=x_NI.device)
        for product_NO in products.view(_DIGITS, len(x_NI), -1):
            total_NO = torch.add(product_NO, total_NO, alpha=1 << _DIGIT_BITS)
        return total_NO * unit_N[:, None] * self.scales_O[words]


Head = Readable | Int8Head


def int8_head(head: Readable) -> Int8Head:
    """A head as int8 with one scale per word, the largest magnitude at 127."""
    out, width = head.shape
    device = head.rows(slice(0, 1)).device
    codes_OI = torch.empty(out, width, dtype=torch.int8, device=device)
    scales_O = torch.empty(out, device=device)
    for start in range(0, out, _BLOCK_WORDS):
        block = slice(start, start + _BLOCK_WORDS)
        w_RI = head.rows(block).float()
        scales_R = w_RI.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        codes_OI[block] = (w_RI / scales_R[:, None]).round_().to(torch.int8)
        scales_O[block] = scales_R
    return Int8Head(codes_OI, scales_O)


def multiply_float32(x_NI: Tensor, head: Head, start: int, stop: int) -> Tensor:
    """`x W[start:stop]^T`, float32 [N, stop - start]."""
    x_NI = x_NI.float()
    if isinstance(head, Int8Head) and len(x_NI) <= MOST_EXACT_ROWS and x_NI.device.type == "cpu":
        return head.multiply(x_NI, slice(start, stop))
    y_NO = x_NI.new_empty(len(x_NI), stop - start)
    scratch_RI = x_NI.new_empty(min(_BLOCK_WORDS, stop - start), x_NI.shape[1])
    for first in range(start, stop, _BLOCK_WORDS):
        last = min(first + _BLOCK_WORDS, stop)
        w_RI = head.rows(slice(first, last))
        if w_RI.dtype != torch.float32:
            w_RI = scratch_RI[: last - first].copy_(w_RI)
        torch.mm(x_NI, w_RI.T, out=y_NO[:, first - start : last - start])
    return y_NO


def _digits(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """x as `unit * (digit0 * 128^2 + digit1 * 128 + digit2)`: digits int8 [D, N, I], units [N]."""
    largest_N = x_NI.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny)
    unit_N = largest_N / (1 << (_DIGIT_BITS * _DIGITS - 1))
    rest_NI = (x_NI / unit_N[:, None]).round_().int()
    half = 1 << (_DIGIT_BITS - 1)
    digits = []
    for place in reversed(range(1, _DIGITS)):
        shift = _DIGIT_BITS * place
        digit_NI = (rest_NI + (half << (shift - _DIGIT_BITS))) >> shift
        rest_NI = rest_NI - (digit_NI << shift)
        digits.append(digit_NI)
    return torch.stack([*digits, rest_NI]).to(torch.int8), unit_N
