"""Finds the logical tensors of a ModelOpt checkpoint, by what its arrays are.

A part that is missing or a shape that fits no encoding is an error that names it.
"""

from __future__ import annotations

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import Source
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.modelopt.arrays import INPUT_SCALE, PRE_QUANT_SCALE, ModelOpt
from qconvert.formats.layouts.modelopt.config import NAME, STATIC, algorithm

_DEQUANTIZED = "start from the 16-bit model"


def open_modelopt(source: Source, config: Json) -> tuple[ModelOpt, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the 16-bit model.

    Weights whose inputs are scaled first (AWQ's `pre_quant_scale`) are plain numbers of float32: the product.
    Raises CorruptCheckpoint where arrays contradict one another, or a scale of inputs is missing that the
    settings promise.
    """
    settings = checks.settings_of(config)
    codes = [_logical(name, source) for name in source.specs if _is_coded(name, source)]
    for tensor in codes:
        _check_inputs(tensor, source, settings)
    scaled = {t.name: t for t in codes if f"{checks.base_of(t)}.{PRE_QUANT_SCALE}" in source.specs}
    layout = ModelOpt(_one(source), scaled)
    beside = [name for name in source.specs if layout.scale_stored_as(name) is not None]
    for tensor in scaled.values():
        checks.check_parts(layout, tensor, source)
        beside += [spec.name for spec in layout.stored_arrays(tensor)]
        beside.append(_check_columns(tensor, source).name)
    kept = [tensor for tensor in codes if tensor.name not in scaled]
    if not kept and scaled:
        found = checks.plain_rest(source, set(beside), {})
    else:
        _, found = checks.gathered(layout, source, kept, "weight_scale", NAME, beside)
    plain = Unquantized(DType.F32)
    found |= {name: ModelTensor(name, tensor.shape, plain) for name, tensor in scaled.items()}
    return layout, {name: found[name] for name in sorted(found)}


def _is_coded(name: str, source: Source) -> bool:
    dtype = source.specs[name].dtype
    return dtype in (DType.F8_E4M3, DType.U8) and name.endswith(".weight")


def _one(source: Source) -> tuple[int, ...]:
    """The shape in which this checkpoint stores single numbers."""
    ends = (".weight_scale", ".weight_scale_2")
    return next(
        (
            spec.shape
            for name, spec in source.specs.items()
            if name.endswith(ends) and spec.shape in ((), (1,))
        ),
        (),
    )


def _logical(name: str, source: Source) -> ModelTensor:
    weight = source.specs[name]
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise UnsupportedModel(
            f"{name}: {weight.dtype.label} {list(weight.shape)} is not read here",
            "export it again with the linears of each expert apart",
        )
    scales = checks.require(source, f"{name}_scale", f"{name} is {weight.dtype.label}")
    found = _fp8(weight, scales) if weight.dtype is DType.F8_E4M3 else _four_bits(weight, scales, source)
    if found is None:
        raise CorruptCheckpoint(
            f"{scales.name}: {scales.dtype.label} {list(scales.shape)} fits no {weight.dtype.label} weight "
            f"of {list(weight.shape)}",
            checks.APART,
        )
    encoding, shape = found
    return ModelTensor(name, shape, encoding)


def _fp8(weight: TensorSpec, scales: TensorSpec) -> tuple[Quantized, tuple[int, ...]] | None:
    rows, width = weight.shape
    encoding: Codebook | None = None
    if scales.dtype is DType.U8 and scales.shape == (rows, -(-width // 32)):
        encoding = Codebook("e4m3", 32, DType.F8_E8M0, DType.BF16)
    elif not scales.dtype.is_float:
        return None
    elif scales.shape in ((), (1,)):
        encoding = Codebook("e4m3", None, scales.dtype, DType.BF16, group_rows=None)
    elif scales.shape == (rows,):
        encoding = Codebook("e4m3", None, scales.dtype, DType.BF16)
    elif len(scales.shape) == 4 and scales.shape[1] == scales.shape[3] == 1:
        side = next((n for n in (128, 64, 32) if scales.shape[0] == -(-rows // n)), 0)
        if side and scales.shape[2] == -(-width // side):
            encoding = Codebook("e4m3", side, scales.dtype, DType.BF16, group_rows=side)
    return None if encoding is None else (encoding, weight.shape)


def _four_bits(
    weight: TensorSpec, scales: TensorSpec, source: Source
) -> tuple[Quantized, tuple[int, ...]] | None:
    rows, half = weight.shape
    shape = (rows, 2 * half)
    if scales.dtype is DType.U8 and scales.shape == (rows, half // 16):
        return Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16), shape
    if scales.dtype is DType.F8_E4M3 and scales.shape == (rows, half // 8):
        checks.require(source, f"{scales.name}_2", f"{weight.name} is NVFP4")
        return Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="multiplied"), shape
    if not scales.dtype.is_float or len(scales.shape) != 2 or scales.shape[0] != 2 * rows:
        return None
    groups = scales.shape[1]
    if not groups or half % groups:
        return None
    size = None if groups == 1 else half // groups
    return AffineInt(4, size, True, scales.dtype), (2 * rows, half)


def _check_inputs(tensor: ModelTensor, source: Source, settings: Json) -> None:
    """Raise for what would change a product and is not read, or is not there."""
    base, encoding = checks.base_of(tensor), tensor.encoding
    other = next((n for n in ("svdquant_lora_a", "weight_zero_point") if f"{base}.{n}" in source.specs), None)
    if other:
        raise UnsupportedModel(f"{base}.{other}: is not read here", _DEQUANTIZED)
    named = algorithm(settings, base)
    coded = isinstance(encoding, Codebook) and (encoding.is_nvfp4 or encoding.group_rows is None)
    if named in STATIC and coded:
        why = f"quant_algo is {shown(named)}"
        if checks.require(source, f"{base}.{INPUT_SCALE}", why).count != 1:
            raise CorruptCheckpoint(f"{base}.{INPUT_SCALE}: not one number, but {why}", checks.APART)


def _check_columns(tensor: ModelTensor, source: Source) -> TensorSpec:
    name = f"{checks.base_of(tensor)}.{PRE_QUANT_SCALE}"
    spec = checks.part(source, name, "it scales inputs", dims=(1,))
    if spec.count != tensor.width:
        raise CorruptCheckpoint(f"{name}: {spec.count} numbers for {tensor.width} columns", checks.APART)
    return spec
