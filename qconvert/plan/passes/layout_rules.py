"""Which operations bring a weight into a layout with its codes kept, or why nothing does.

The rules of 14 pairs of grids are rules of 8 layouts: each says what it can hold, and the way there
from any grid is made of the few steps of `ops.transcode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qconvert.core.dtypes import DType
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Codebook,
    Encoding,
    GgmlBlocks,
    ModelTensor,
    Quantized,
    Unquantized,
)
from qconvert.core.ggml_types import GRIDS
from qconvert.core.schemes import Scheme, fitting
from qconvert.errors import BadRecipe
from qconvert.ops import Cast, Dequantize, EncodeTable, NestScales, Op, Quantize, Transcode
from qconvert.plan.plan import Plan, Unit

_MLX_GROUPS = (128, 64, 32)


# The tables of numbers that a layout can hold, by the names that users give them. Where a layout holds no
# integers that are new, its first one is what weights get when nothing is asked for.
TABLES: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors": ("fp8-channel", "fp8-tensor", "fp8-block", "mxfp4", "nvfp4"),
    "mlx": ("mxfp4", "nvfp4"),
    "bitsandbytes": ("nf4", "fp4", "nf4-nested", "fp4-nested", "int8"),
    "fp8": ("fp8-block",),
    "mxfp4": ("mxfp4",),
}
# Layouts that say of every column which group it is in.
ACT_ORDER_HELD = ("gptq", "gptq_v2")
ONLY_TABLES = ("bitsandbytes", "fp8", "mxfp4")
_NESTED = "-nested"


@dataclass(frozen=True, slots=True)
class Target:
    """A layout to convert to. `scheme` or `table` (see `TABLES`) is what weights get that cannot keep
    their codes, or have none; only with `allow_requantize` is a weight quantized that already was.
    `undo_act_order` folds columns in activation order into the weights before them (see
    `plan.passes.activation_order`).
    `asymmetric` says that what is quantized again gets zeros, as weights beside it have them.
    """

    layout: str
    scheme: Scheme | None = None
    table: str = ""
    allow_requantize: bool = False
    search: bool = True
    undo_act_order: bool = False
    asymmetric: bool = False

    @property
    def new_table(self) -> str:
        """The table that new weights are coded in, "" for integers."""
        if self.table or self.scheme or self.layout not in ONLY_TABLES:
            return self.table
        return TABLES[self.layout][0]

    @property
    def scale_dtype(self) -> DType | None:
        """The type that the layout wants its scales in; None where any will do."""
        return DType.F16 if self.layout in ("gptq", "gptq_v2", "awq") else None

    @property
    def has_tensor_scale(self) -> bool:
        """Whether NVFP4 weights have one number for the whole tensor that divides their scales."""
        return self.layout != "mlx"

    def codebook(self, dtype: DType) -> Codebook:
        """The form of new weights in the table, of numbers of this type; nested scales come later."""
        table = self.new_table.removesuffix(_NESTED)
        if self.layout == "bitsandbytes":
            return Codebook(table, None if table == "int8" else 64, DType.F32, dtype)
        # MLX has no scale for a whole tensor, by which NVFP4's others are divided elsewhere.
        second = None if self.layout == "mlx" else "divided"
        scales = DType.F32 if self.layout == "fp8" or dtype is DType.F64 else dtype
        return {
            "fp8-channel": Codebook("e4m3", None, scales, dtype),
            "fp8-tensor": Codebook("e4m3", None, scales, dtype, group_rows=None),
            "fp8-block": Codebook("e4m3", 128, scales, dtype, group_rows=128),
            "mxfp4": Codebook("e2m1", 32, DType.F8_E8M0, dtype),
            "nvfp4": Codebook("e2m1", 16, DType.F8_E4M3, dtype, second=second),
        }[table]


def find_table(layout: str, scheme: str) -> str:
    """The table of this name that a layout holds, "" if the name is none of any layout's.

    Raises BadRecipe for a table that this layout does not hold.
    """
    holders = holders_of(scheme)
    if scheme == "fp8" and layout in holders:
        return TABLES[layout][0]
    if scheme in TABLES.get(layout, ()):
        return scheme
    if holders:
        raise BadRecipe(
            f"scheme {scheme!r}: {layout} does not hold it", f"it is for --to {', '.join(holders)}"
        )
    return ""


def holders_of(scheme: str) -> tuple[str, ...]:
    """The layouts that hold the table of this name; none for other schemes, as which int8 counts."""
    if scheme == "fp8":
        return ("compressed-tensors", "fp8")
    return tuple(name for name, tables in TABLES.items() if scheme in tables and scheme != "int8")


def encode(target: Target, linears: frozenset[str], kin: Mapping[str, str]) -> Callable[[Plan], Plan]:
    """Encode the plain weights of these names in the table of the target layout.

    `kin` names what a weight is stacked into by loaders, which then want one global scale.
    """

    def one(unit: Unit) -> Unit:
        encoding = unit.output.encoding
        if unit.output.name not in linears or not isinstance(encoding, Unquantized):
            return unit
        for op in _encoding(target, unit.output, encoding.dtype, kin.get(unit.output.name, "")):
            unit = unit.then(op)
        return unit

    return lambda plan: replace(plan, units=tuple(one(unit) for unit in plan.units))


def _encoding(target: Target, tensor: ModelTensor, dtype: DType, kin: str = "") -> tuple[Op, ...]:
    """The way from plain numbers of this type to the table of the target."""
    encoding = target.codebook(dtype)
    size, width = encoding.group_size, tensor.width
    if encoding.bits == 4 and size and width % size:
        raise BadRecipe(
            f"{tensor.name}: rows of {width} columns are no whole blocks of {size}",
            "another layout holds this model, for example compressed-tensors",
        )
    # bitsandbytes rounds weights to half precision before it makes them int8 (`Int8Params`).
    first = (Cast(DType.F16),) if encoding.table == "int8" else ()
    made = (*first, EncodeTable(encoding, target.layout, kin if encoding.second == "divided" else ""))
    return (*made, *_nesting(target, tensor, encoding))


def _nesting(target: Target, tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    four_bits = isinstance(encoding, Codebook) and encoding.bits == 4 and encoding.group_size == 64
    return (NestScales(tensor.width),) if target.table.endswith(_NESTED) and four_bits else ()


def regrid(target: Target, plain: frozenset[str]) -> Callable[[Plan], Plan]:
    """Bring every quantized output into what the target layout holds.

    `plain` are the tensors that it holds as numbers alone. Raises BadRecipe naming the weight and the
    reason where codes cannot be kept.
    """

    def one(unit: Unit, target: Target) -> Unit:
        encoding = unit.output.encoding
        if isinstance(encoding, GgmlBlocks):
            unit = _from_blocks(target, unit, encoding, plain)
            encoding = unit.output.encoding
        if isinstance(encoding, Unquantized) or not isinstance(encoding, Quantized):
            return unit
        if unit.output.name in plain:
            if unit.quantizes:
                raise BadRecipe(
                    f"{unit.output.name}: {target.layout} holds no quantized embedding",
                    "drop the rule that names it, or write compressed-tensors or mlx",
                )
            return unit.then(Dequantize(encoding.decoded))
        for op in steps(target, unit.output):
            unit = unit.then(op)
        return unit

    def apply(plan: Plan) -> Plan:
        own = replace(target, asymmetric=target.layout == "awq" and _with_zeros(plan, plain))
        return replace(plan, units=tuple(one(unit, own) for unit in plan.units))

    return apply


def _with_zeros(plan: Plan, plain: frozenset[str]) -> bool:
    """Whether any weight that may keep its codes has zeros or mins: AWQ has one setting for all."""
    encodings = [tensor.encoding for name, tensor in plan.outputs.items() if name not in plain]
    grids = [
        GRIDS.get(encoding.type) if isinstance(encoding, GgmlBlocks) else encoding for encoding in encodings
    ]
    return any(isinstance(g, AffineMin) or (isinstance(g, AffineInt) and not g.symmetric) for g in grids)


def _from_blocks(target: Target, unit: Unit, encoding: GgmlBlocks, plain: frozenset[str]) -> Unit:
    """GGML blocks on the grid that they are, or as plain numbers."""
    tensor = unit.output
    if tensor.name in plain:
        return unit.then(Dequantize(DType.BF16))
    if encoding.type in GRIDS:
        return unit.then(Transcode("from_ggml_blocks", GRIDS[encoding.type]))
    if not target.allow_requantize:
        raise _refused(tensor, "blocks are no grid that other formats have")
    unit = unit.then(Dequantize(DType.F32))
    if target.new_table:
        for op in _encoding(target, tensor, DType.F32):
            unit = unit.then(op)
        return unit
    scheme = target.scheme or _usual(target, tensor, encoding)
    new = fitting(scheme, tensor, target.scale_dtype or DType.F32)
    return unit.then(Quantize(new, target.search))


def steps(target: Target, tensor: ModelTensor) -> tuple[Op, ...]:
    """The operations that bring a quantized weight into the target layout."""
    encoding = tensor.encoding
    assert isinstance(encoding, Quantized)
    try:
        return *RULES[target.layout](tensor, encoding), *_nesting(target, tensor, encoding)
    except BadRecipe:
        if not target.allow_requantize:
            raise
    if isinstance(encoding, Codebook) and encoding.is_nvfp4 and target.layout == "mlx" and not target.scheme:
        target = replace(target, table=target.table or "nvfp4")
    if target.new_table:
        return Dequantize(encoding.decoded), *_encoding(target, tensor, encoding.decoded)
    scheme = target.scheme or _usual(target, tensor, encoding)
    requantized = fitting(scheme, tensor, target.scale_dtype or encoding.decoded)
    again = Quantize(requantized, target.search)
    return (
        Dequantize(encoding.decoded),
        again,
        *RULES[target.layout](replace(tensor, encoding=requantized), requantized),
    )


def _usual(target: Target, tensor: ModelTensor, encoding: Quantized | GgmlBlocks) -> Scheme:
    """The integers that come nearest to what a weight was, among those that a layout holds."""
    layout = target.layout
    held = _HELD_BITS.get(layout, range(2, 9))
    bits = next((bits for bits in held if bits >= encoding.bits), held[-1])
    if layout == "int-quantized":
        return Scheme(bits, None)
    if isinstance(encoding, AffineInt) and (layout != "mlx" or encoding.group_size in _MLX_GROUPS):
        return Scheme(bits, encoding.group_size, encoding.symmetric and not target.asymmetric)
    size = next((size for size in _MLX_GROUPS if tensor.width % size == 0), None)
    return Scheme(bits, None if size == tensor.width and layout != "mlx" else size, not target.asymmetric)


_HELD_BITS: Mapping[str, tuple[int, ...]] = {
    "bitsandbytes": (8,),
    "fp8": (),
    "int-quantized": (8,),
    "mxfp4": (),
    "gptq": (2, 3, 4, 8),
    "gptq_v2": (2, 3, 4, 8),
    "awq": (4,),
    "mlx": (2, 3, 4, 5, 6, 8),
}


_HELD = {
    "awq": "int4[-asym][-g{N}|-channel]",
    "bitsandbytes": "nf4, fp4 and int8-channel",
    "fp8": "fp8 in blocks of 128 by 128",
    "gptq": "int{2,3,4,8}[-asym][-g{N}|-channel]",
    "gptq_v2": "int{2,3,4,8}[-asym][-g{N}|-channel]",
    "int-quantized": "int8[-asym]-channel",
    "mlx": "int{2,3,4,5,6,8}[-asym]-g{32,64,128}",
    "mxfp4": "stacks of experts in MXFP4",
}


def check_held(layout: str, scheme: Scheme) -> None:
    """Raise BadRecipe for integers that this layout holds of no model at all."""
    rows_alone = layout in ("int-quantized", "bitsandbytes")
    if (
        scheme.bits not in _HELD_BITS.get(layout, range(2, 9))
        or (rows_alone and scheme.group_size is not None)
        or (layout == "bitsandbytes" and not scheme.symmetric)
        or (layout == "mlx" and (scheme.group_size or 32) % 32)
    ):
        raise BadRecipe(f"scheme {scheme.label}: {layout} does not hold it", f"it holds {_HELD[layout]}")


def _refused(tensor: ModelTensor, why: str) -> BadRecipe:
    return BadRecipe(
        f"{tensor.name}: {tensor.encoding.label} {why}",
        "--allow-requantize computes the numbers and quantizes them again, which loses twice",
    )


def _in_sequence(tensor: ModelTensor, encoding: AffineInt, layout: str) -> None:
    if encoding.act_order:
        raise BadRecipe(
            f"{tensor.name}: its columns are in activation order (g_idx), which {layout} cannot hold",
            "convert --to gptq or gptq_v2; --undo-act-order folds what can be folded; --allow-requantize "
            "quantizes the numbers again, which loses twice",
        )


def _integers(tensor: ModelTensor, encoding: Quantized) -> tuple[tuple[Op, ...], AffineInt]:
    """The way to a grid with integer zeros, and that grid."""
    match encoding:
        case AffineInt():
            return (), encoding
        case AffineMin():
            to_zeros = Transcode("mins_to_zeros", tensor.width)
            made: Encoding = to_zeros.infer(encoding)
        case Codebook(table="int8"):
            from_rows = Transcode("from_int8_rows")
            made = from_rows.infer(encoding)
            assert isinstance(made, AffineInt)
            return (from_rows,), made
        case Codebook():
            raise _refused(tensor, "has no integer codes, which this layout holds")
    assert isinstance(made, AffineInt)
    return (to_zeros,), made


def _compressed_tensors(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.is_nvfp4:
        return (Transcode("round_divisor") if encoding.second else Transcode("divide_by_one"),)
    if isinstance(encoding, Codebook) and encoding.table in ("e4m3", "e2m1"):
        if encoding.bits == 8 or (encoding.group_rows == 1 and encoding.group_size in (16, 32)):
            return ()
        raise _refused(tensor, "has blocks that compressed-tensors does not")
    ops, made = _integers(tensor, encoding)
    _in_sequence(tensor, made, "compressed-tensors")
    return (*ops, Transcode("cast_scales", made.scale_dtype)) if made.signless_zero else ops


def _int_quantized(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = _integers(tensor, encoding)
    if made.bits != 8 or made.group_size is not None:
        raise _refused(tensor, "is not 8 bits with one scale per row, which int-quantized is")
    _in_sequence(tensor, made, "int-quantized")
    return (*ops, Transcode("cast_scales", made.scale_dtype)) if made.signless_zero else ops


def _gptq(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = _integers(tensor, encoding)
    if made.bits not in (2, 3, 4, 8) or any(size * made.bits % 32 for size in tensor.shape):
        raise _refused(tensor, f"of shape {list(tensor.shape)} does not fill GPTQ's words (2, 3, 4, 8 bits)")
    return (*ops, Transcode("cast_scales", DType.F16))


def _awq(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = _integers(tensor, encoding)
    if made.bits != 4 or tensor.rows % 8:
        raise _refused(tensor, f"of {tensor.rows} rows does not fill AWQ's words (4 bits, eight rows)")
    _in_sequence(tensor, made, "awq")
    return (*ops, Transcode("cast_scales", DType.F16))


def _mlx(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, AffineMin) and encoding.group_size in _MLX_GROUPS and encoding.bits != 7:
        return ()
    if isinstance(encoding, AffineMin):
        raise _refused(tensor, "has groups that MLX does not (32, 64 or 128 columns)")
    if isinstance(encoding, Codebook) and encoding.table != "int8":
        if encoding.is_mxfp4 or (encoding.is_nvfp4 and encoding.second is None):
            return ()
        if encoding.is_nvfp4:
            raise _refused(tensor, "divides its scales by one number (weight_global_scale) that MLX has not")
        raise _refused(tensor, "is none of MLX's modes that are written here (affine, mxfp4, nvfp4)")
    ops, made = _integers(tensor, encoding)
    _in_sequence(tensor, made, "mlx")
    if made.bits == 7 or tensor.width * made.bits % 32:
        raise _refused(tensor, f"in rows of {tensor.width} is not written by MLX (2, 3, 4, 5, 6, 8 bits)")
    columns = made.group_size or tensor.width
    size = next((size for size in _MLX_GROUPS if columns % size == 0), None)
    if size is None:
        raise _refused(tensor, f"has groups of {columns} columns, MLX's are of 32, 64 or 128")
    split = () if size == made.group_size else (Transcode("split_groups", size),)
    return (*ops, *split, Transcode("zeros_to_mins", tensor.width))


def _bitsandbytes(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.table in ("nf4", "fp4", "int8"):
        return ()
    if (
        isinstance(encoding, AffineInt)
        and encoding.bits == 8
        and encoding.group_size is None
        and encoding.symmetric
    ):
        return (
            Transcode(
                "to_int8_rows", DType.F32 if encoding.scale_dtype is DType.F32 else encoding.scale_dtype
            ),
        )
    raise _refused(tensor, "is none of bitsandbytes' grids (nf4, fp4, and int8 with one scale per row)")


def _fp8(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.table == "e4m3":
        if encoding.group_rows == encoding.group_size == 128:
            return ()
        if encoding.group_rows is None:
            return (Transcode("repeat_tensor_scale", replace(encoding, group_rows=128, group_size=128)),)
    raise _refused(tensor, "is not FP8 in blocks of 128 by 128, which this layout holds")


def _gpt_oss(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.is_mxfp4:
        return ()
    raise _refused(tensor, "is not MXFP4, which gpt-oss's layout holds its experts in")


RULES: Mapping[str, Callable[[ModelTensor, Quantized], tuple[Op, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "int-quantized": _int_quantized,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "mlx": _mlx,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp4": _gpt_oss,
}
PLAIN = {"bf16": DType.BF16, "f16": DType.F16, "f32": DType.F32}
