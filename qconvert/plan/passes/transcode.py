"""Brings every weight into a layout: its codes kept, quantized again where that is allowed, or new ones.

Which operations keep the codes is a rule of the layout; which encodings it has is in its traits. This is the
one solver for all of them: it applies the rule, and where the rule refuses it quantizes the numbers again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
from qconvert.core.layout_traits import CodebookScheme, LayoutTraits
from qconvert.core.schemes import Scheme, check_scheme, fitting, is_integers
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Cast, Dequantize, EncodeTable, NestScales, Op, Quantize, Transcode
from qconvert.plan.plan import Plan, Unit


@dataclass(frozen=True, slots=True)
class Target:
    """A layout to convert to, and how.

    `scheme` or `table` (a codebook scheme of the layout) is what weights get that cannot keep their codes, or
    have none; only with `allow_requantize` is a weight quantized that already was, then every one that has
    not this form. `undo_act_order` moves columns in activation order into the weights before (see
    `plan.passes.activation_order`). `asymmetric` says that what is quantized again gets zero points, as
    weights beside it have them.
    """

    layout: str
    scheme: Scheme | None = None
    table: str = ""
    allow_requantize: bool = False
    search: bool = True
    undo_act_order: bool = False
    asymmetric: bool = False

    def __post_init__(self) -> None:
        """Refuse a layout, a scheme or a table that there is not."""
        registry.check_written(self.layout)
        check_scheme(self.scheme)
        if self.table and not codebook_named(self.layout, self.table):
            tables = ", ".join(each.name for each in self.traits.codebooks) or "none"
            raise BadRecipe(f"table {self.table!r}: {self.layout} does not hold it", f"it holds {tables}")

    @property
    def traits(self) -> LayoutTraits:
        """What is said of the layout for any model."""
        return registry.traits_of(self.layout)

    @property
    def codebook(self) -> CodebookScheme | None:
        """The codebook scheme of new weights, None for integers."""
        if self.table:
            return self.traits.codebook(self.table)
        return self.traits.codebooks[0] if self.traits.default_codebook and not self.scheme else None


def codebook_named(layout: str, scheme: str) -> str:
    """The codebook scheme that a user means in a layout, "" if the name is none of any layout's.

    Raises BadRecipe for one that other layouts have and this one has not.
    """
    own = registry.traits_of(layout).codebook(scheme)
    if own:
        return own.name
    layouts = layouts_with(scheme)
    if layouts:
        raise BadRecipe(
            f"scheme {scheme!r}: {layout} does not hold it", f"it is for --to {', '.join(layouts)}"
        )
    return ""


def layouts_with(scheme: str) -> tuple[str, ...]:
    """The layouts that have a codebook scheme of this name; none for names of integers, such as int8."""
    return () if not scheme or is_integers(scheme) else registry.with_codebook(scheme)


def check_integers(layout: str, scheme: Scheme) -> None:
    """Raise BadRecipe for integers that this layout can store of no model at all."""
    traits = registry.traits_of(layout)
    if traits.integers is None or not traits.integers.accepts(scheme):
        stores = traits.schemes or (traits.integers.label if traits.integers else traits.described)
        others = ", ".join(registry.with_integers(scheme))
        elsewhere = f"; {scheme.label} is held by {others}" if others else ""
        raise BadRecipe(f"scheme {scheme.label}: {layout} does not hold it", f"it holds {stores}{elsewhere}")


def encode(plan: Plan, target: Target, linears: frozenset[str], shared_scales: Mapping[str, str]) -> Plan:
    """Encode the plain weights of these names in the codebook scheme of the target.

    `shared_scales` names what a weight is stacked into by loaders, which then want one scale, or global
    scale, for all of it: vLLM quantizes FP8 parts with a scale each a second time.
    """

    def one(unit: Unit) -> Unit:
        encoding = unit.output.encoding
        if unit.output.name not in linears or not isinstance(encoding, Unquantized):
            return unit
        group = shared_scales.get(unit.output.name, "")
        return _then(unit, _encoding(target, unit.output, encoding.dtype, group))

    return plan.each(one)


def _then(unit: Unit, ops: tuple[Op, ...]) -> Unit:
    for op in ops:
        unit = unit.then(op)
    return unit


def _encoding(target: Target, tensor: ModelTensor, dtype: DType, group: str = "") -> tuple[Op, ...]:
    """The way from plain numbers of this type to the codebook scheme of the target."""
    scheme = target.codebook
    assert scheme is not None
    encoding = scheme.encoding(dtype)
    size, width = encoding.group_size, tensor.width
    if encoding.bits == 4 and size and width % size:
        raise BadRecipe(
            f"{tensor.name}: rows of {width} columns do not divide into blocks of {size}",
            "another layout holds this model, for example compressed-tensors",
        )
    first = (Cast(scheme.cast_first),) if scheme.cast_first else ()
    for_whole = encoding.has_tensor_number or encoding.group_rows is None
    made = EncodeTable(encoding, target.traits.rounding, group if for_whole else "")
    return (*first, made, *_nesting(target, tensor, encoding))


def _nesting(target: Target, tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    four_bits = isinstance(encoding, Codebook) and encoding.bits == 4 and encoding.group_size == 64
    return (NestScales(tensor.width),) if target.codebook and target.codebook.nested and four_bits else ()


def transcode(plan: Plan, target: Target, plain: frozenset[str], tables: frozenset[str]) -> Plan:
    """Bring every quantized output into an encoding that the target layout stores.

    `plain` are the tensors that it stores as numbers alone, `tables` embeddings and heads that it need not:
    in GGML blocks, these keep their codes or, where they cannot, become numbers. Raises BadRecipe naming the
    weight and the reason where codes of others cannot be kept.
    """

    zeros = target.traits.shared_zero_point and _with_zeros(plan, plain)
    target = replace(target, asymmetric=zeros)
    types = _block_types(plan, plain | tables)
    known: dict[tuple[int, tuple[int, ...], bool], tuple[tuple[Op, ...], Encoding]] = {}  # of tensors alike

    def one(unit: Unit) -> Unit:
        encoding = unit.output.encoding
        if isinstance(encoding, GgmlBlocks) and unit.output.name in tables:
            return _table_from_blocks(target, unit, encoding)
        if isinstance(encoding, GgmlBlocks):
            return _from_blocks(target, unit, encoding, plain, types)
        if isinstance(encoding, Unquantized) or not isinstance(encoding, Quantized):
            return unit
        if unit.output.name in plain:
            if unit.quantizes:
                others = (traits.name for traits in registry.all_traits() if traits.embeddings != "plain")
                raise BadRecipe(
                    f"{unit.output.name}: {target.layout} holds no quantized embedding",
                    f"drop the rule that names it, or write {' or '.join(others)}",
                )
            return unit.then(Dequantize(encoding.decoded))
        alike = id(encoding), unit.output.shape, unit.quantizes
        if alike not in known:
            made = _as_asked(target, unit, _then(unit, steps(target, unit.output)))
            known[alike] = made.ops[len(unit.ops) :], made.output.encoding
        ops, form = known[alike]
        output = ModelTensor(unit.output.name, unit.output.shape, form)
        return Unit(unit.read, (*unit.ops, *ops), output, unit.statistics) if ops else unit

    return plan.each(one)


def _as_asked(target: Target, unit: Unit, kept: Unit) -> Unit:
    """The unit with its codes kept, unless another form was asked for and may be quantized to."""
    if not (target.allow_requantize and (target.scheme or target.table)) or unit.quantizes:
        return kept
    again = _then(unit, _again(target, unit.output))
    form = kept.output.encoding
    if isinstance(form, AffineInt):
        form = replace(form, act_order=False)
    return kept if form == again.output.encoding else again


def _with_zeros(plan: Plan, plain: frozenset[str]) -> bool:
    """Whether any weight that may keep its codes has zero points or minimums."""
    encodings = [tensor.encoding for name, tensor in plan.outputs.items() if name not in plain]
    codes = [GRIDS.get(each.type) if isinstance(each, GgmlBlocks) else each for each in encodings]
    return any(isinstance(e, AffineMin) or (isinstance(e, AffineInt) and not e.symmetric) for e in codes)


def _block_types(plan: Plan, plain: frozenset[str]) -> Counter[str]:
    """How many weights have each type of GGML blocks, those apart that the layout stores as numbers."""
    encodings = (tensor.encoding for name, tensor in plan.outputs.items() if name not in plain)
    return Counter(each.type for each in encodings if isinstance(each, GgmlBlocks))


def _table_from_blocks(target: Target, unit: Unit, encoding: GgmlBlocks) -> Unit:
    """An embedding, or a head, in GGML blocks: its codes kept; new ones if they may be; or numbers.

    A scheme that is asked for is for linears.
    """
    own = replace(target, scheme=None, table="")
    try:
        return _from_blocks(own, unit, encoding, frozenset(), Counter())
    except BadRecipe:
        return unit.then(Dequantize(DType.BF16))


def _from_blocks(
    target: Target, unit: Unit, encoding: GgmlBlocks, plain: frozenset[str], types: Counter[str]
) -> Unit:
    """GGML blocks in the target layout: in their own encoding, in the scheme asked for, or as numbers.

    BadRecipe where they have none there says how many weights of the file (`types`) have theirs.
    """
    tensor = unit.output
    if tensor.name in plain:
        return unit.then(Dequantize(DType.BF16))
    if encoding.type not in GRIDS:
        if not target.allow_requantize:
            raise refused(tensor, "blocks have no counterpart in other formats")
        return _then(unit, _again(target, tensor))
    as_grid = unit.then(Transcode("from_ggml_blocks", GRIDS[encoding.type]))
    try:
        kept = _then(as_grid, steps(target, as_grid.output))
    except BadRecipe as error:
        number, weights = types[encoding.type], types.total()
        raise BadRecipe(
            f"{error.fact}; in the file it is {encoding.type}, as {number} of {weights} linears are",
            f"--allow-requantize quantizes {'it' if number == 1 else 'these'} again"
            f"{_nearest_label(target, as_grid.output)}, which loses twice; "
            "better: `qconvert quantize` of the original model",
        ) from error
    return _as_asked(target, unit, kept)


def _nearest_label(target: Target, tensor: ModelTensor) -> str:
    """As what a weight would be quantized again, if nothing else is asked for."""
    if target.codebook or target.scheme or target.traits.integers is None:
        return ""
    assert isinstance(tensor.encoding, Quantized)
    scheme = target.traits.nearest(tensor.encoding, tensor.width, symmetric=not target.asymmetric)
    return f", as {scheme.label}"


def steps(target: Target, tensor: ModelTensor) -> tuple[Op, ...]:
    """The operations that bring a quantized weight into the target layout."""
    encoding = tensor.encoding
    assert isinstance(encoding, Quantized)
    keep_codes = registry.find(target.layout).transcode
    assert keep_codes is not None, target.layout
    try:
        return *keep_codes(tensor, encoding), *_nesting(target, tensor, encoding)
    except BadRecipe:
        if not target.allow_requantize:
            raise
    like = target.traits.like(encoding)
    if like and not target.scheme:
        target = replace(target, table=target.table or like.name)
    return _again(target, tensor)


def _again(target: Target, tensor: ModelTensor) -> tuple[Op, ...]:
    """The operations that bring the numbers of a quantized weight into new codes of the target layout."""
    encoding = tensor.encoding
    assert isinstance(encoding, GgmlBlocks | Quantized)
    if isinstance(encoding, GgmlBlocks):
        numbers, scales = DType.F32, _scales_of_blocks(target)
    else:
        numbers = scales = encoding.decoded
    again = _new_codes(target, tensor, encoding, scales)
    made, keep_codes = again[-1], registry.find(target.layout).transcode
    assert keep_codes is not None, target.layout
    if not isinstance(made, Quantize):
        return (Dequantize(numbers), *again)
    own = keep_codes(replace(tensor, encoding=made.encoding), made.encoding)
    return (Dequantize(numbers), *again, *own)


def _scales_of_blocks(target: Target) -> DType:
    """The type of new scales in place of blocks: that of codes kept from such blocks, or float32."""
    label = target.scheme and target.scheme.label
    like = (grid for grid in GRIDS.values() if isinstance(grid, AffineInt) and grid.label == label)
    return next((grid.scale_dtype for grid in like), DType.F32)


def _new_codes(
    target: Target, tensor: ModelTensor, encoding: Quantized | GgmlBlocks, dtype: DType
) -> tuple[Op, ...]:
    """The way from plain numbers of this type to the scheme that was asked for, or the nearest integers."""
    if target.codebook:
        return _encoding(target, tensor, dtype)
    scheme = target.scheme or target.traits.nearest(encoding, tensor.width, symmetric=not target.asymmetric)
    return (Quantize(fitting(scheme, tensor, target.traits.scale_dtype or dtype), target.search),)
