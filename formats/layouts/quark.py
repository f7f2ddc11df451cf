"""Stores the layout of AMD Quark: integers in AWQ's words, FP8, int8 and MXFP4.

A quantized `X.weight` [N, K] is `X.weight` with `X.weight_scale`; which of these it is, `weight` says in
`global_quant_config` and, for some modules, in `layer_quant_config`. `int4` and `uint4` per group: int32
[K, N/8], eight rows in a word (in AWQ's order where `pack_method` is reorder), scales [G, N] and
`X.weight_zero_point` int32 [G, N/8]; `fp8_e4m3` and `int8`: [N, K] with a scale [] or [N]; `fp4` with `e8m0`
scales of 32 columns: uint8 [N, K/2] and [N, K/32], the first code low. Static scales of inputs stand beside
them. Sources: amd-quark 0.13 (`torch/export`, `torch/utils/pack.py`), and folders written by it; vLLM
0.32 (`quantization/quark`), transformers 5.23 (`quantizers/quantizer_quark.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from qconvert.core.activations import NO_SCALES, ActivationScheme, ScalesBeside, StoredScale
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    PLAIN_HEAD,
    CodebookScheme,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    RoundingRules,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Layout, Source
from qconvert.core.values import AffineIntRows, CodebookRows, Value
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.awq import pack_words
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.quark_config import INPUT_SCALE, quantization_config
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode

if TYPE_CHECKING:
    import numpy as np

NAME = "quark"
_BITS, _PER_WORD, _MX_BLOCK = 4, 8, 32
_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each row in a word, where words are reordered
_INPUTS = (INPUT_SCALE, "input_zero_point", "output_scale", "output_zero_point")
_E4M3 = Codebook("e4m3", None, DType.BF16, DType.BF16)

TRAITS = LayoutTraits(
    NAME,
    integers=IntegerSchemes((_BITS,), rows_alone=(8,)),
    codebooks=(
        CodebookScheme("fp8-channel", _E4M3, scales_as_weights=True),
        CodebookScheme("fp8-tensor", replace(_E4M3, group_rows=None), scales_as_weights=True),
        CodebookScheme("mxfp4", Codebook("e2m1", _MX_BLOCK, DType.F8_E8M0, DType.BF16)),
    ),
    rounding=RoundingRules(rounds_scales=True, ceiling=False),
    packs="rows",
    symmetric_zeros=True,
    experts="apart",
    readers=("vllm", "sglang", "transformers"),
    loads="vLLM, and transformers with amd-quark, load",
    serve="vllm serve",
    limits=(
        LoaderLimit(
            ("sglang",),
            "error",
            "{loader} runs Quark's FP8, int8 and MXFP4, and this is {encoding}",
            "`qconvert convert --to compressed-tensors`",
            lambda e: isinstance(e, AffineInt) and e.bits == _BITS,
        ),
        with_packages("transformers", "amd-quark"),
        LoaderLimit(
            ("transformers",),
            "error",
            "{loader} does not load experts in {layout}: it stops, or leaves them with random numbers",
            "`qconvert convert --to compressed-tensors`, or serve with vLLM",
            about="experts",
        ),
        PLAIN_HEAD,
    ),
)


@dataclass(frozen=True, slots=True)
class Quark(PassThrough[AffineInt | Codebook, Value]):
    """Stores weights as Quark's arrays; `reorder` says in which order rows share a word, `stored` as what
    shape and type the scales of each weight that is there are stored.
    """

    reorder: bool = True
    stored: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def traits(self) -> LayoutTraits:
        return TRAITS

    @property
    def rewritten(self) -> Layout:
        """All weights as amd-quark 0.13 writes them, whatever wrote these."""
        return Quark()

    def arrays(self, tensor: ModelTensor, encoding: AffineInt | Codebook) -> tuple[TensorSpec, ...]:
        (rows, width), name = checks.matrix_shape(tensor, NAME), tensor.name
        scale = self.stored.get(name) or _scale(tensor, encoding)
        if isinstance(encoding, AffineInt) and encoding.bits == _BITS:
            groups = encoding.groups(width)
            return (
                TensorSpec(name, DType.I32, (width, rows // _PER_WORD)),
                TensorSpec(scale.name, encoding.scale_dtype, (groups, rows)),
                TensorSpec(f"{name}_zero_point", DType.I32, (groups, rows // _PER_WORD)),
            )
        if isinstance(encoding, AffineInt):
            codes = TensorSpec(name, DType.I8, tensor.shape)
            return (codes, scale) if name in self.stored else (codes, scale, _zeros_of(name, scale))
        if encoding.is_mxfp4:
            blocks = TensorSpec(scale.name, DType.U8, (rows, width // _MX_BLOCK))
            return TensorSpec(name, DType.U8, (rows, width // 2)), blocks
        return TensorSpec(name, DType.F8_E4M3, tensor.shape), scale

    def rows(self, tensor: ModelTensor, encoding: AffineInt | Codebook) -> int:
        """Eight rows share a word of int4."""
        return _PER_WORD if isinstance(encoding, AffineInt) and encoding.bits == _BITS else 1

    def store(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        codes, scales, *zeros = self.stored_arrays(tensor)
        if isinstance(value, AffineIntRows) and value.encoding.bits == _BITS:
            yield from _store_words(codes.name, start, value)
        elif isinstance(value, AffineIntRows):
            import numpy as np

            from qconvert.quant.packed_codes import codes_of

            yield ArrayRows(codes.name, start, (codes_of(value) ^ 0x80).view("i1"))
            yield ArrayRows(scales.name, start, value.scales_RG)
            for spec in zeros:
                yield ArrayRows(spec.name, start, np.zeros((value.rows, 1), np.int8))
        else:
            assert isinstance(value, CodebookRows)
            yield from _store_floats(codes.name, scales.name, start, value)

    def load(self, tensor: ModelTensor, encoding: AffineInt | Codebook, source: Source, rows: range) -> Value:
        if isinstance(encoding, AffineInt) and encoding.bits == _BITS:
            return self._words(tensor, encoding, source, rows)
        codes = source.read(tensor.name, rows.start, rows.stop)
        scales_RG = self._scales(tensor, encoding, source, rows)
        if isinstance(encoding, AffineInt):
            return AffineIntRows(codes.view("u1") ^ 0x80, scales_RG, None, encoding)
        if encoding.bits == _BITS:
            from qconvert.quant.nibbles import unpack_nibbles

            codes = unpack_nibbles(codes)
        return CodebookRows(codes, scales_RG, encoding)

    def _scales(
        self, tensor: ModelTensor, encoding: AffineInt | Codebook, source: Source, rows: range
    ) -> np.ndarray:
        """A row of scales for each row of the weight; one number may stand for all of them."""
        import numpy as np

        spec = self.stored[tensor.name]
        if spec.count == 1:
            return np.repeat(source.read(spec.name, 0, 1).reshape(1, 1), len(rows), axis=0)
        return source.read(spec.name, rows.start, rows.stop).reshape(len(rows), -1)

    def _words(self, tensor: ModelTensor, encoding: AffineInt, source: Source, rows: range) -> AffineIntRows:
        from qconvert.quant.simd.transpose import transposed

        aligned = rows.start - rows.start % _PER_WORD
        columns = (aligned // _PER_WORD, -(-rows.stop // _PER_WORD))
        asked = slice(rows.start - aligned, rows.stop - aligned)
        specs = self.arrays(tensor, encoding)
        words, zeros = (
            source.read(spec.name, 0, spec.shape[0], columns=columns) for spec in (specs[0], specs[2])
        )
        scales_GR = source.read(specs[1].name, 0, specs[1].shape[0], columns=(rows.start, rows.stop))
        codes_RI, zeros_RG = (self._unpacked(each)[asked] for each in (words, zeros))
        if encoding.symmetric:
            if zeros_RG.any():
                raise UnsupportedModel(
                    f"{specs[2].name}: signed codes with zero points other than 0 are not read here",
                    "quantize it again as uint4, which is read",
                )
            return AffineIntRows(codes_RI ^ 8, transposed(scales_GR), None, encoding)
        return AffineIntRows(codes_RI, transposed(scales_GR), zeros_RG, encoding)

    def _unpacked(self, words_IW: np.ndarray) -> np.ndarray:
        """The codes of words [columns, rows / 8], as they are stored: uint8 [rows, columns]."""
        from qconvert.quant.nibbles import unpack_nibbles
        from qconvert.quant.simd.transpose import transposed

        codes_IWp = unpack_nibbles(words_IW.view("u1")).reshape(*words_IW.shape, _PER_WORD)
        if self.reorder:
            codes_IWp = codes_IWp[..., list(_PLACE)]
        return transposed(codes_IWp.reshape(len(words_IW), -1))

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return self.settings_beside(quantized, kept, NO_SCALES)

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        return {"quantization_config": quantization_config(quantized, kept, scales.inputs)}

    def scale_stored_as(self, name: str) -> StoredScale | None:
        """The static scale of a linear's inputs."""
        module, _, kind = name.rpartition(".")
        return StoredScale("inputs", module) if kind == INPUT_SCALE else None

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        """A number beside FP8 weights.

        None beside int8, whose loader wants a zero point of inputs with it: they are scaled as they come.
        """
        if scale.of != "inputs" or not isinstance(weight, Codebook) or weight.bits != 8:
            return None
        return TensorSpec(f"{scale.module}.{INPUT_SCALE}", DType.F32, ())


def _scale(tensor: ModelTensor, encoding: AffineInt | Codebook) -> TensorSpec:
    """The array of scales of a weight with a byte for each code: one number, or one for each row."""
    whole = isinstance(encoding, Codebook) and encoding.group_rows is None
    return TensorSpec(f"{tensor.name}_scale", encoding.scale_dtype, () if whole else (tensor.rows,))


def _zeros_of(name: str, scale: TensorSpec) -> TensorSpec:
    """The zero points of signed codes of 8 bits, all 0."""
    return TensorSpec(f"{name}_zero_point", DType.I8, scale.shape)


def _store_words(name: str, start: int, value: AffineIntRows) -> Iterator[ArrayRows]:
    """Integers of 4 bits, eight rows in a word; signed ones with zero points of 0."""
    from qconvert.quant.dequantize import zeros_of
    from qconvert.quant.packed_codes import codes_of
    from qconvert.quant.simd.transpose import transposed

    turned = 8 if value.encoding.symmetric else 0
    column = start // _PER_WORD
    yield ArrayRows(name, 0, pack_words(codes_of(value) ^ turned), column)
    yield ArrayRows(f"{name}_scale", 0, transposed(value.scales_RG), start)
    yield ArrayRows(f"{name}_zero_point", 0, pack_words(zeros_of(value) ^ turned), column)


def _store_floats(codes: str, scales: str, start: int, value: CodebookRows) -> Iterator[ArrayRows]:
    from qconvert.quant.nibbles import pack_nibbles

    four = value.encoding.bits == _BITS
    yield ArrayRows(codes, start, pack_nibbles(value.codes_RI) if four else value.codes_RI)
    if value.encoding.group_rows is not None:
        yield ArrayRows(scales, start, value.scales_RG)
    elif start == 0:
        yield ArrayRows(scales, 0, value.scales_RG[:1])


def open_quark(source: Source, config: Json) -> tuple[Quark, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    UnsupportedModel names a module whose form is not read.
    """
    settings = checks.settings_of(config)
    export = settings.get("export")
    packed = export.get("pack_method") if isinstance(export, dict) else None
    bases = [name.removesuffix(".weight_scale") for name in source.specs if name.endswith(".weight_scale")]
    decoded = checks.dtype_of(config)
    quantized = [_logical(base, source, settings, decoded) for base in bases]
    stored = {tensor.name: source.specs[f"{tensor.name}_scale"] for tensor in quantized}
    beside = [f"{base}.{each}" for base in bases for each in _INPUTS]
    bytes_ = (t.name for t in quantized if isinstance(t.encoding, AffineInt) and t.encoding.bits == 8)
    beside += [f"{name}_zero_point" for name in bytes_]  # checked to be 0
    layout = Quark(packed in (None, "reorder"), stored)
    return checks.gathered(
        layout, source, quantized, "weight_scale", beside=[each for each in beside if each in source.specs]
    )


def _form(settings: Json, module: str, part: str) -> Json:
    """What the settings say of a module's "weight" or "input_tensors"; {} where they say nothing."""
    layers = settings.get("layer_quant_config")
    patterns = layers if isinstance(layers, dict) else {}
    # Names with * for anything; other signs of a pattern are taken as they are.
    own = (form for name, form in patterns.items() if fnmatchcase(module, name.replace("[", "[[]")))
    form = next(own, None) or settings.get("global_quant_config")
    found = form.get(part) if isinstance(form, dict) else None
    if isinstance(found, list):
        raise UnsupportedModel(
            f"{module}: Quark's scales of two levels are not read here", "int4, FP8, int8 and MXFP4 are read"
        )
    return found if isinstance(found, dict) else {}


def _logical(base: str, source: Source, settings: Json, decoded: DType) -> ModelTensor:
    name, why = f"{base}.weight", f"{base}.weight_scale is there"
    form = _form(settings, base, "weight")
    kind, scheme, size = form.get("dtype"), form.get("qscheme"), form.get("group_size")
    scale, weight = source.specs[f"{name}_scale"], checks.require(source, name, why)
    if kind in ("int4", "uint4") and scheme == "per_group":
        checks.part(source, name, why, dims=(2,), dtypes=(DType.I32,))
        checks.part(source, scale.name, why, dims=(2,))
        rows, width = weight.shape[1] * _PER_WORD, weight.shape[0]
        groups = checks.group_size(scale, width, [size])
        encoding: Quantized = AffineInt(_BITS, groups, kind == "int4", scale.dtype)
    elif kind == "fp4" and scheme == "per_group" and (size, form.get("scale_format")) == (_MX_BLOCK, "e8m0"):
        checks.part(source, name, why, dims=(2,), dtypes=(DType.U8,))
        rows, width = weight.shape[0], weight.shape[1] * 2
        encoding = Codebook("e2m1", _MX_BLOCK, DType.F8_E8M0, decoded)
    elif kind in ("fp8_e4m3", "int8") and scheme in ("per_tensor", "per_channel"):
        dtypes = (DType.F8_E4M3 if kind == "fp8_e4m3" else DType.I8,)
        checks.part(source, name, why, dims=(2,), dtypes=dtypes)
        checks.part(source, scale.name, why, dims=(0, 1, 2))
        rows, width = weight.shape
        if scale.count not in (1, rows):
            raise checks.contradiction(scale.name, f"{list(scale.shape)} scales", "qscheme", scheme)
        zeros = f"{name}_zero_point"
        if zeros in source.specs and source.has_weights:
            _check_middle(zeros, source)
        per_row: int | None = None if scale.count == 1 and rows != 1 else 1
        encoding = AffineInt(8, None, True, scale.dtype)
        if kind == "fp8_e4m3":
            encoding = Codebook("e4m3", None, scale.dtype, decoded, per_row)
    else:
        raise UnsupportedModel(
            f"{name}: Quark's {shown(kind)} {shown(scheme)} in groups of {shown(size)} is not read here",
            "read: int4 and uint4 per group, fp8_e4m3 and int8 per tensor or channel, fp4 with e8m0 scales",
        )
    return ModelTensor(name, (rows, width), encoding)


def _check_middle(name: str, source: Source) -> None:
    """Raise for zero points of int8 weights other than 0."""
    spec = source.specs[name]
    if source.read(name, 0, spec.shape[0] if spec.shape else 1).any():
        raise UnsupportedModel(
            f"{name}: int8 weights with zero points other than 0 are not read here", "symmetric ones are read"
        )


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """FP8, int8 or MXFP4, as `input_tensors` say; UnsupportedModel for other ones."""
    form = _form(checks.settings_of(config), checks.base_of(tensor), "input_tensors")
    if not form:
        return None
    kind, scheme, dynamic = form.get("dtype"), form.get("qscheme"), form.get("is_dynamic") is True
    if kind == "fp4" and scheme == "per_group" and form.get("scale_format") == "e8m0" and dynamic:
        return ActivationScheme(_BITS, True, "group", _MX_BLOCK, scale_dtype=DType.F8_E8M0)
    symmetric = form.get("symmetric") is not False
    if kind in ("fp8_e4m3", "int8") and scheme == "per_channel" and dynamic and symmetric:
        return ActivationScheme(8, kind == "fp8_e4m3", "token")
    if kind in ("fp8_e4m3", "int8") and scheme == "per_tensor" and symmetric:
        stored = () if dynamic else ("input_scale",)
        return ActivationScheme(8, kind == "fp8_e4m3", "tensor", dynamic=dynamic, stored=stored)
    raise UnsupportedModel(
        f"config.json: Quark's input_tensors {shown(kind)} {shown(scheme)} are not read here",
        "FP8 and int8 per tensor or token, and MXFP4, are read",
    )


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.is_mxfp4:
        return ()
    if isinstance(encoding, Codebook) and encoding.table == "e4m3" and encoding.group_size is None:
        return ()
    ops, made = to_integers(tensor, encoding)
    check_column_order(tensor, made, NAME)
    if made.bits == 8 and made.symmetric and made.group_size is None:
        return ops
    if made.bits != _BITS or tensor.rows % _PER_WORD:
        raise refused(
            tensor,
            f"of {tensor.rows} rows is not one of Quark's that are written here (int4 in eight rows at a "
            "time, FP8 with a scale for each row or tensor, int8 for each row, MXFP4)",
        )
    whole = (Transcode("split_groups", tensor.width),) if made.group_size is None else ()
    cast = (Transcode("cast_scales", made.scale_dtype),) if made.signless_zero else ()
    return (*ops, *cast, *whole)


LAYOUTS = (RegisteredLayout(TRAITS, Quark, open_quark, _transcode, _activations),)
