"""Computes logits: the one product that leaves the decoder in float32, whatever it computes in.

Rounding logits to bfloat16 alone costs 4e-4 to 6e-4 nats of KL divergence, as much as a good 8-bit
quantization, and changes 3 to 4 % of the likeliest tokens. Legend: O words (rows of the head), I hidden
width, N rows of the input.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from qconvert.core.activations import INT8_GROUPS, InputQuantization
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows
from qconvert.errors import BadRecipe
from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime.blockwise_scores import Logits
from qconvert.runtime.cpu.byte_products import ByteRows, byte_rows, multiplies_bytes, multiply_byte_rows
from qconvert.runtime.cpu.packed_weights import MOST_INTEGER_ROWS, PackedGrid
from qconvert.runtime.cpu.products import multiply_few
from qconvert.runtime.cpu.scaled_products import codes_and_scales, multiplies_scaled, multiply_scaled
from qconvert.runtime.cpu.tile_dots import PANEL
from qconvert.runtime.cpu.tile_products import multiplies_bf16, multiply_bf16
from qconvert.runtime.linear import Table
from qconvert.runtime.precision import exact_products, fast_products
from qconvert.runtime.storage import DenseWeight, StreamedWeight, widened

_BLOCK_WORDS = 1024
"""Words converted to float32 at a time: 3.6 MB for a hidden width of 896, which stays in cache."""
MOST_SINGLE_ROWS = 2
"""Rows up to which reading the head once per row beats converting it (7.5 or 10.5 against 27 ms for
the 8- or 16-bit head of Qwen2.5-0.5B, one core of an AMD EPYC, Zen 4)."""


HEAD_GROUPS = {8: None, 4: 32}
"""Bits to which a head may be rounded at load, and the columns that share a scale: a word's, or 32."""


def rounded_head(head: Table, bits: int) -> AffineIntRows:
    """A head as a symmetric grid of 8 or 4 bits, the largest magnitude of each group at 127 or 7.

    For a small model the head is most of what a token costs. Raises BadRecipe for a width of no
    whole groups.
    """
    encoding = AffineInt(bits, HEAD_GROUPS[bits], True, DType.F32)
    (out, width), middle = head.shape, 1 << (bits - 1)
    if encoding.group_size is not None and width % encoding.group_size:
        raise BadRecipe(
            f"--head int{bits}: {width} columns are not a multiple of {encoding.group_size}", "use int8"
        )
    codes_OI = np.empty((out, width), np.uint8)
    scales_OG = np.empty((out, encoding.groups(width)), np.float32)
    for start in range(0, out, _BLOCK_WORDS):
        block = slice(start, start + _BLOCK_WORDS)
        w_RI = head.rows(block).float().cpu()
        w_RGS = w_RI.view(len(w_RI), scales_OG.shape[1], -1)
        scales_RG = w_RGS.abs().amax(2).div_(middle - 1).clamp_(min=torch.finfo(torch.float32).tiny)
        codes_RGS = (w_RGS / scales_RG[..., None]).round_().add_(middle).to(torch.uint8)
        codes_OI[block], scales_OG[block] = codes_RGS.flatten(1).numpy(), scales_RG.numpy()
    return AffineIntRows(codes_OI, scales_OG, None, encoding)


def multiply_float32(x_NI: Tensor, head: Table, start: int, stop: int) -> Tensor:
    """`x W[start:stop]^T`, float32 [N, stop - start], of the numbers as they are, summed in float32."""
    narrow_NO = None if widened(x_NI) else _multiply_narrow(x_NI, head, start, stop)
    if narrow_NO is not None:
        return narrow_NO
    few = len(x_NI) <= MOST_SINGLE_ROWS and x_NI.device.type == "cpu"
    kernels = few or (x_NI.dtype == torch.bfloat16 and x_NI.device.type == "cpu")
    if kernels and isinstance(head, StreamedWeight) and head.place is not None:
        starts = range(start, stop, _BLOCK_WORDS)
        blocks = (cast(Table, head.placed(first, min(first + _BLOCK_WORDS, stop))) for first in starts)
        return torch.cat([multiply_float32(x_NI, block, 0, block.shape[0]) for block in blocks], dim=1)
    x_NI = x_NI.float()
    if few and isinstance(head, PackedGrid | DenseWeight) and head.shape[1] % LANES == 0:
        return multiply_few(x_NI, head.part(slice(start, stop)))
    with exact_products():
        return _multiply_blocks(x_NI, head, start, stop)


def _multiply_narrow(x_NI: Tensor, head: Table, start: int, stop: int) -> Tensor | None:
    """The same of bfloat16 inputs and numbers, or codes, that are bfloat16, too; None where they are not.

    On processors with AMX by torch, which rounds to bfloat16 what is that already.
    """
    tiles = processor.multiplies_tiles()
    if isinstance(head, DenseWeight) and multiplies_bf16(x_NI, head.w_OI[start:stop]):
        if not tiles:
            return multiply_bf16(x_NI, head.w_OI[start:stop])
        with fast_products():
            return _multiply_blocks(x_NI.float(), head, start, stop)
    if not isinstance(head, PackedGrid) or not multiplies_scaled(x_NI, part := head.part(slice(start, stop))):
        return None
    if not tiles:
        return multiply_scaled(x_NI, part)
    apart = codes_and_scales(part)
    if apart is None:
        return None
    with fast_products():
        return _multiply_blocks(x_NI.float(), apart[0], 0, stop - start).mul_(apart[1])


def logit_blocks(h_ND: Tensor, head: Table, inputs: InputQuantization | None) -> Logits:
    """What makes logits of some rows of the head.

    Where `inputs` are `INT8_GROUPS`, many hidden states are rounded so, once for all blocks, if the head's
    codes can be multiplied; nothing else is rounded here.
    """
    many = inputs == INT8_GROUPS and len(h_ND) > MOST_INTEGER_ROWS
    if many and isinstance(head, PackedGrid) and multiplies_bytes(len(h_ND), head):
        return partial(_multiply_codes, byte_rows(h_ND, head), head)
    return partial(multiply_float32, h_ND, head)


def _multiply_codes(inputs: ByteRows, head: PackedGrid, start: int, stop: int) -> Tensor:
    first = min(start, head.shape[0] - PANEL)  # the kernel takes no fewer rows
    last = max(stop, first + PANEL)
    return multiply_byte_rows(inputs, head.part(slice(first, last)))[:, start - first : stop - first]


def _multiply_blocks(x_NI: Tensor, head: Table, start: int, stop: int) -> Tensor:
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
