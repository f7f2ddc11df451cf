"""Stores the arrays of NVIDIA's ModelOpt: FP8 and NVFP4 weights, their scales, and a scale of their inputs.

An FP8 `X.weight` [N, K] is F8_E4M3 under the same name; `X.weight_scale` f32 is one number [], one for each
row [N], or, named FP8_PB_WO, one for each block of 128 by 128: [N/128, 1, K/128, 1]. An MXFP8 one has
exponents, u8 [N, K/32]. An NVFP4 weight is `X.weight` u8 [N, K/2] (two codes to a byte, the first one low),
`X.weight_scale` F8_E4M3 [N, K/16] and `X.weight_scale_2` f32 [], with which scales are multiplied. int4 (AWQ)
is `X.weight` u8 [N/2, K], two rows to a byte, and `X.weight_scale` f32 [N, K/group]. `X.input_scale` f32 []
is the scale of a linear's inputs. Sources: ModelOpt 0.47 (`export/quant_utils.py`, `qtensor/`), checkpoints
that it writes, vLLM's `quantization/modelopt.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.core.activations import NO_SCALES, ScalesBeside, StoredScale
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import CodebookScheme, LayoutTraits, LoaderLimit
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows, CodebookRows, DenseRows, Value
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.modelopt.config import NAME, SETTINGS_FILE, quantization_config
from qconvert.formats.layouts.scales_beside import cache_scale
from qconvert.quant.packed_codes import codes_of

if TYPE_CHECKING:
    import numpy as np

BLOCK = 128
INPUT_SCALE, PRE_QUANT_SCALE = "input_scale", "pre_quant_scale"
_CODED = CodedArrays("weight", "weight_scale", number="weight_scale_2")
_E4M3 = Codebook("e4m3", None, DType.F32, DType.BF16)
_NVFP4 = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="multiplied")


def _is_static(encoding: Quantized) -> bool:
    return isinstance(encoding, Codebook) and encoding.table == "e4m3" and encoding.group_rows is None


TRAITS = LayoutTraits(
    NAME,
    codebooks=(
        CodebookScheme("fp8-channel", _E4M3),
        CodebookScheme("fp8-block", replace(_E4M3, group_size=BLOCK, group_rows=BLOCK)),
        CodebookScheme("nvfp4", _NVFP4),
    ),
    default_codebook=True,
    experts="apart",
    settings_file=SETTINGS_FILE,
    settings_keys=("quantization", "quant_algo"),
    readers=("vllm", "sglang"),
    loads="vLLM and TensorRT-LLM load",
    serve="vllm serve",
    limits=(
        LoaderLimit(
            ("sglang",),
            "error",
            "SGLang runs {layout} with a stored scale of inputs, and this is {encoding}",
            "`qconvert convert --to compressed-tensors`",
            lambda e: not _is_static(e) and not (isinstance(e, Codebook) and e.is_nvfp4),
        ),
        LoaderLimit(
            ("vllm",),
            "error",
            "{loader} runs FP8, MXFP8 and NVFP4 of {layout}, and this is {encoding}",
            "`qconvert convert --to compressed-tensors`",
            lambda e: not isinstance(e, Codebook) or e.is_mxfp4,
        ),
        LoaderLimit(
            ("sglang",),
            "error",
            "{loader} keeps the head plain in {layout}, and this one is {encoding}",
            "--keep lm_head, or convert --to compressed-tensors",
            about="head",
        ),
    ),
    schemes="fp8 per row or in blocks of 128 by 128, nvfp4",
)


class ModelOpt(PassThrough[AffineInt | Codebook, AffineIntRows | CodebookRows]):
    """Stores weights as ModelOpt's arrays.

    `one` is the shape of a single number. `scaled` are weights, by their names, whose columns are multiplied
    with a vector as they are read (AWQ's `pre_quant_scale`): plain numbers, of these codes.
    """

    traits = TRAITS

    def __init__(self, one: tuple[int, ...] = (), scaled: Mapping[str, ModelTensor] | None = None) -> None:
        self.one = one
        self.scaled = scaled or {}

    @property
    def computed(self) -> Mapping[str, str]:
        """Those whose columns are scaled as they are read."""
        return {name: tensor.encoding.label for name, tensor in self.scaled.items()}

    def arrays(self, tensor: ModelTensor, encoding: AffineInt | Codebook) -> tuple[TensorSpec, ...]:
        rows, width = checks.matrix_shape(tensor, NAME)
        base = checks.base_of(tensor)
        if isinstance(encoding, AffineInt):
            if rows % 2:
                raise BadRecipe(
                    f"{tensor.name}: {rows} rows do not fill bytes of two", "keep this weight plain"
                )
            return (
                TensorSpec(f"{base}.weight", DType.U8, (rows // 2, width)),
                TensorSpec(f"{base}.weight_scale", encoding.scale_dtype, (rows, encoding.groups(width))),
            )
        codes, scales, *number = _CODED.stored_arrays(tensor)
        if encoding.group_rows is None:
            scales = replace(scales, shape=self.one)
        elif encoding.group_size is None:
            scales = replace(scales, shape=(rows,))
        elif encoding.group_rows > 1:
            scales = replace(scales, shape=(scales.shape[0], 1, scales.shape[1], 1))
        return (codes, scales, *(replace(spec, shape=self.one) for spec in number))

    def rows(self, tensor: ModelTensor, encoding: AffineInt | Codebook) -> int:
        """Two rows of integers share bytes, and rows of a block their scales."""
        return 2 if isinstance(encoding, AffineInt) else _CODED.row_alignment(tensor)

    def store(
        self, tensor: ModelTensor, start: int, value: AffineIntRows | CodebookRows
    ) -> Iterator[ArrayRows]:
        base = checks.base_of(tensor)
        if isinstance(value, AffineIntRows):
            signed_RI = codes_of(value) ^ 8
            yield ArrayRows(f"{base}.weight", start // 2, signed_RI[::2] | signed_RI[1::2] << 4)
            yield ArrayRows(f"{base}.weight_scale", start, value.scales_RG)
            return
        across = value.encoding.groups(tensor.width)
        for rows in _CODED.encode(tensor, start, value):
            by_block = rows.name == f"{base}.weight_scale" and (value.encoding.group_rows or 1) > 1
            yield (
                rows._replace(start=rows.start * across, rows=rows.rows.reshape(-1, 1)) if by_block else rows
            )

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back; those of `scaled` weights as the numbers that they stand for."""
        coded = self.scaled.get(tensor.name)
        if coded is None:
            return super().decode(tensor, source, start, stop)
        from qconvert.quant.casts import cast
        from qconvert.quant.dequantize import numbers

        plain = numbers(super().decode(coded, source, start, stop), DType.F32)
        name = f"{checks.base_of(tensor)}.{PRE_QUANT_SCALE}"
        spec = source.specs[name]
        factors = DenseRows(source.read(name, 0, spec.count), spec.dtype)
        return DenseRows(plain.rows_RI * cast(factors, DType.F32)[0].rows_RI[:, 0], DType.F32)

    def load(
        self, tensor: ModelTensor, encoding: AffineInt | Codebook, source: Source, rows: range
    ) -> AffineIntRows | CodebookRows:
        base = checks.base_of(tensor)
        if isinstance(encoding, AffineInt):
            bytes_BI = source.read(f"{base}.weight", rows.start // 2, -(-rows.stop // 2))
            codes_RI = _two_rows(bytes_BI)[rows.start % 2 :][: len(rows)] ^ 8
            scales_RG = source.read(f"{base}.weight_scale", rows.start, rows.stop)
            return AffineIntRows(codes_RI, scales_RG, None, encoding)
        if encoding.group_size is None or (encoding.group_rows or 1) == 1:
            return _CODED.decode(tensor, source, rows.start, rows.stop)
        return self._blocks(tensor, encoding, source, rows)

    def _blocks(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        import numpy as np

        base, per = checks.base_of(tensor), encoding.group_rows or 1
        across, first = encoding.groups(tensor.width), rows.start // per
        last = -(-rows.stop // per)
        read = source.read(f"{base}.weight_scale", first * across, last * across).reshape(-1, across)
        codes_RI = source.read(f"{base}.weight", rows.start, rows.stop)
        return CodebookRows(codes_RI, read[np.arange(rows.start, rows.stop) // per - first], encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return self.settings_beside(quantized, kept, NO_SCALES)

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        return {"quantization_config": quantization_config(quantized, kept, scales)}

    def scale_stored_as(self, name: str) -> StoredScale | None:
        """A linear's `input_scale`, and the scales of an attention's cache."""
        module, _, kind = name.rpartition(".")
        return StoredScale("inputs", module) if kind == INPUT_SCALE else cache_scale(name)

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        """Beside FP8 weights with one scale, and NVFP4 ones; those of a cache beside any."""
        if scale.of != "inputs":
            which = scale.of[0]
            return TensorSpec(f"{scale.module}.{which}_proj.{which}_scale", DType.F32, ())
        if not isinstance(weight, Codebook) or not (_is_static(weight) or weight.is_nvfp4):
            return None
        return TensorSpec(f"{scale.module}.{INPUT_SCALE}", DType.F32, ())

    def without_input_scale(self, weight: Quantized) -> Quantized | None:
        """FP8 with the scale of the tensor in every row: loaders then scale inputs as they come."""
        return replace(weight, group_rows=1) if isinstance(weight, Codebook) and _is_static(weight) else None


def _two_rows(bytes_BI: np.ndarray) -> np.ndarray:
    """Rows of nibbles: of each row of bytes the low ones, then the high ones."""
    import numpy as np

    pair = np.stack([bytes_BI & 15, bytes_BI >> 4], axis=1)
    return np.asarray(pair.reshape(-1, bytes_BI.shape[1]))
