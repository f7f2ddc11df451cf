"""Defines what an operation says of itself: what it makes, what it needs, what becomes of the numbers.

The planner, the runner and the manifest ask these questions and know no operation by name. Stacking and
cutting rows is not an operation: a unit reads row slices and writes one tensor, so fusing is reading from
several tensors and un-fusing is reading from part of one (see `plan.plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qconvert.core.encodings import Encoding
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import Value, stack_rows

if TYPE_CHECKING:
    import numpy as np

    from qconvert.quant.affine import QuantError

Certificate = Literal["exact", "cast", "dequantized", "quantized"]
"""What becomes of a tensor's numbers, from nothing to new codes."""

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputError:
    """The squared error of a linear's output on tokens held out, summed over rows, per token.

    `plain` is that of codes chosen one by one, `made` that of those written, `energy` the squared output;
    `kept` of `rows` rows keep their plain codes.
    """

    plain: float
    made: float
    energy: float
    kept: int
    rows: int

    def __add__(self, other: OutputError) -> OutputError:
        return OutputError(
            self.plain + other.plain,
            self.made + other.made,
            self.energy + other.energy,
            self.kept + other.kept,
            self.rows + other.rows,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What an operation noticed in the rows it was given.

    `nonfinite` is the flat index of the first NaN or Inf, -1 if there is none; `bad_row` the first row
    whose scales hold a NaN or Inf; `overflow` counts finite numbers that the target dtype cannot hold;
    `error` is what quantizing lost; `code_error` the largest change of a weight whose code was kept, in
    units of its quantization step; `output_error` what the linear's output loses, where codes were chosen
    together.
    """

    nonfinite: int = -1
    overflow: int = 0
    error: QuantError | None = None
    bad_row: int = -1
    code_error: float = 0.0
    output_error: OutputError | None = None


CLEAN = Finding()


class Op:
    """One step of a unit: the encoding that comes out, and the rows themselves.

    The defaults describe an operation that changes no number and takes any rows. One that
    `needs_reduction` depends on the whole tensor: `reduce` is called for every block of rows, then
    `finalize` with all results in the order of the rows, which gives the operation that can be applied.
    Operations with one `shared_scale_group` (a name, "" for none) are finalized together, as q, k and v
    are where loaders give them one scale.
    """

    __slots__ = ()

    quantizes: ClassVar[bool] = False
    """Whether it chooses new codes (and looks for NaN and Inf while it does)."""
    keeps_codes: ClassVar[bool] = False
    """Whether it carries codes over to another quantization format."""
    moves_rows: ClassVar[bool] = False
    """Whether it moves whole rows, whatever they are stored as."""
    keeps_rows: ClassVar[bool] = False
    """Whether every row that comes out is the one that went in, at most rounded."""
    joins_members: ClassVar[bool] = False
    """Whether it is part of stacking the members of a fusion, so that cutting them apart undoes it."""

    @property
    def granule(self) -> int:
        """The number of rows that must be made together (and in whole multiples)."""
        return 1

    @property
    def needs_reduction(self) -> bool:
        return False

    @property
    def shared_scale_group(self) -> str:
        return ""

    @property
    def row_order(self) -> Order:
        """The row of the input that each row of the output is; empty where they keep their order."""
        return ()

    @property
    def column_order(self) -> Order:
        """The column of the input that each column of the output is; empty where they keep theirs."""
        return ()

    @property
    def padded_width(self) -> int | None:
        """The number of columns to which it appends zeros."""
        return None

    def infer(self, encoding: Encoding) -> Encoding:
        """The encoding of what comes out."""
        return encoding

    def certificate(self, source: Encoding) -> Certificate:
        """What becomes of the numbers of a tensor that the source stores in this encoding."""
        return "exact"

    def inverse(self) -> Op | None:
        """The operation that undoes this one; None where nothing does."""
        return None

    def extended(self, rows: int) -> Op:
        """This operation on more rows, `rows` in all: those appended are zeros."""
        return self

    def reduce(self, value: Value) -> np.ndarray:
        """What `finalize` needs of these rows."""
        raise NotImplementedError

    def finalize(self, found: np.ndarray) -> Op:
        """This operation with what was found in the whole tensor."""
        raise NotImplementedError

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        """The rows that come out, and what was noticed.

        `statistics` cover the rows in order, or are empty where nothing was measured.
        """
        raise NotImplementedError

    def apply_stacked(self, value: Value, count: int) -> tuple[Value, list[Finding]]:
        """Apply it to `count` tensors of as many rows each, one below the other, to each as if it were alone.

        Returns what comes out, stacked in the same way, and what was noticed in each.
        """
        each = value.rows // count
        made = [
            self.apply(value.with_arrays(tuple(array[first : first + each] for array in value.arrays)))
            for first in range(0, value.rows, each)
        ]
        return stack_rows([rows for rows, _ in made]), [finding for _, finding in made]
