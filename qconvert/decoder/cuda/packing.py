"""Weights in the order in which the tensor cores of a GPU read them: packing, and its inverse.

A weight is cut into tiles of 128 rows by 128 columns, one after the other along a row of tiles, so
that a kernel reads memory in one stream. Within a tile, a row is 16 (int4) or 32 (int8) words of 32
bits, and a word holds what one thread of a `wgmma` or `mma` instruction wants of the left operand
(PTX ISA, "Matrix fragments": columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16, t = 0..3):

    int4: word t of a block of 32 columns           int8: word t of a block of 16 columns
    bit 31    24    20    16 15    12    8     4  0   bit 31      24      16       8       0
       | 2t+25 | 2t+17 | 2t+9 | 2t+1 | 2t+24 | .. |      | 2t+9   | 2t+1   | 2t+8   | 2t     |
       '------- upper half ---------'---- lower --'      '--- upper half ---'- lower half ---'

In both, bits 16.. hold the odd column beside the even one of bits 0.., so that two neighbours leave a
word as one register of two bfloat16. An int4 half holds columns 2t + 8a at bits 4a, a = 0..3; an int8
half columns 2t + 8a at bits 8a, a = 0..1. A nibble is the code; a byte is `code - 128` in two's complement.

Rows and columns are padded to whole tiles; scales of padded rows and groups are 0. A layout is made at
load, on the device, and never saved.
Legend: N out features (rows), K in features, G groups, T x U tiles, R rows of a tile, W words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.decoder.storage import as_tensor
from qconvert.tensors import IntAffine

TILE = 128
"""Rows, and columns, of a tile; also the columns that a kernel multiplies by in one step."""
GROUPS = (128, 64, 32)
"""Columns that may share one scale; larger groups that these divide are spelled as several."""
SYMMETRIC_INT4_ZERO = 8
_PACK_BYTES = 64 << 20
"""Codes packed at a time: packing holds them as 32-bit words, four or eight times the packed bytes."""


@dataclass(frozen=True, slots=True)
class MmaInt4:
    """A grid of up to 4 bits, `(code - zero) * scale`, exactly as it is stored.

    `words` int32 [T, U, 128, 16]; `scales_GN` [G, 128 T] in the dtype they are stored in;
    `zeros_GN` uint8 [G, 128 T], or None for a symmetric grid, whose zero is 8 (codes of fewer bits
    are moved up). G is the padded K / `group`, or 1 where `group` is None: one scale per row.
    """

    words: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor | None
    group: int | None
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    kind: str = "int4-mma"

    @property
    def sum_group(self) -> int:
        """The columns per sum that `group_sums` takes for products with this weight."""
        return self.group or TILE

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return _nbytes(self)

    def rows(self, index: slice) -> Tensor:
        """Dequantized rows, [R, K] in the compute dtype; float32 scratch of the same shape."""
        return _rows(self, index).to(self.dtype)


@dataclass(frozen=True, slots=True)
class MmaInt8:
    """A grid of 5 to 8 bits, `(code - zero) * scale`, exactly as it is stored.

    `words` int32 [T, U, 128, 32]; the rest as in MmaInt4, the zero of a symmetric grid being 128.
    """

    words: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor | None
    group: int | None
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    kind: str = "int8-mma"

    @property
    def sum_group(self) -> int | None:
        """The columns per sum that `group_sums` takes; None for a symmetric grid, which wants none."""
        return None if self.zeros_GN is None else self.group or TILE

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return _nbytes(self)

    def rows(self, index: slice) -> Tensor:
        """Dequantized rows, [R, K] in the compute dtype; float32 scratch of the same shape."""
        return _rows(self, index).to(self.dtype)


MmaWeight = MmaInt4 | MmaInt8
"""Quantized weights that the kernels of this package multiply by."""


def pack_int4(codes_NK: Tensor) -> Tensor:
    """Codes of 0 to 15, uint8 [N, K] of whole tiles, as int32 words [N / 128, K / 128, 128, 16]."""
    columns = codes_NK.view(-1, TILE, codes_NK.shape[1] // TILE, 4, 4, 4, 2)  # T R U block a t half
    return _gathered(columns, nibbles=4, bits=4)


def unpack_int4(words: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 [N, K]."""
    return _spread(words, nibbles=4, bits=4)


def pack_int8(codes_NK: Tensor) -> Tensor:
    """Codes of 0 to 255, uint8 [N, K] of whole tiles, as int32 words [N / 128, K / 128, 128, 32]."""
    columns = (codes_NK ^ 128).view(-1, TILE, codes_NK.shape[1] // TILE, 8, 2, 4, 2)
    return _gathered(columns, nibbles=2, bits=8)


def unpack_int8(words: Tensor) -> Tensor:
    """The inverse of `pack_int8`: uint8 [N, K]."""
    return _spread(words, nibbles=2, bits=8) ^ 128


def _gathered(columns: Tensor, *, nibbles: int, bits: int) -> Tensor:
    """Codes [T, R, U, block, a, t, half] to words [T, U, R, block * t]."""
    words = torch.zeros((), dtype=torch.int32, device=columns.device)
    for a in range(nibbles):
        for half in range(2):
            words = words | (columns[:, :, :, :, a, :, half].int() << (bits * a + 16 * half))
    return words.flatten(3).transpose(1, 2).contiguous()


def _spread(words: Tensor, *, nibbles: int, bits: int) -> Tensor:
    tiles, across = words.shape[:2]
    by_word = words.transpose(1, 2).reshape(tiles, TILE, across, -1, 4)  # T R U block t
    codes = torch.empty(
        tiles, TILE, across, by_word.shape[3], nibbles, 4, 2, dtype=torch.uint8, device=words.device
    )
    for a in range(nibbles):
        for half in range(2):
            codes[:, :, :, :, a, :, half] = (by_word >> (bits * a + 16 * half)) & ((1 << bits) - 1)
    return codes.view(tiles * TILE, across * TILE)


def mma_weight(value: IntAffine, device: torch.device) -> MmaWeight | None:
    """A grid of integer zeros on the device in the kernels' layout; None where they cannot hold it.

    They hold groups of consecutive columns of which 32, 64 or 128 is a divisor, or one per row.
    """
    form, (out, width) = value.form, value.codes_RI.shape
    stored = width // form.groups(width)
    group = None if form.groups(width) == 1 else next((g for g in GROUPS if stored % g == 0), 0)
    if group == 0 or value.groups_I is not None:
        return None
    scales_NG = as_tensor(value.scales_RG, form.scale_dtype).to(device)
    zeros_NG = None if value.zeros_RG is None else torch.from_numpy(value.zeros_RG).to(device)
    small = form.bits <= 4
    # Moving the codes of a symmetric grid up moves its zero, 2**(bits - 1), to that of the widest.
    shift = (8 if small else 128) - (1 << (form.bits - 1)) if zeros_NG is None else 0
    repeat = 1 if group is None else stored // group
    return (MmaInt4 if small else MmaInt8)(
        words=_packed(torch.from_numpy(value.codes_RI), shift, small, device),
        scales_GN=_grid(scales_NG, repeat, width, group),
        zeros_GN=None if zeros_NG is None else _grid(zeros_NG, repeat, width, group),
        group=group,
        shape=(out, width),
    )


def _packed(codes_NK: Tensor, shift: int, small: bool, device: torch.device) -> Tensor:
    out, width = codes_NK.shape
    rows = max(1, _PACK_BYTES // (width * TILE)) * TILE
    parts = []
    for start in range(0, out, rows):
        block = codes_NK[start : start + rows].to(device) + shift
        whole = F.pad(block, (0, -width % TILE, 0, -len(block) % TILE))
        parts.append(pack_int4(whole) if small else pack_int8(whole))
    return torch.cat(parts)


def _grid(part_NG: Tensor, repeat: int, width: int, group: int | None) -> Tensor:
    """Scales or zeros as a kernel reads them, [G, N], padded with zeros to whole tiles."""
    part_NG = part_NG.repeat_interleave(repeat, dim=1)
    more = 0 if group is None else -(-width // TILE) * (TILE // group) - part_NG.shape[1]
    return F.pad(part_NG, (0, more, 0, -len(part_NG) % TILE)).T.contiguous()


def _nbytes(weight: MmaWeight) -> int:
    zeros = 0 if weight.zeros_GN is None else weight.zeros_GN.nbytes
    return weight.words.nbytes + weight.scales_GN.nbytes + zeros


def codes_of(weight: MmaWeight, index: slice) -> tuple[Tensor, Tensor, Tensor | int]:
    """Codes uint8 [R, padded K], scales float32 [R, G] and zeros [R, G] (or the one) of some rows."""
    start, stop, _ = index.indices(weight.shape[0])
    first = start // TILE
    words = weight.words[first : -(-stop // TILE)]
    codes_NK = unpack_int4(words) if isinstance(weight, MmaInt4) else unpack_int8(words)
    codes_RK = codes_NK[start - first * TILE : stop - first * TILE]
    scales_RG = weight.scales_GN[:, start:stop].T.float()
    if weight.zeros_GN is None:
        return codes_RK, scales_RG, SYMMETRIC_INT4_ZERO if isinstance(weight, MmaInt4) else 128
    return codes_RK, scales_RG, weight.zeros_GN[:, start:stop].T


def _rows(weight: MmaWeight, index: slice) -> Tensor:
    """Dequantized rows in float32, [R, K]."""
    codes_RK, scales_RG, zeros_RG = codes_of(weight, index)
    rows, groups = scales_RG.shape
    w_RGS = codes_RK.float().view(rows, groups, codes_RK.shape[1] // groups)
    w_RGS -= zeros_RG if isinstance(zeros_RG, int) else zeros_RG[..., None]
    w_RGS *= scales_RG[..., None]
    return w_RGS.flatten(1)[:, : weight.shape[1]]
