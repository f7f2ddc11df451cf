"""Packs weights in the order in which the tensor cores of a GPU read them, and unpacks them.

A weight is cut into tiles of 128 rows by 128 columns, one after the other along a row of tiles, so that
a kernel reads memory in one stream. A tile is cut into blocks of 32 (int4) or 16 (int8) columns, and a
row of a block into 4 words of 32 bits. Word t holds what thread t of 4 wants of the left operand of a
`wgmma` or `mma` (PTX ISA, "Matrix fragments": columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16):

    bit 31      28      24      20      16      12       8       4       0
    int4  | 2t+25 | 2t+17 | 2t+9  | 2t+1  | 2t+24 | 2t+16 | 2t+8  | 2t    |   block of 32 columns
    int8  |     2t+9      |     2t+1      |     2t+8      |      2t       |   block of 16 columns
           -------- odd columns --------- -------- even columns ---------

Two neighbours are at the same place of the two halves, so that a shift, a mask and a constant turn them
into one register of two bfloat16. A nibble is the code; a byte is `code - 128` in two's complement.

Scales and zeros lie as the threads that own a row want them: rows n and n + 8 of every 16 beside each
other (two scales of 16 bits to a word), zeros of rows n, n + 8, n + 64 and n + 72 too (four to a word).
Rows and columns are padded to whole tiles; scales of what is padded are 0. A layout is made at load, on
the device, and never saved.
Legend: N out features (rows), K in features, G groups, T x U tiles, J groups of a tile, R rows asked for.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.core.values import AffineIntRows
from qconvert.quant.packed_codes import codes_of
from qconvert.runtime.cuda.tiles import TILE, TiledGrid
from qconvert.runtime.storage import DenseWeight, IntWeight, as_tensor

GROUPS = (128, 64, 32)
"""Columns that may share one scale; larger groups that these divide are stored as several."""
_PACK_BYTES = 64 << 20
"""Codes packed at a time: packing holds them as 32-bit words, four or eight times the packed bytes."""


# Computed for an H200 (4.3 TB/s, 790 TFLOP/s), not measured: at 64 rows, dequantizing takes 0.59 ps of
# a weight and the product of what it gives 0.47; the kernel 0.16 at full rate, so it wins if it
# reaches 15 % of that. Wider ones are not built. These layouts are made only where the kernels run.
MOST_FEW_ROWS = 64
"""The most rows of x that the kernels of few rows multiply; more are for the dequantized weight."""


class MmaWeight(TiledGrid):
    """Quantized weights that the kernels of this package multiply by."""

    __slots__ = ()

    def multiplies_codes(self, rows: int) -> bool:
        """Whether products with so many rows are made of codes; of numbers rounded to `dtype` otherwise."""
        return rows <= MOST_FEW_ROWS

    def multiply(self, x: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b`, [..., N] in bf16: few rows by the codes, more by the dequantized weight."""
        # Imported here, where there is triton.
        if self.multiplies_codes(x.numel() // x.shape[-1]):
            from qconvert.runtime.cuda.matmul import multiply

            return multiply(x, self, bias_O)
        from qconvert.runtime.cuda.dequantize import multiply_many

        return multiply_many(x, self, bias_O)

    def rows(self, index: slice) -> Tensor:
        """Dequantized rows, [R, K] in the compute dtype; float32 scratch of the same shape."""
        codes_RK, scales_RG, zeros_RG = mma_codes(self, index)
        w_RGS = codes_RK.float().view(*scales_RG.shape, codes_RK.shape[1] // scales_RG.shape[1])
        w_RGS -= zeros_RG if isinstance(zeros_RG, int) else zeros_RG[..., None]
        w_RGS *= scales_RG[..., None]
        return w_RGS.flatten(1)[:, : self.shape[1]].to(self.dtype)


FewRowWeight = MmaWeight | DenseWeight
"""Weights that the few-row kernels multiply by: int4, int8, bf16."""


def pack_codes(codes_NK: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 8 bits, uint8 [N, K] of whole tiles, as int32 words [T, U, bits, 128, 4]."""
    out, width = codes_NK.shape
    codes_NK = codes_NK ^ 128 if bits == 8 else codes_NK
    # By tile, row, tile across, block, place in a half, word and half.
    codes = codes_NK.view(out // TILE, TILE, width // TILE, bits, 16 // bits, 4, 2)
    words = torch.zeros((), dtype=torch.int32, device=codes.device)
    for a, half in product(range(16 // bits), range(2)):
        words = words | (codes[:, :, :, :, a, :, half].int() << (bits * a + 16 * half))
    return words.permute(0, 2, 3, 1, 4).contiguous()


def unpack_codes(words: Tensor) -> Tensor:
    """The inverse of `pack_codes`: uint8 [N, K]."""
    tiles, across, bits = words.shape[:3]
    by_row = words.permute(0, 3, 1, 2, 4)
    shape = (tiles, TILE, across, bits, 16 // bits, 4, 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for a, half in product(range(16 // bits), range(2)):
        codes[:, :, :, :, a, :, half] = (by_row >> (bits * a + 16 * half)) & ((1 << bits) - 1)
    codes_NK = codes.view(tiles * TILE, across * TILE)
    return codes_NK ^ 128 if bits == 8 else codes_NK


def pack_scales(scales_NG: Tensor, groups: int) -> Tensor:
    """Scales of whole tiles, [N, G], by pairs of rows: [T, U, 64, J, 2], where J is `groups`."""
    parts = scales_NG.view(-1, 8, 2, 8, scales_NG.shape[1] // groups, groups)
    return parts.permute(0, 4, 1, 3, 5, 2).flatten(2, 3).contiguous()


def unpack_scales(scales: Tensor) -> Tensor:
    """The inverse of `pack_scales`: [N, G]."""
    tiles, across, _, groups, _ = scales.shape
    parts = scales.view(tiles, across, 8, 8, groups, 2)
    return parts.permute(0, 2, 5, 3, 1, 4).reshape(tiles * TILE, across * groups)


def pack_zeros(zeros_NG: Tensor, groups: int) -> Tensor:
    """Zeros of whole tiles, [N, G], by fours of rows: [T, U, 32, J, 4], where J is `groups`."""
    parts = zeros_NG.view(-1, 2, 4, 2, 8, zeros_NG.shape[1] // groups, groups)
    return parts.permute(0, 5, 2, 4, 6, 1, 3).flatten(2, 3).flatten(4).contiguous()


def unpack_zeros(zeros: Tensor) -> Tensor:
    """The inverse of `pack_zeros`: [N, G]."""
    tiles, across, _, groups, _ = zeros.shape
    parts = zeros.view(tiles, across, 4, 8, groups, 2, 2)
    return parts.permute(0, 5, 2, 6, 3, 1, 4).reshape(tiles * TILE, across * groups)


def mma_weight(value: AffineIntRows, device: torch.device) -> MmaWeight | None:
    """A grid of integer zeros on the device in the kernels' layout; None where they cannot hold it.

    They hold groups of consecutive columns of which 32, 64 or 128 is a divisor, or one per row.
    """
    if value.groups_I is not None:
        return None
    zeros: Tensor | int = 1 << (value.encoding.bits - 1)
    if value.zeros_RG is not None:
        zeros = torch.from_numpy(value.zeros_RG)
    scales_NG = as_tensor(value.scales_RG, value.encoding.scale_dtype)
    bits = 4 if value.encoding.bits <= 4 else 8
    return _mma_grid(torch.from_numpy(codes_of(value)), scales_NG, zeros, bits, device)


def mma_table(weight: IntWeight) -> MmaWeight | None:
    """The same for a weight that is on its device, in the layout whose rows are read."""
    bits = 4 if weight.kind == "int4" else 8
    return _mma_grid(weight.codes(), weight.scales_OG, weight.zeros_OG, bits, weight.codes_OB.device)


def tile_group(width: int, groups: int) -> int | None:
    """The columns that share a scale in the kernels' layout: None for one scale per row, 0 for no layout."""
    return None if groups == 1 else next((g for g in GROUPS if width // groups % g == 0), 0)


def _mma_grid(
    codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor | int, bits: int, device: torch.device
) -> MmaWeight | None:
    """`(code - zero) * scale` by groups."""
    out, width = codes_NK.shape
    stored, group = width // scales_NG.shape[1], tile_group(width, scales_NG.shape[1])
    # The kernel holds 128 + zero in the 8 bits of a bfloat16's precision.
    if group == 0 or (bits == 4 and isinstance(zeros_NG, Tensor) and bool((zeros_NG >= 128).any())):
        return None

    def padded(part_NG: Tensor) -> Tensor:
        part_NG = part_NG.to(device).repeat_interleave(1 if group is None else stored // group, dim=1)
        more = 0 if group is None else -width % TILE // group
        return F.pad(part_NG, (0, more, 0, -out % TILE))

    # Moving the codes of a symmetric grid up moves its zero, 2**(bits - 1), to that of the widest.
    shift = (1 << (bits - 1)) - zeros_NG if isinstance(zeros_NG, int) else 0
    rows = max(1, _PACK_BYTES // (width * TILE)) * TILE
    parts = []
    for start in range(0, out, rows):
        block = codes_NK[start : start + rows].to(device) + shift
        whole = F.pad(block, (0, -width % TILE, 0, -len(block) % TILE))
        parts.append(pack_codes(whole, bits))
    groups = 1 if group is None else TILE // group
    return MmaWeight(
        words=torch.cat(parts),
        scales=pack_scales(padded(scales_NG), groups),
        zeros=None if isinstance(zeros_NG, int) else pack_zeros(padded(zeros_NG), groups),
        group=group,
        shape=(out, width),
        bits=bits,
    )


def mma_codes(weight: MmaWeight, index: slice) -> tuple[Tensor, Tensor, Tensor | int]:
    """Codes uint8 [R, padded K], scales float32 [R, G] and zeros float32 [R, G] (or the one) of some rows."""
    start, stop, _ = index.indices(weight.shape[0])
    first = start // TILE
    tiles, rows = slice(first, -(-stop // TILE)), slice(start - first * TILE, stop - first * TILE)
    scales_RG = unpack_scales(weight.scales[tiles])[rows].float()
    zeros_RG: Tensor | int = 1 << (weight.bits - 1)
    if weight.zeros is not None:
        zeros_RG = unpack_zeros(weight.zeros[tiles])[rows].float()
    return unpack_codes(weight.words[tiles])[rows], scales_RG, zeros_RG
