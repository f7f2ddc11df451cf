"""Stores the safetensors layout of torchao: integers of 8 bits and fewer, packed int4, and FP8.

A quantized `X.weight` [N, K] is `X._weight_qdata` with `X._weight_scale` and, but for FP8,
`X._weight_zero_point`; the file's metadata name its class. `Int8Tensor` and `IntxUnpackedToInt8Tensor` have
int8 [N, K] (the latter's within `target_dtype`) and scales [N, G]; `Int4Tensor` has two signed codes in a
byte [N, K/2], the first one low, and [G, N] scales and weights in the middle of the codes; `Float8Tensor` has
E4M3 [N, K] with scales [1, 1], [N, 1] or one for each block. `Int4Tensor` is written in the groups that
torchao makes of it, all other integers as `IntxUnpackedToInt8Tensor`. Sources: torchao 0.18
(`quantize_/workflows`, `prototype/safetensors`), and tensors written by it; for int4, fbgemm_gpu
(`int4_row_quantize_zp`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    RANDOM_EXPERTS,
    CodebookScheme,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Layout, Source
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, Value
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.config_checks import (
    APART,
    base_of,
    dtype_of,
    gathered,
    matrix_shape,
    require,
    settings_of,
)
from qconvert.formats.layouts.torchao_classes import file_metadata, quantization_config
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode

if TYPE_CHECKING:
    import numpy as np

NAME = "torchao"
_QDATA = "._weight_qdata"
_INT4 = 4
# The classes whose arrays are read; files of before the metadata are told by their arrays.
_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor")

_E4M3 = Codebook("e4m3", None, DType.F32, DType.BF16)
_PACKED_GROUPS = (32, 64, 128, 256)  # of Int4WeightOnlyConfig

TRAITS = LayoutTraits(
    NAME,
    integers=IntegerSchemes(),
    codebooks=(
        CodebookScheme("fp8-channel", _E4M3),
        CodebookScheme("fp8-tensor", replace(_E4M3, group_rows=None)),
    ),
    packs="no",
    symmetric_zeros=True,
    experts="apart",
    readers=("vllm", "sglang", "transformers"),
    own_kernels=True,
    loads="transformers and vLLM with torchao load",
    limits=(
        with_packages("transformers", "torchao"),
        LoaderLimit(
            ("vllm", "transformers"),
            "needs",
            "{loader} multiplies packed int4 with the package mslk, on a GPU, in bfloat16",
            "pip install mslk; `qconvert convert --to compressed-tensors` runs on CPUs too",
            lambda encoding: isinstance(encoding, AffineMin),
            needs="mslk",
        ),
        LoaderLimit(
            ("vllm",),
            "needs",
            "vllm computes models of float32 in bfloat16 unless told, and does not load torchao's float32 so",
            "serve with --dtype float32",
            lambda encoding: encoding.decoded is DType.F32,
            needs="--dtype float32",
        ),
        LoaderLimit(
            ("vllm",),
            "error",
            "{loader} keeps the head plain in {layout}, and this one is {encoding}",
            "--keep lm_head, or convert --to compressed-tensors",
            about="head",
        ),
        LoaderLimit(
            ("vllm",),
            "error",
            "{loader} does not load experts in {layout}",
            "`qconvert convert --to compressed-tensors`",
            about="experts",
        ),
        RANDOM_EXPERTS,
    ),
)


class TorchAO(PassThrough[Quantized, Value]):
    """Stores weights as torchao's arrays; `zeros` are the weights with a zero point that is stored, None of
    what is written: all integers have one.
    """

    traits = TRAITS

    def __init__(self, zeros: frozenset[str] | None = None) -> None:
        self.zeros = zeros

    @property
    def rewritten(self) -> Layout:
        """All weights as the classes that are written, whatever they were."""
        return TorchAO()

    def arrays(self, tensor: ModelTensor, encoding: Quantized) -> tuple[TensorSpec, ...]:
        base, (rows, width) = base_of(tensor), matrix_shape(tensor, NAME)
        qdata, scale, zero = base + _QDATA, f"{base}._weight_scale", f"{base}._weight_zero_point"
        groups: tuple[int, ...] = (rows, encoding.groups(width))
        if isinstance(encoding, Codebook):
            blocks = (1, 1) if encoding.group_rows is None else (encoding.scale_rows(rows), groups[1])
            return TensorSpec(qdata, DType.F8_E4M3, tensor.shape), TensorSpec(scale, DType.F32, blocks)
        if isinstance(encoding, AffineMin):
            turned = (groups[1], rows)
            halves = TensorSpec(qdata, DType.I8, (rows, width // 2))
            return (halves, *(TensorSpec(name, encoding.scale_dtype, turned) for name in (scale, zero)))
        made = (
            TensorSpec(qdata, DType.I8, tensor.shape),
            TensorSpec(scale, encoding.scale_dtype, groups),
        )
        stored = self.zeros is None or tensor.name in self.zeros
        return (*made, TensorSpec(zero, DType.I8, groups)) if stored else made

    def rows(self, tensor: ModelTensor, encoding: Quantized) -> int:
        """The rows of a block share its scales."""
        return (encoding.group_rows or 1) if isinstance(encoding, Codebook) else 1

    def store(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        specs = self.stored_arrays(tensor)
        if isinstance(value, CodebookRows):
            yield ArrayRows(specs[0].name, start, value.codes_RI)
            per = value.encoding.group_rows
            if per is not None:
                yield ArrayRows(specs[1].name, start // per, value.scales_RG[::per])
            elif start == 0:
                yield ArrayRows(specs[1].name, 0, value.scales_RG[:1])
        elif isinstance(value, AffineMinRows):
            yield from _packed(specs, start, value)
        else:
            assert isinstance(value, AffineIntRows)
            from qconvert.quant.dequantize import zeros_of
            from qconvert.quant.packed_codes import codes_of

            arrays = codes_of(value), value.scales_RG, zeros_of(value)
            for spec, array in zip(specs, arrays, strict=True):
                signed = _signed(array, value.encoding.bits) if spec.dtype is DType.I8 else array
                yield ArrayRows(spec.name, start, signed)

    def load(self, tensor: ModelTensor, encoding: Quantized, source: Source, rows: range) -> Value:
        specs = self.arrays(tensor, encoding)
        codes = source.read(specs[0].name, rows.start, rows.stop)
        if isinstance(encoding, Codebook):
            return CodebookRows(codes, _shared(specs[1], encoding, source, rows), encoding)
        if isinstance(encoding, AffineMin):
            return _int4(codes, specs[1:], source, rows, encoding)
        scales, *zeros = (source.read(spec.name, rows.start, rows.stop) for spec in specs[1:])
        zeros_RG = None if encoding.symmetric else _unsigned(zeros[0], encoding.bits)
        return AffineIntRows(_unsigned(codes, encoding.bits), scales, zeros_RG, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return {"quantization_config": quantization_config(quantized, kept)}

    def file_metadata(self, tensors: Iterable[ModelTensor], config: Json) -> Mapping[str, str]:
        """The class of every tensor: transformers takes what the last of several files says."""
        return file_metadata(tensors, dtype_of(config))


def _packed(specs: tuple[TensorSpec, ...], start: int, value: AffineMinRows) -> Iterator[ArrayRows]:
    """Two signed codes of 4 bits in a byte; scales and middles in columns."""
    from qconvert.quant.nibbles import pack_nibbles
    from qconvert.quant.packed_codes import codes_of
    from qconvert.quant.simd.transpose import transposed

    yield ArrayRows(specs[0].name, start, pack_nibbles(codes_of(value) ^ (1 << (_INT4 - 1))).view("i1"))
    for spec, array_RG in zip(specs[1:], (value.scales_RG, value.mins_RG), strict=True):
        yield ArrayRows(spec.name, 0, transposed(array_RG), start)


def _signed(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `bits` bits, counted from the middle of them."""
    signed: np.ndarray = (unsigned - (1 << (bits - 1))).view("i1")
    return signed


def _unsigned(signed: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes, within 8 bits, counted from the least code of `bits` bits."""
    unsigned: np.ndarray = signed.view("u1") + (1 << (bits - 1))
    return unsigned


def _shared(spec: TensorSpec, encoding: Codebook, source: Source, rows: range) -> np.ndarray:
    """The scales of these rows, one row of scales for each."""
    import numpy as np

    if encoding.group_rows is None:
        return np.repeat(source.read(spec.name, 0, 1), len(rows), axis=0)
    per = encoding.group_rows
    read = source.read(spec.name, rows.start // per, -(-rows.stop // per))
    return read[np.arange(rows.start, rows.stop) // per - rows.start // per]


def _int4(
    bytes_RB: np.ndarray, specs: tuple[TensorSpec, ...], source: Source, rows: range, encoding: AffineMin
) -> AffineMinRows:
    from qconvert.quant.nibbles import unpack_nibbles
    from qconvert.quant.simd.transpose import transposed

    codes_RI = unpack_nibbles(bytes_RB.view("u1")) ^ (1 << (_INT4 - 1))
    columns = (rows.start, rows.stop)
    scales, middles = (source.read(spec.name, 0, spec.shape[0], columns=columns) for spec in specs)
    return AffineMinRows(codes_RI, transposed(scales), transposed(middles), encoding)


def open_torchao(source: Source, config: Json) -> tuple[TorchAO, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the model."""
    said, decoded = _attributes(source), dtype_of(config)
    bases = [name.removesuffix(_QDATA) for name in source.specs if name.endswith(_QDATA)]
    quantized = [_logical(base, source, said.get(f"{base}.weight", {}), decoded) for base in bases]
    zeros = frozenset(t.name for t in quantized if f"{t.name[:-7]}._weight_zero_point" in source.specs)
    return gathered(TorchAO(zeros), source, quantized, "_weight_qdata")


def _attributes(source: Source) -> dict[str, Json]:
    """What the files' metadata say of each weight: its class and the attributes of that."""
    found: dict[str, Json] = {}
    metadata: Mapping[str, str] = getattr(source, "metadata", {})
    for name, text in metadata.items():
        try:
            own = json.loads(text) if text.startswith("{") and name.endswith(".weight") else None
        except (ValueError, RecursionError):
            own = None
        if isinstance(own, dict) and isinstance(own.get("_data"), dict):
            found[name] = {"class": own.get("_type"), **own["_data"]}
    return found


def _logical(base: str, source: Source, said: Json, decoded: DType) -> ModelTensor:
    array, name = base + _QDATA, f"{base}.weight"
    spec = source.specs[array]
    scales = require(source, f"{base}._weight_scale", f"{array} is there")
    zeros = source.specs.get(f"{base}._weight_zero_point")
    rows, *columns = spec.shape
    known = said.get("class") in (None, *_CLASSES) and f"{base}._weight_act_pre_scale" not in source.specs
    if known and len(columns) == 1 and len(scales.shape) == 2 and 0 not in (*spec.shape, *scales.shape):
        width = columns[0]
        if spec.dtype is DType.F8_E4M3:
            return ModelTensor(name, spec.shape, _float(array, spec, scales, decoded))
        turned = zeros is not None and zeros.dtype.is_float and scales.shape[1] == rows
        if spec.dtype is DType.I8 and turned and 2 * width % scales.shape[0] == 0:
            size = 2 * width // scales.shape[0]
            return ModelTensor(name, (rows, 2 * width), AffineMin(_INT4, size, scales.dtype, "middle"))
        whole = scales.shape[0] == rows and width % scales.shape[1] == 0
        if spec.dtype is DType.I8 and whole and (zeros is None or zeros.dtype is DType.I8):
            return ModelTensor(name, spec.shape, _integers(spec, scales, zeros, source, said))
    raise UnsupportedModel(
        f"{array}: {spec.dtype.label} {list(spec.shape)} is not read here; of torchao's, int8 "
        "ones are, with a scale for each row or group of columns, packed int4 (Int4Tensor) and FP8",
        "start from the 16-bit model, or let torchao dequantize this one and save that",
    )


def _float(array: str, spec: TensorSpec, scales: TensorSpec, decoded: DType) -> Codebook:
    """FP8 with a scale for the tensor, for each row, or for each block."""
    rows, width = spec.shape
    if rows % scales.shape[0] or width % scales.shape[1]:
        raise CorruptCheckpoint(
            f"{scales.name}: {scales.dtype.label} {list(scales.shape)} cuts {array}, {list(spec.shape)}, "
            "into no whole blocks",
            APART,
        )
    if scales.shape == (1, 1):
        return Codebook("e4m3", None, DType.F32, decoded, None)
    block = rows // scales.shape[0], width // scales.shape[1]
    return Codebook("e4m3", None if scales.shape[1] == 1 else block[1], DType.F32, decoded, block[0])


def _integers(
    spec: TensorSpec, scales: TensorSpec, zeros: TensorSpec | None, source: Source, said: Json
) -> AffineInt:
    """A byte for each code, of as many bits as the class says; without zero points if all are 0."""
    kind = said.get("target_dtype")
    label = kind.get("_data") if isinstance(kind, dict) else None
    bits = int(label[3:]) if isinstance(label, str) and label in {f"int{n}" for n in range(2, 9)} else 8
    symmetric = (
        zeros is None or not source.has_weights or not source.read(zeros.name, 0, zeros.shape[0]).any()
    )
    groups = scales.shape[1]
    return AffineInt(bits, None if groups == 1 else spec.shape[1] // groups, symmetric, scales.dtype)


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """A scale for each token, or for all, where the class of the settings names dynamic activations."""
    kinds = settings_of(config).get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, dict) else None
    named = str(kind.get("_type")) if isinstance(kind, dict) else ""
    if "DynamicActivation" not in named or not isinstance(kind, dict):
        return None
    whole = "PerTensor" in str(kind.get("_data"))
    return ActivationScheme(8, named.startswith("Float8"), "tensor" if whole else "token")


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.table == "e4m3":
        if encoding.group_size is not None:
            raise refused(tensor, "is FP8 in blocks, which torchao's weight-only settings do not have")
        return () if encoding.scale_dtype is DType.F32 else (Transcode("widen_scales", DType.F32),)
    if isinstance(encoding, AffineMin) and encoding.bits == _INT4 and encoding.shared_rows == 1:
        if encoding.offset == "middle" and encoding.scale_dtype is DType.BF16:
            return ()
        if encoding.group_size in _PACKED_GROUPS:
            return (Transcode("to_middles"),)
    ops, made = to_integers(tensor, encoding)
    check_column_order(tensor, made, NAME)
    packed = made.bits == _INT4 and made.group_size in _PACKED_GROUPS
    return (*ops, Transcode("to_middles")) if packed else ops


LAYOUTS = (RegisteredLayout(TRAITS, TorchAO, open_torchao, _transcode, _activations),)
