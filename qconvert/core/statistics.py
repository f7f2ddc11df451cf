"""Names the statistics of a linear's inputs, and the source that gives them.

Statistics are keyed by what a linear is in the model (role, layer, expert), never by the name that a
container gives its weight, so that one file of statistics serves every output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qconvert.core.dtypes import Json

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class StatisticsKey:
    """The input of one linear: the role of its weight ("mlp.down"), its layer, its expert."""

    role: str
    layer: int | None = None
    expert: int | None = None


EMBED, HEAD = StatisticsKey("embed"), StatisticsKey("lm_head")


@dataclass(frozen=True, slots=True)
class InputKey:
    """Whose input it is: all roles that read it, as `Parameter.group` names them, their layer and expert.

    Linears that share an input, such as `attn.q`, `attn.k` and `attn.v`, are one key, stored fused or not.
    """

    roles: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None

    @property
    def place(self) -> str:
        """What it is called, all experts of a layer together: `layers.3.attn.q+attn.k+attn.v`."""
        return f"{'model' if self.layer is None else f'layers.{self.layer}'}.{'+'.join(self.roles)}"


class StatisticsSource(Protocol):
    """Statistics of a model's activations."""

    def __contains__(self, key: object) -> bool: ...

    @property
    def record(self) -> Json:
        """Where they come from, as plain data for the manifest: file, dataset, chunks."""
        ...

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]."""
        ...

    def rounding(self, key: StatisticsKey) -> Rounding | None:
        """What choosing codes together needs, where that was measured."""
        ...


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of the inputs of rows [first, last) of a block of rows.

    `second_moments_I` float32 [I]: the mean square of every input column. `rounding` is there where codes
    are to be chosen with error feedback, `outputs` where rows compensate one another's errors too.
    """

    first: int
    last: int
    second_moments_I: np.ndarray
    rounding: Rounding | None = None
    outputs: OutputHessian | None = None


@dataclass(frozen=True, slots=True)
class TargetShift:
    """What is added to the weights W of linears so that they give for inputs x~ what they gave for x: W P.

    `solved_BI` float32 is P, [I, I], where the linears have many rows. Of fewer rows only what P does to them
    counts: `basis_IB` float32 has orthonormal columns Q that span the rows, and `solved_BI` is Q^T P.
    """

    solved_BI: np.ndarray
    basis_IB: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class InputHessian:
    """What choosing the codes of a linear together needs to know of its input x, of I columns.

    Where the layers before are quantized already, x~ is what they make of the same tokens, else x.

    `hessian_II` float32: E[x~ x~^T]. `order_I` int64: the columns, the first to be rounded first.
    `factor_II` float32: M, unit upper triangular, of the damped Hessian H = M D M^T, its rows and columns in
    that order. `shift`: what is added to weights so that the quantized linear gives for x~ what the linear
    gave for x; None where the two are one. `held_NI` float32: x of tokens that are in none of
    the above, `held_read_NI` their x~. `eights` gives what `quant.hessian.factor_eights` returns of the same
    Hessian, computed when it is first asked for; None where codes of eight columns are not chosen at once.
    """

    hessian_II: np.ndarray
    order_I: np.ndarray
    factor_II: np.ndarray
    shift: TargetShift | None
    held_NI: np.ndarray
    held_read_NI: np.ndarray
    eights: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    @property
    def blocks(self) -> tuple[InputHessian, ...]:
        """The columns whose errors compensate one another: all."""
        return (self,)

    @property
    def second_moments_I(self) -> np.ndarray:
        """The mean square of every column, float32 [I]."""
        diagonal_I: np.ndarray = self.hessian_II.diagonal().copy()
        return diagonal_I


@dataclass(frozen=True, slots=True)
class BlockedHessian:
    """The same of an input whose whole Hessian would take too much memory: its diagonal blocks.

    H is taken as diag(H_1, ..., H_B), as if columns x_a, x_b of different blocks had E[x_a x_b] = 0; each
    block H_b = M_b D_b M_b^T has a factor of its own, in its own order, so that errors are made up for within
    blocks of consecutive columns. For C columns a block, that is I C numbers in place of I^2. Held rows are
    of all columns.
    """

    blocks: tuple[InputHessian, ...]
    held_NI: np.ndarray
    held_read_NI: np.ndarray

    @property
    def second_moments_I(self) -> np.ndarray:
        """The mean square of every column, float32 [I]."""
        import numpy as np

        return np.concatenate([block.second_moments_I for block in self.blocks])


Rounding = InputHessian | BlockedHessian
"""What choosing the codes of a linear together needs to know of its input."""


@dataclass(frozen=True, slots=True)
class OutputHessian:
    """What choosing the codes of rows together needs to know of the gradients g at their outputs.

    Blocks of R consecutive rows; the last may lack rows, whose moments are 0. `order_BR` int64 and
    `factor_BRR` float32: of the damped E[g g^T] of every block, as `quant.two_sided.factor_row_blocks`
    returns them. `hessian_BRR` float32: E[g g^T] itself, damped likewise.
    """

    order_BR: np.ndarray
    factor_BRR: np.ndarray
    hessian_BRR: np.ndarray
