"""Brings encodings to integers with zero points, or says why not: the parts of the layouts' own rules."""

from __future__ import annotations

from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, ModelTensor, Quantized
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.ops import Op, Transcode


def refused(tensor: ModelTensor, why: str) -> BadRecipe:
    """The error for a tensor whose codes a layout cannot keep."""
    return BadRecipe(
        f"{tensor.name}: {tensor.encoding.label} {why}",
        "--allow-requantize computes the numbers and quantizes them again, which loses twice",
    )


def check_column_order(tensor: ModelTensor, encoding: AffineInt, layout: str) -> None:
    """Raise BadRecipe for columns in activation order, which only layouts with a g_idx can store."""
    if encoding.act_order:
        able = [traits.name for traits in registry.all_traits() if traits.act_order]
        raise BadRecipe(
            f"{tensor.name}: its columns are in activation order (g_idx), which {layout} cannot hold",
            f"convert --to {' or '.join(able)}; --undo-act-order folds what can be folded; "
            "--allow-requantize quantizes the numbers again, which loses twice",
        )


def to_integers(tensor: ModelTensor, encoding: Quantized) -> tuple[tuple[Op, ...], AffineInt]:
    """The way to integers with zero points, and that encoding. Raises BadRecipe for codes of a table."""
    made: Encoding
    match encoding:
        case AffineInt():
            return (), encoding
        case AffineMin() if encoding.bits < 2:
            raise refused(tensor, "has codes of one bit, which this layout does not hold")
        case AffineMin() if encoding.shared_rows > 1:
            raise refused(tensor, "has scales that rows share, which this layout does not hold")
        case AffineMin():
            to_zeros = Transcode("mins_to_zeros", tensor.width)
            ops: tuple[Op, ...] = (to_zeros,)
            made = to_zeros.infer(encoding)
        case Codebook(table="int8"):
            from_rows = Transcode("from_int8_rows")
            ops, made = (from_rows,), from_rows.infer(encoding)
        case Codebook():
            raise refused(tensor, "has no integer codes, which this layout holds")
    assert isinstance(made, AffineInt)
    return ops, made
