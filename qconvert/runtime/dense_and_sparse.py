"""Computes Gemma 4's blocks of a dense MLP and experts side by side, each between norms of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qconvert.runtime.layer import Mlp, SparseMlp
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm


@dataclass(frozen=True, slots=True)
class DenseAndSparse:
    """The sum of a dense MLP and of experts, which read the same hidden states before any norm.

    So does the router, behind a norm of its own.
    """

    dense: Mlp
    dense_norm: Norm
    dense_post_norm: Norm
    sparse: SparseMlp
    sparse_norm: Norm
    sparse_post_norm: Norm
    router_norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        x_ND = x.flatten(0, -2)
        routes = self.sparse.route(self.router_norm(x_ND))
        few_ND = self.sparse.combined(self.sparse_norm(x_ND), *routes)
        all_ND = self.dense(self.dense_norm(x_ND))
        return (self.dense_post_norm(all_ND) + self.sparse_post_norm(few_ND)).view_as(x)

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.dense.linears, *self.sparse.linears]
