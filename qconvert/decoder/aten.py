"""Weights in the layouts of torch's packed CPU kernels: fast for few rows, decodable for many.

The kernels are `aten::_weight_int4pack_mm_for_cpu` (groups of 32, 64, 128 or 256),
`aten::_weight_int8pack_mm` (one scale per row, here called once per group) and `aten::_int_mm`. All
take and give bfloat16 (the last: exact integers), hold scales and zeros as bfloat16, and sum in
float32. A layout is made at load and never saved; the codes are held in it alone.
Legend: O out features, I in features, G groups, S columns of a group, N rows of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from qconvert.decoder.storage import as_tensor
from qconvert.tensors import IntAffine

INT4_GROUPS = (256, 128, 64, 32)
LEAST_INT8_GROUP = 32
"""Below it, the calls of the int8 kernel, one per group, cost more than they multiply."""
_PACK_ROWS = 1024
"""Rows packed at a time: the kernel's packer wants 32-bit codes, eight times the packed bytes."""


@lru_cache
def tile_rows() -> int | None:
    """Rows that the int4 layout interleaves on this processor: 64, or 32 without AVX-512.

    The layout is torch's own business, so it is not assumed but read back from a packed pattern;
    None where it is another one, or where torch has no such kernel.
    """
    pattern_OI = torch.randint(0, 16, (64, 32), generator=torch.Generator().manual_seed(0))
    try:
        packed_OB = _pack(pattern_OI)
    except (AttributeError, RuntimeError):
        return None
    for rows in (64, 32):
        columns_IO = _unpacked(packed_OB.view(-1, 32, rows // 2), torch.int64)
        if torch.equal(columns_IO.T, pattern_OI):
            return rows
    return None


def _pack(codes_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI.int(), 2)
    return packed


def _unpacked(tiles_TIB: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of whole tiles, [I, O]: byte b of a column holds the tile's rows b and b + rows / 2."""
    tiles, width, half = tiles_TIB.shape
    codes_ITHB = torch.empty(width, tiles, 2, half, dtype=dtype)
    bytes_ITB = tiles_TIB.transpose(0, 1)
    codes_ITHB[:, :, 0] = bytes_ITB & 15
    codes_ITHB[:, :, 1] = bytes_ITB >> 4
    return codes_ITHB.flatten(1)


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A grid of up to 4 bits as `(code - 8) * scale + offset`.

    `tiles_TIB` uint8 [O / rows, I, rows / 2] for tiles of `tile_rows()` rows; `grid_GO2` bfloat16
    [G, O, 2] holds scale and offset. Exact but for the rounding of scale and offset to bfloat16; a
    symmetric grid has no offset.
    """

    tiles_TIB: Tensor
    grid_GO2: Tensor
    kind: str = "int4-aten"

    @property
    def shape(self) -> tuple[int, int]:
        return self.grid_GO2.shape[1], self.tiles_TIB.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.tiles_TIB.nbytes + self.grid_GO2.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.grid_GO2.dtype

    def multiply(self, x_NI: Tensor) -> Tensor:
        """`x W^T`, bfloat16 [N, O], by the packed kernel."""
        groups, out, _ = self.grid_GO2.shape
        width = self.tiles_TIB.shape[1]
        y_NO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_NI, self.tiles_TIB.view(out, width // 2), width // groups, self.grid_GO2
        )
        return y_NO

    def columns(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), which must be whole tiles, transposed: bfloat16 [I, stop - start]."""
        rows = 2 * self.tiles_TIB.shape[2]
        scales_GO, offsets_GO = self.grid_GO2[:, start:stop].permute(2, 0, 1).contiguous()
        # Without offsets, bfloat16 holds every step of the arithmetic exactly but the last.
        plain = not bool(offsets_GO.any())
        tiles_TIB = self.tiles_TIB[start // rows : stop // rows]
        w_IO = _unpacked(tiles_TIB, self.dtype if plain else torch.float32).sub_(8)
        w_GSO = w_IO.view(scales_GO.shape[0], -1, stop - start).mul_(scales_GO[:, None])
        if not plain:
            w_GSO += offsets_GO[:, None]
        return w_IO.to(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """A symmetric grid of up to 8 bits, cut into its groups, each a weight with one scale per row.

    `codes_GOS` int8 [G, O, S]; `scales_GO` bfloat16 [G, O].
    """

    codes_GOS: Tensor
    scales_GO: Tensor
    kind: str = "int8-aten"

    @property
    def shape(self) -> tuple[int, int]:
        groups, out, size = self.codes_GOS.shape
        return out, groups * size

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.codes_GOS.nbytes + self.scales_GO.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.scales_GO.dtype

    def multiply(self, x_NI: Tensor) -> Tensor:
        """`x W^T`, bfloat16 [N, O]: the sum, in float32, of the products of the groups."""
        groups, _, size = self.codes_GOS.shape
        x_GNS = x_NI.view(-1, groups, size).transpose(0, 1).contiguous()
        product = torch.ops.aten._weight_int8pack_mm
        if groups == 1:
            y_NO: Tensor = product(x_GNS[0], self.codes_GOS[0], self.scales_GO[0])
            return y_NO
        sum_NO = torch.zeros(x_NI.shape[0], self.shape[0])
        for x_NS, codes_OS, scales_O in zip(x_GNS, self.codes_GOS, self.scales_GO, strict=True):
            sum_NO += product(x_NS, codes_OS, scales_O)
        return sum_NO.to(x_NI.dtype)

    def rows(self, index: slice) -> Tensor:
        """Dequantized rows, bfloat16 [R, I]."""
        codes_GRS, scales_GR = self.codes_GOS[:, index], self.scales_GO[:, index]
        groups, rows, size = codes_GRS.shape
        w_RGS = torch.empty(rows, groups, size, dtype=self.dtype)
        torch.mul(codes_GRS.to(self.dtype), scales_GR[..., None], out=w_RGS.transpose(0, 1))
        return w_RGS.flatten(1)


def pack_int4(value: IntAffine) -> PackedInt4 | None:
    """The weight in the layout of the int4 kernel; None where that kernel cannot hold it.

    Groups of another size are spelled as several groups of the same scale.
    """
    form, (out, width) = value.form, value.codes_RI.shape
    stored = width // form.groups(width)
    size = next((size for size in INT4_GROUPS if stored % size == 0), None)
    tile = tile_rows()
    if tile is None or size is None or form.bits > 4 or out % tile:
        return None
    # A symmetric grid of fewer bits has its middle below 8; moving its codes up spares the offset.
    shift = 0 if value.zeros_RG is not None else 8 - (1 << (form.bits - 1))
    packed = [
        _pack(torch.from_numpy(value.codes_RI[i : i + _PACK_ROWS]) + shift) for i in range(0, out, _PACK_ROWS)
    ]
    grid_OG2 = _grid(value).repeat_interleave(stored // size, dim=1)
    return PackedInt4(
        torch.cat(packed).view(out // tile, width, tile // 2), grid_OG2.transpose(0, 1).contiguous()
    )


def _grid(value: IntAffine) -> Tensor:
    """Scales and offsets, bfloat16 [O, G, 2]."""
    scales_OG = as_tensor(value.scales_RG, value.form.scale_dtype).float()
    offsets_OG = torch.zeros_like(scales_OG)
    if value.zeros_RG is not None:
        offsets_OG = (8 - torch.from_numpy(value.zeros_RG).float()) * scales_OG
    return torch.stack((scales_OG, offsets_OG), dim=-1).bfloat16()


def pack_int8(value: IntAffine) -> PackedInt8 | None:
    """The weight in the layout of the int8 kernel; None for a grid with zeros, or of tiny groups."""
    out, width = value.codes_RI.shape
    groups = value.form.groups(width)
    if value.zeros_RG is not None or width // groups < LEAST_INT8_GROUP:
        return None
    codes_OI = (value.codes_RI.astype(np.int16) - (1 << (value.form.bits - 1))).astype(np.int8)
    codes_GOS = np.ascontiguousarray(codes_OI.reshape(out, groups, -1).transpose(1, 0, 2))
    scales_OG = as_tensor(value.scales_RG, value.form.scale_dtype).bfloat16()
    return PackedInt8(torch.from_numpy(codes_GOS), scales_OG.T.contiguous())
