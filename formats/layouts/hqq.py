"""Stores the layout of HQQ: codes with scales and zero points in floating point.

A quantized `X.weight` [N, K] is written out flat and cut into rows: of a group each with `axis` 1, [N*K/g,
g], and with `axis` 0 as [g, N*K/g], a group in each column. `X.W_q` holds these rows, several folded into one
array of bytes, the first part of them in the highest bits (of 3 bits: ten in a word of 30 bits); `X.scale`
and `X.zero` have a number for each group. Beside them stand, as arrays of their own, what the weight was made
with: `X.shape`, `X.nbits`, `X.group_size`, `X.axis` and more. Source: hqq 0.2.8 (`core/quantize.py`,
`core/bitpack.py`), and tensors written by it; transformers 4.57 (`quantizers/quantizer_hqq.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineMin, ModelTensor, Quantized
from qconvert.core.layout_traits import PLAIN_HEAD, IntegerSchemes, LayoutTraits, LoaderLimit
from qconvert.core.protocols import ArrayRows, Layout, Source
from qconvert.core.values import AffineMinRows
from qconvert.errors import BadRecipe, CorruptCheckpoint, NotDownloaded, UnsupportedModel
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode

if TYPE_CHECKING:
    import numpy as np

NAME = "hqq"
# Rows that are folded into one, and the bits of each, by the bits of the codes.
_FOLDED = {1: (8, 1), 2: (4, 2), 3: (10, 3), 4: (2, 4), 5: (1, 8), 6: (1, 8), 8: (1, 8)}
_PACKING = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 5: "8bit_u8", 6: "8bit_u8", 8: "8bit_u8"}
_NEEDS = "hqq, and transformers before 5"

TRAITS = LayoutTraits(
    NAME,
    integers=IntegerSchemes((2, 3, 4, 5, 6, 8)),
    packs="rows",
    folds=tuple((bits, folded, 4 if bits == 3 else 1) for bits, (folded, _) in _FOLDED.items()),
    experts="apart",
    readers=("transformers",),
    limits=(
        LoaderLimit(
            ("transformers",),
            "needs",
            "{loader} 4 reads {layout} weights with the package hqq; {loader} 5 does not (yet)",
            "pip install hqq 'transformers<5'",
            about="model",
            needs=_NEEDS,
        ),
        PLAIN_HEAD,
    ),
    loads="transformers 4 with hqq loads",
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
    """Stores weights as HQQ's arrays; `stored` says of those that are there, by their names, how they are."""

    stored: Mapping[str, _Stored] = field(default_factory=dict)

    @property
    def traits(self) -> LayoutTraits:
        return TRAITS

    @property
    def rewritten(self) -> Layout:
        """All weights as hqq 0.2.8 writes them, whatever wrote these."""
        return HQQ()

    def arrays(self, tensor: ModelTensor, encoding: AffineMin) -> tuple[TensorSpec, ...]:
        if tensor.name in self.stored:
            return self.stored[tensor.name].arrays
        specs = (_spec_of(tensor, key, value) for key, value in _beside(tensor, encoding).items())
        return (*_cut(tensor, encoding).arrays, *specs)

    def rows(self, tensor: ModelTensor, encoding: AffineMin) -> int:
        """Rows that lie far apart share a byte: all are written together, unless each code has its own."""
        return 1 if _FOLDED[encoding.bits][0] == 1 and encoding.shared_rows == 1 else tensor.rows

    def store(self, tensor: ModelTensor, start: int, value: AffineMinRows) -> Iterator[ArrayRows]:
        from qconvert.quant.packed_codes import codes_of

        cut = _cut(tensor, value.encoding)
        codes, *numbers = cut.arrays
        first = start * tensor.width // cut.columns
        yield ArrayRows(codes.name, first, _folded(codes_of(value).reshape(-1, cut.columns), cut, value))
        for spec, array_RG in zip(numbers, (value.scales_RG, value.mins_RG), strict=True):
            stored = array_RG.reshape(-1, 1) if cut.axis == 1 else _of_columns(tensor, array_RG, cut)
            yield ArrayRows(spec.name, first if cut.axis == 1 else 0, stored)
        if start == 0:
            for key, said in _beside(tensor, value.encoding).items():
                yield ArrayRows(_spec_of(tensor, key, said).name, 0, _array_of(said).reshape(-1, 1))

    def load(self, tensor: ModelTensor, encoding: AffineMin, source: Source, rows: range) -> AffineMinRows:
        """Read rows back, a scale and a zero point for each weight where groups are no runs of columns."""
        stored = self.stored.get(tensor.name) or _cut(tensor, encoding)
        flat = range(rows.start * tensor.width, rows.stop * tensor.width)
        codes_RI = _codes(stored, encoding.bits, source, flat).reshape(-1, tensor.width)
        scales_RG, zeros_RG = (_numbers(stored, spec, source, flat, len(rows)) for spec in stored.arrays[1:3])
        return AffineMinRows(codes_RI, scales_RG, zeros_RG, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """One entry for all, that of most: each weight has its own beside it, and no reader asks for more."""
        encodings = [encoding for encoding in quantized.values() if isinstance(encoding, AffineMin)]
        own = {
            key: value
            for key, value in _said(max(dict.fromkeys(encodings), key=encodings.count)).items()
            if key in _SETTINGS
        }
        made = {
            "weight_quant_params": own,
            "scale_quant_params": None,
            "zero_quant_params": None,
            "offload_meta": False,
        }
        return {
            "quantization_config": {"quant_config": made, "quant_method": NAME, "skip_modules": sorted(kept)}
        }


_SETTINGS = ("nbits", "channel_wise", "group_size", "optimize", "round_zero", "axis", "view_as_float")
# What else stands beside a weight. A bias is a tensor of the model, and so are other names.
_META = (
    "compute_dtype",
    "encoded_state_dict",
    "offload_meta",
    "packing",
    "quant_scale",
    "quant_zero",
    "shape",
    "stores_quant_config",
    "unpack_view_dtype",
)
_TORCH = {DType.BF16: "torch.bfloat16", DType.F16: "torch.float16", DType.F32: "torch.float32"}
_Said = int | bool | str | tuple[int, ...]


def _said(encoding: AffineMin) -> dict[str, _Said]:
    """What hqq says of a weight of this encoding, whatever its shape."""
    axis = 1 if encoding.shared_rows == 1 else 0
    return {
        "nbits": encoding.bits,
        "channel_wise": True,
        "group_size": encoding.group_size if axis == 1 else encoding.shared_rows,
        "optimize": True,
        "round_zero": encoding.bits == 4,
        "axis": axis,
        "view_as_float": False,
        "compute_dtype": _TORCH[encoding.scale_dtype],
        "encoded_state_dict": True,
        "offload_meta": False,
        "packing": _PACKING[encoding.bits],
        "quant_scale": False,
        "quant_zero": False,
        "stores_quant_config": True,
        "unpack_view_dtype": "torch.int32" if encoding.bits == 3 else "torch.uint8",
    }


def _beside(tensor: ModelTensor, encoding: AffineMin) -> dict[str, _Said]:
    return {**_said(encoding), "shape": (tensor.rows, tensor.width)}


def _array_of(said: _Said) -> np.ndarray:
    """A value as hqq's `encode_safetensor_type` stores it."""
    import numpy as np

    if isinstance(said, str):
        return np.frombuffer(said.encode(), np.uint8)
    if isinstance(said, tuple):
        return np.array(said, np.int64)
    return np.array(said, np.uint8 if isinstance(said, bool) else np.int32)


def _spec_of(tensor: ModelTensor, key: str, said: _Said) -> TensorSpec:
    name = f"{checks.base_of(tensor)}.{key}"
    if isinstance(said, str):
        return TensorSpec(name, DType.U8, (len(said),))
    if isinstance(said, tuple):
        return TensorSpec(name, DType.I64, (len(said),))
    return TensorSpec(name, DType.U8 if isinstance(said, bool) else DType.I32, ())


def _cut(tensor: ModelTensor, encoding: AffineMin) -> _Stored:
    """How hqq stores a weight of this encoding."""
    rows, width = checks.matrix_shape(tensor, NAME)
    if encoding.shared_rows == 1:
        axis, cut_rows, columns = 1, rows * width // encoding.group_size, encoding.group_size
    else:
        axis, cut_rows, columns = 0, encoding.shared_rows, rows * width // encoding.shared_rows
    base, groups = checks.base_of(tensor), ((cut_rows, 1) if axis == 1 else (1, columns))
    codes = TensorSpec(
        f"{base}.W_q",
        DType.I32 if encoding.bits == 3 else DType.U8,
        (-(-cut_rows // _FOLDED[encoding.bits][0]), columns),
    )
    numbers = (TensorSpec(f"{base}.{key}", encoding.scale_dtype, groups) for key in ("scale", "zero"))
    return _Stored(columns, cut_rows, (codes, *numbers), axis)


def _folded(codes_CI: np.ndarray, cut: _Stored, value: AffineMinRows) -> np.ndarray:
    """Codes, cut into rows, as they are folded: part by part, what the last one lacks filled with 0."""
    import numpy as np

    folded, width = _FOLDED[value.encoding.bits]
    if folded == 1:
        return codes_CI
    part = -(-len(codes_CI) // folded)
    words = np.zeros((part, cut.columns), "<i4" if value.encoding.bits == 3 else "u1")
    for place in range(folded):
        own = codes_CI[place * part : (place + 1) * part]
        words[: len(own)] |= own.astype(words.dtype) << width * (folded - 1 - place)
    return words


def _of_columns(tensor: ModelTensor, array_RG: np.ndarray, cut: _Stored) -> np.ndarray:
    """The number of each column of the cut weight, of numbers for each weight: [1, columns]."""
    import numpy as np

    each = array_RG.reshape(cut.rows, cut.columns)
    if not np.array_equal(each, np.broadcast_to(each[:1], each.shape)):
        raise BadRecipe(
            f"{tensor.name}: weights that would share a scale on axis 0 have different ones",
            "leave its parts as they are, or --allow-requantize",
        )
    return each[:1]


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
    names = (f"{base}.{each}" for base in bases for each in (*_SETTINGS, *_META))
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
            f"{base}.W_q: scales or zero points that are quantized, or stored elsewhere, are not read here",
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


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, AffineMin) and encoding.bits in _FOLDED:
        return () if encoding.offset == "zero" else (Transcode("offsets_to_zeros"),)
    ops, made = to_integers(tensor, encoding)
    check_column_order(tensor, made, NAME)
    if made.bits not in _FOLDED:
        raise refused(tensor, f"has codes of {made.bits} bits (HQQ's have 1 to 6 or 8)")
    return (*ops, Transcode("zeros_to_floats", tensor.width))


LAYOUTS = (RegisteredLayout(TRAITS, HQQ, open_hqq, _transcode),)
