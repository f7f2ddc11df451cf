"""Reads the layout of HQQ: codes with scales and zero points in floating point.

A quantized `X.weight` [N, K] is written out flat and cut into rows: of a group each with `axis` 1, [N*K/g,
g], and with `axis` 0 as [g, N*K/g], a group in each column. `X.W_q` holds these rows, several folded into one
array of bytes, the first part of them in the highest bits (of 3 bits: ten in a word of 30 bits); `X.scale`
and `X.zero` have a number for each group. Beside them stand, as arrays of their own, what the weight was made
with: `X.shape`, `X.nbits`, `X.group_size`, `X.axis` and more. Source: hqq 0.2.8 (`core/quantize.py`,
`core/bitpack.py`), and tensors written by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineMin, ModelTensor, Quantized
from qconvert.core.layout_traits import LayoutTraits, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineMinRows
from qconvert.errors import BadRecipe, CorruptCheckpoint, NotDownloaded, UnsupportedModel
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout

if TYPE_CHECKING:
    import numpy as np

NAME = "hqq"
_ANOTHER = "`qconvert convert --to` another layout"
# What stands beside a weight. A bias is a tensor of the model, and so are other names.
_BESIDE = (
    "axis",
    "channel_wise",
    "compute_dtype",
    "encoded_state_dict",
    "group_size",
    "nbits",
    "offload_meta",
    "optimize",
    "packing",
    "quant_scale",
    "quant_zero",
    "round_zero",
    "shape",
    "stores_quant_config",
    "unpack_view_dtype",
    "view_as_float",
)
# Rows that are folded into one, and the bits of each, by the bits of the codes.
_FOLDED = {1: (8, 1), 2: (4, 2), 3: (10, 3), 4: (2, 4), 5: (1, 8), 6: (1, 8), 8: (1, 8)}

TRAITS = LayoutTraits(
    NAME,
    packs="rows",
    experts="apart",
    readers=("transformers",),
    limits=(with_packages("transformers", "hqq"),),
    instead="--to mlx holds grids with zero points in floating point too",
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """How one weight is stored: `columns` of the rows it is cut into, and the arrays that hold them."""

    columns: int
    rows: int
    arrays: tuple[TensorSpec, ...]
    axis: int


@dataclass(frozen=True, slots=True)
class HQQ(PassThrough[AffineMin, AffineMinRows]):
    """Reads weights from HQQ's arrays; `stored` says of each, by its name, how it is cut."""

    stored: Mapping[str, _Stored]

    @property
    def traits(self) -> LayoutTraits:
        return TRAITS

    def arrays(self, tensor: ModelTensor, encoding: AffineMin) -> tuple[TensorSpec, ...]:
        return self.stored[tensor.name].arrays

    def store(self, tensor: ModelTensor, start: int, value: AffineMinRows) -> Iterable[ArrayRows]:
        """Raise BadRecipe: what loads HQQ makes it of 16-bit models by itself."""
        raise BadRecipe(f"{tensor.name}: HQQ's layout is read, not written", _ANOTHER)

    def load(self, tensor: ModelTensor, encoding: AffineMin, source: Source, rows: range) -> AffineMinRows:
        """Read rows back, a scale and a zero point for each weight where groups are no runs of columns."""
        stored = self.stored[tensor.name]
        flat = range(rows.start * tensor.width, rows.stop * tensor.width)
        codes_RI = _codes(stored, encoding.bits, source, flat).reshape(-1, tensor.width)
        scales_RG, zeros_RG = (_numbers(stored, spec, source, flat, len(rows)) for spec in stored.arrays[1:])
        return AffineMinRows(codes_RI, scales_RG, zeros_RG, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing is written in this layout."""
        raise BadRecipe("HQQ's layout is read, not written", _ANOTHER)


def _codes(stored: _Stored, bits: int, source: Source, flat: range) -> np.ndarray:
    """The codes at these places of the weight written out flat, uint8 [len(flat)].

    Each of the folded parts is a run of the flat weight, so that places of a part are bytes in a row.
    """
    import numpy as np

    folded, width = _FOLDED[bits]
    columns, spec, part = stored.columns, stored.arrays[0], -(-stored.rows // folded) * stored.columns
    made = []
    for place in range(folded):
        start, stop = max(flat.start, place * part), min(flat.stop, (place + 1) * part)
        if start >= stop:
            continue
        first, last = start - place * part, stop - place * part
        words = source.read(spec.name, first // columns, -(-last // columns))
        words = np.ascontiguousarray(words).view("<u4" if bits == 3 else "u1").ravel()
        skipped = first // columns * columns
        shift = width * (folded - 1 - place)
        made.append(words[first - skipped : last - skipped] >> shift & (1 << width) - 1)
    return np.concatenate(made).astype(np.uint8)


def _numbers(stored: _Stored, spec: TensorSpec, source: Source, flat: range, rows: int) -> np.ndarray:
    """The scales or zeros of these places: one for each group of a row, or for each weight [rows, *]."""
    import numpy as np

    if stored.axis == 1:
        first, last = flat.start // stored.columns, flat.stop // stored.columns
        return source.read(spec.name, first, last).reshape(rows, -1)
    number_of_column = source.read(spec.name, 0, 1).ravel()
    return number_of_column[np.arange(flat.start, flat.stop) % stored.columns].reshape(rows, -1)


def open_hqq(source: Source, config: Json) -> tuple[HQQ, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names an array whose shape contradicts what stands beside it.
    """
    bases = [name.removesuffix(".W_q") for name in source.specs if name.endswith(".W_q")]
    tensors, stored = [], {}
    for base in bases:
        tensor, how = _logical(base, source)
        tensors.append(tensor)
        stored[tensor.name] = how
    names = (f"{base}.{each}" for base in bases for each in _BESIDE)
    beside = [name for name in names if name in source.specs]
    return checks.gathered(HQQ(stored), source, tensors, "W_q", beside=beside)


def _logical(base: str, source: Source) -> tuple[ModelTensor, _Stored]:
    why = f"{base}.W_q is there"
    if not source.has_weights:
        raise NotDownloaded(
            f"{base}.shape: HQQ's weights are as large as this array says, which is not downloaded",
            "download the model, or give its folder",
        )
    shape = _read(source, base, "shape", why, 2)
    bits, size, axis = (_read(source, base, key, why)[0] for key in ("nbits", "group_size", "axis"))
    if bits not in _FOLDED or axis not in (0, 1):
        raise UnsupportedModel(
            f"{base}.W_q: {bits} bits on axis {axis} are not read here",
            "1 to 6 and 8 bits on axis 0 or 1 are read",
        )
    if f"{base}.scale" not in source.specs or f"{base}.zero" not in source.specs:
        raise UnsupportedModel(
            f"{base}.W_q: scales or zero points that are quantized, or lie elsewhere, are not read here",
            "quantize it with hqq 0.2 or later, which does neither",
        )
    rows, width = shape
    count = rows * width
    if min(rows, width, size) < 1 or count % size or (axis == 1 and width % size):
        raise CorruptCheckpoint(f"{base}.shape: {list(shape)} is not cut into groups of {size}", checks.APART)
    cut_rows, columns = (count // size, size) if axis == 1 else (size, count // size)
    scale = checks.part(source, f"{base}.scale", why, dims=(2,))
    codes = _words(source.specs[f"{base}.W_q"], bits, cut_rows, columns)
    groups = (cut_rows, 1) if axis == 1 else (1, columns)
    arrays = (codes, *(TensorSpec(f"{base}.{key}", scale.dtype, groups) for key in ("scale", "zero")))
    encoding = AffineMin(bits, size if axis == 1 else 1, scale.dtype, "zero", 1 if axis == 1 else size)
    stored = _Stored(columns, cut_rows, arrays, axis)
    return ModelTensor(f"{base}.weight", (rows, width), encoding), stored


def _words(found: TensorSpec, bits: int, rows: int, columns: int) -> TensorSpec:
    """The array of codes as it must be, in the type that it is viewed as."""
    word = 4 if bits == 3 else 1
    kind = DType.I32 if bits == 3 else DType.U8
    shape = (-(-rows // _FOLDED[bits][0]), columns)
    viewed = found.dtype if found.dtype.is_float and columns * word % found.dtype.nbytes == 0 else kind
    return TensorSpec(found.name, viewed, (shape[0], shape[1] * word // viewed.nbytes))


def _read(source: Source, base: str, key: str, why: str, count: int = 1) -> tuple[int, ...]:
    """The integers of one of the arrays beside a weight."""
    spec = checks.require(source, f"{base}.{key}", why)
    if spec.count != count or spec.dtype.is_float:
        raise CorruptCheckpoint(
            f"{spec.name}: {spec.dtype.label} {list(spec.shape)}, but {why}: it must be {count} integers",
            checks.APART,
        )
    stored = source.read(spec.name, 0, spec.shape[0] if spec.shape else 1)
    return tuple(int(number) for number in stored.ravel())


LAYOUTS = (RegisteredLayout(TRAITS, reader=open_hqq),)
