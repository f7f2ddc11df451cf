"""Raises the errors of a run, at the tensor and row of the source that they are about."""

from __future__ import annotations

from typing import NoReturn

from qconvert.core.encodings import AffineInt, Codebook, GgmlBlocks, ModelTensor, Unquantized
from qconvert.core.protocols import Layout, Reader
from qconvert.core.values import AffineIntRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.ops import Finding
from qconvert.plan.plan import Unit


def refuse_code_error(unit: Unit, steps: float) -> NoReturn:
    """Raise BadRecipe for codes that move a weight by so many steps of their new quantization format."""
    raise BadRecipe(
        f"{unit.inputs[0].tensor.name}: its codes on the grid of {unit.output.encoding.label} move "
        f"a weight by {steps:.3g} steps",
        "--allow-requantize accepts that",
    )


def refuse_nonfinite(unit: Unit, start: int, finding: Finding, layout: Layout, width: int) -> None:
    """Raise for what an operation found in rows of `width` columns, the first of them row `start`."""
    if finding.bad_row >= 0:
        tensor, row = _input_row(unit, start + finding.bad_row)
        raise CorruptCheckpoint(
            f"{layout.stored_arrays(tensor)[:2][-1].name}: NaN or Inf in the scales of row {row}",
            "the checkpoint is damaged; --allow-nonfinite converts it anyway",
        )
    if finding.nonfinite >= 0:
        tensor, row = _input_row(unit, start + finding.nonfinite // width)
        column = finding.nonfinite % width
        single = isinstance(tensor.encoding, Unquantized | GgmlBlocks)
        name = layout.stored_arrays(tensor)[0].name if single else tensor.name
        raise CorruptCheckpoint(
            f"{name}: NaN or Inf at row {row}, column {column} (flat index {row * width + column})",
            "the checkpoint is damaged; --allow-nonfinite converts it anyway",
        )


def refuse_overflow(unit: Unit, value: Value, count: int) -> NoReturn:
    """Raise BadRecipe for `count` finite numbers that the form of what the unit made cannot hold."""
    names = ", ".join(dict.fromkeys(piece.tensor.name for piece in unit.inputs))
    what, held = "scales", unit.output.encoding.label
    if isinstance(value, DenseRows):
        what, held = "numbers", value.dtype.label
    elif isinstance(value, AffineIntRows):
        held = value.encoding.scale_dtype.label
    elif isinstance(value, GgmlRows):
        held = f"the half precision of {held}"
    raise BadRecipe(
        f"{names}: {count} {what} do not fit {held}, whose largest number they exceed",
        "use a wider type: --dtype bf16, or to-gguf --type bf16",
    )


def _input_row(unit: Unit, row: int) -> tuple[ModelTensor, int]:
    """The source tensor that holds a row of the unit, and the row's number there."""
    for piece in unit.inputs:
        if row < piece.rows:
            return piece.tensor, piece.start + row // piece.pieces * piece.step
        row -= piece.rows
    raise AssertionError("a row outside the unit")


def require_same_constants(unit: Unit, reader: Reader) -> None:
    """Raise BadRecipe if stacked inputs differ in what their output can have only once.

    Blocks of a large unit read one input each, so all of them are asked before the first one.
    """
    encoding = unit.source.encoding
    shares = isinstance(encoding, Codebook) and (encoding.group_rows is None or encoding.has_tensor_number)
    if not shares and not (isinstance(encoding, AffineInt) and encoding.act_order):
        return
    first, *others = (piece for piece in unit.inputs if piece.zeros_like is None and piece.rows)
    one = reader.read(first.tensor, first.start, first.start + 1)
    for piece in others:
        if piece.tensor.name != first.tensor.name:
            other = reader.read(piece.tensor, piece.start, piece.start + 1)
            _compare_constants(first.tensor.name, one, piece.tensor.name, other)


def _compare_constants(name_a: str, a: Value, name_b: str, b: Value) -> None:
    import numpy as np

    from qconvert.quant.codebook import scale_of_all

    if isinstance(a, AffineIntRows) and isinstance(b, AffineIntRows):
        orders = [value.groups_I for value in (a, b) if value.groups_I is not None]
        if orders and not np.array_equal(orders[0], orders[-1]):
            raise BadRecipe(
                f"{name_b}: its activation order (g_idx) is not that of {name_a}, with which it is stacked",
                "leave them apart",
            )
    elif isinstance(a, CodebookRows) and isinstance(b, CodebookRows):
        for what, one, other in (
            ("global scale", a.divisor, b.divisor),
            ("global scale", a.factor, b.factor),
            ("scale", scale_of_all(a), scale_of_all(b)),
        ):
            if one != other:
                raise BadRecipe(
                    f"{name_b}: has one {what} of {other:.6g}, but {name_a}, with which it is stacked, "
                    f"{one:.6g}; one tensor has one",
                    "leave them apart, or dequantize first",
                )
