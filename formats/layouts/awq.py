"""Stores the AWQ layout `gemm` of AutoAWQ: 4-bit codes, eight output rows to a word, in an order of its own.

A quantized `X.weight` [N, K] is stored transposed: `X.qweight` int32 [K, N/8], `X.qzeros` int32
[G, N/8] and `X.scales` f16 [G, N]. From its lowest bits on, a word holds the rows 0, 2, 4, 6, 1, 3, 5, 7
of its eight. Sources: AutoAWQ 0.2 (`utils/packing_utils.py`, `modules/linear/gemm.py`), and tensors
written by AutoRound 0.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    PLAIN_HEAD,
    RANDOM_EXPERTS,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    beside_marlin,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows
from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, PassThrough, Promise, RegisteredLayout
from qconvert.formats.layouts.gptq_dynamic import left_plain
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode
from qconvert.quant.packed_codes import codes_of

if TYPE_CHECKING:
    import numpy as np

NAME = "awq"
_BITS = 4
_PER_WORD = 8
_STORED = (0, 2, 4, 6, 1, 3, 5, 7)  # the row in each place of a word
_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each row


def _beside_awq_marlin(encoding: Quantized) -> bool:
    """Whether SGLang's Marlin kernels for AWQ, which want zero points, leave these integers out."""
    return isinstance(encoding, AffineInt) and (
        encoding.symmetric or beside_marlin(replace(encoding, symmetric=True))
    )


TRAITS = LayoutTraits(
    NAME,
    method="AWQ",
    integers=IntegerSchemes((_BITS,)),
    scale_dtype=DType.F16,
    shared_zero_point=True,
    packs="rows",
    symmetric_zeros=True,
    experts="apart",
    readers=("vllm", "sglang", "transformers", "mlx"),
    marlin=True,
    loads="vLLM, and transformers with an AWQ backend, load",
    serve="vllm serve",
    limits=(
        PLAIN_HEAD,
        RANDOM_EXPERTS,
        with_packages("transformers", "gptqmodel", "accelerate"),
        LoaderLimit(
            ("sglang",),  # `awq_marlin` wants zero points; `awq` has no experts, and get_supported_act_dtypes
            "warning",
            "SGLang runs AWQ only in float16 where it has no zero points, or groups other than of 32, 64 or "
            "128 columns, and this is {encoding}",
            "--dtype half",
            _beside_awq_marlin,
        ),
        LoaderLimit(
            ("sglang",),
            "error",
            "SGLang has no kernel for experts of AWQ as {encoding}",
            "`qconvert convert --to compressed-tensors`",
            _beside_awq_marlin,
            about="experts",
        ),
        LoaderLimit(
            ("mlx",),  # load_model: it stacks experts (`sanitize`) before it turns AWQ into its own
            "error",
            "mlx-lm finds no module for experts in AWQ",
            "`qconvert convert --to mlx`",
            about="experts",
        ),
    ),
)


class AWQ(PassThrough[AffineInt, AffineIntRows]):
    """Stores weights as AutoAWQ's `gemm` arrays; it has no state."""

    traits = TRAITS
    transposed = True
    named_by = "module"

    def arrays(self, tensor: ModelTensor, encoding: AffineInt) -> tuple[TensorSpec, ...]:
        rows, width = checks.matrix_shape(tensor, NAME)
        groups, base = encoding.groups(width), checks.base_of(tensor)
        if rows % _PER_WORD:
            raise BadRecipe(
                f"{tensor.name}: {rows} rows, AWQ packs eight to a word", "keep this weight plain"
            )
        return (
            TensorSpec(f"{base}.qweight", DType.I32, (width, rows // _PER_WORD)),
            TensorSpec(f"{base}.scales", encoding.scale_dtype, (groups, rows)),
            TensorSpec(f"{base}.qzeros", DType.I32, (groups, rows // _PER_WORD)),
        )

    def rows(self, tensor: ModelTensor, encoding: AffineInt) -> int:
        """Eight rows share a word."""
        return _PER_WORD

    def store(self, tensor: ModelTensor, start: int, value: AffineIntRows) -> Iterator[ArrayRows]:
        from qconvert.quant.dequantize import zeros_of
        from qconvert.quant.simd.transpose import transposed

        base, column = checks.base_of(tensor), start // _PER_WORD
        yield ArrayRows(f"{base}.qweight", 0, pack_words(codes_of(value)), column)
        yield ArrayRows(f"{base}.scales", 0, transposed(value.scales_RG), start)
        yield ArrayRows(f"{base}.qzeros", 0, pack_words(zeros_of(value)), column)

    def load(self, tensor: ModelTensor, encoding: AffineInt, source: Source, rows: range) -> AffineIntRows:
        """Read rows back; CorruptCheckpoint for zeros that symmetric integers cannot have."""
        from qconvert.quant.simd.transpose import transposed

        base, groups = checks.base_of(tensor), encoding.groups(tensor.width)
        aligned = rows.start - rows.start % _PER_WORD
        columns = (aligned // _PER_WORD, -(-rows.stop // _PER_WORD))
        asked = slice(rows.start - aligned, rows.stop - aligned)
        codes_RI = _unpack(source.read(f"{base}.qweight", 0, tensor.width, columns=columns))[asked]
        zeros_RG = _unpack(source.read(f"{base}.qzeros", 0, groups, columns=columns))[asked]
        scales_GR = source.read(f"{base}.scales", 0, groups, columns=(rows.start, rows.stop))
        if encoding.symmetric and (zeros_RG != 8).any():
            raise CorruptCheckpoint(
                f"{base}.qzeros: holds a zero of {zeros_RG[zeros_RG != 8][0]}, but quantization_config says "
                "zero_point false, where all are 8",
                "set zero_point to true",
            )
        zeros = None if encoding.symmetric else zeros_RG
        return AffineIntRows(codes_RI, transposed(scales_GR), zeros, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        encoding = checks.only_encoding(quantized, NAME)
        assert isinstance(encoding, AffineInt)
        settings = {
            "quant_method": NAME,
            "bits": encoding.bits,
            "group_size": encoding.group_size or -1,
            "zero_point": not encoding.symmetric,
            "version": "gemm",
            "modules_to_not_convert": sorted(kept) or None,
        }
        # GPTQModel reads them from this key only.
        beside = left_plain(sorted(kept))
        settings |= {"dynamic": beside} if beside else {}
        return {"quantization_config": settings}


def pack_words(codes_RI: np.ndarray) -> np.ndarray:
    """Codes [rows, columns], rows a multiple of eight, as words int32 [columns, rows / 8]."""
    from qconvert.quant.nibbles import pack_nibbles
    from qconvert.quant.simd.transpose import transposed

    codes_IRp = transposed(codes_RI).reshape(codes_RI.shape[1], -1, _PER_WORD)
    return pack_nibbles(codes_IRp[..., list(_STORED)].reshape(len(codes_IRp), -1)).view("<i4")


def _unpack(words_IW: np.ndarray) -> np.ndarray:
    from qconvert.quant.nibbles import unpack_nibbles
    from qconvert.quant.simd.transpose import transposed

    codes_IWp = unpack_nibbles(words_IW.view("u1")).reshape(*words_IW.shape, _PER_WORD)
    return transposed(codes_IWp[..., list(_PLACE)].reshape(len(words_IW), -1))


def open_awq(source: Source, config: Json) -> tuple[AWQ, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names array and key where shapes and quantization_config disagree.
    """
    settings = checks.settings_of(config)
    _check_version(settings)
    bases = [name.removesuffix(".qweight") for name in source.specs if name.endswith(".qweight")]
    return checks.gathered(AWQ(), source, (_logical(base, source, settings) for base in bases), "qweight")


def _check_version(settings: Json) -> None:
    """Raise UnsupportedModel for another form of AWQ than the one that is read."""
    version, bits = str(settings.get("version") or "gemm").lower(), checks.claim(settings, "bits", int, _BITS)
    if version != "gemm" or bits != _BITS:
        raise UnsupportedModel(
            f"config.json: AWQ version {shown(version)!r} with bits {bits} is not read here",
            "save it again as version gemm with 4 bits, which is read",
        )


def _logical(base: str, source: Source, settings: Json) -> ModelTensor:
    qweight = checks.part(source, f"{base}.qweight", "it holds codes of AWQ", dims=(2,), dtypes=(DType.I32,))
    scales = checks.part(source, f"{base}.scales", f"{base}.qweight is there", dims=(2,))
    width = qweight.shape[0]
    size = checks.group_size(scales, width, [checks.claim(settings, "group_size", int, -1)])
    symmetric = checks.claim(settings, "zero_point", bool, default=True) is False
    encoding = AffineInt(_BITS, size, symmetric, scales.dtype)
    return ModelTensor(f"{base}.weight", (qweight.shape[-1] * _PER_WORD, width), encoding)


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = to_integers(tensor, encoding)
    if made.bits != _BITS:
        raise refused(tensor, f"has codes of {made.bits} bits, and awq stores 4")
    if tensor.rows % _PER_WORD:
        raise refused(tensor, f"of {tensor.rows} rows does not fill awq's words of {_PER_WORD} rows")
    check_column_order(tensor, made, NAME)
    return (*ops, Transcode("cast_scales", DType.F16))


def _promise(config: Json) -> Promise:
    """All linears of the layers that are not named as left plain; AutoAWQ never quantizes the head."""
    settings = checks.settings_of(config)
    _check_version(settings)
    symmetric = checks.claim(settings, "zero_point", bool, default=True) is False
    kept = checks.left_plain(settings.get("modules_to_not_convert"))

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> AffineInt | None:
        if kind != "linear" or kept(tensor):
            return None
        size = checks.said_group(tensor, checks.claim(settings, "group_size", int, -1))
        return AffineInt(_BITS, size, symmetric, DType.F16)

    return Promise(AWQ(), encoding)


LAYOUTS = (RegisteredLayout(TRAITS, AWQ, open_awq, _transcode, promise=_promise),)
