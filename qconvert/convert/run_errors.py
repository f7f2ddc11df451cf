"""What a run refuses, as errors that name the tensor, and the row where there is one, of the source."""

from __future__ import annotations

from typing import NoReturn

from qconvert.core.encodings import GgmlBlocks, ModelTensor, Unquantized
from qconvert.core.protocols import Layout
from qconvert.core.values import AffineIntRows, DenseRows, GgmlRows, Value
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.ops.rows import Finding
from qconvert.plan.plan import Unit


def refuse_steps(unit: Unit, steps: float) -> NoReturn:
    """Raise BadRecipe for codes that move a weight by so many steps of their new grid."""
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
            "the checkpoint is damaged; --allow-nonfinite converts it all the same",
        )
    if finding.nonfinite >= 0:
        tensor, row = _input_row(unit, start + finding.nonfinite // width)
        column = finding.nonfinite % width
        single = isinstance(tensor.encoding, Unquantized | GgmlBlocks)
        name = layout.stored_arrays(tensor)[0].name if single else tensor.name
        raise CorruptCheckpoint(
            f"{name}: NaN or Inf at row {row}, column {column} (flat index {row * width + column})",
            "the checkpoint is damaged; --allow-nonfinite converts it all the same",
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
            return piece.tensor, piece.start + row * piece.step
        row -= piece.rows
    raise AssertionError("a row outside the unit")
