"""Shows an observer what the weights of a torch model are multiplied by, wherever that happens.

Hooks see the inputs of modules. A module that holds the experts of a layer as one stack has one input for all
of them, and none for what their second products read; a router may change its input before the product.
So the products themselves are watched, and known by the address of the weight: that of an expert lies within
the stack. Legend: N rows, I in features, O out features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qconvert.core.statistics import InputKey
from qconvert.runtime.observers import Observer

_PRODUCTS = frozenset(
    (
        F.linear,
        torch.matmul,
        torch.mm,
        torch.addmm,
        Tensor.matmul,
        Tensor.mm,
        Tensor.addmm,
        Tensor.__matmul__,
    )
)


class WatchedProducts(TorchFunctionMode):
    """While it is entered, shows every product of a row with a known weight, once, before it is computed.

    `weights` are 2-D arrays or slices of a stack, [O, I] or [I, O], each with the key of its input; the
    weights of one key are to be products of one input, of which the first is watched. Of the `head`, which
    is [V, D], only the products of the last position are computed: the logits are not used.
    """

    def __init__(
        self, weights: Mapping[InputKey, Tensor], observe: Observer, head: Tensor | None = None
    ) -> None:
        super().__init__()
        self._keys = {(weight.data_ptr(), weight.numel()): key for key, weight in weights.items()}
        self._observe = observe
        self._head = None if head is None else (head.data_ptr(), head.numel())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute what torch was asked for, after looking at it."""
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        at = 2 if func in (torch.addmm, Tensor.addmm) else 1
        if len(args) <= at or not _is_matrix(args[at]):
            return func(*args, **kwargs)
        x, weight = args[at - 1], args[at]
        address = weight.data_ptr(), weight.numel()
        key = self._keys.get(address)
        if key is not None:
            self._observe(key, x.detach().reshape(-1, x.shape[-1]))
        if address == self._head and x.dim() == 3:
            args = (*args[: at - 1], x[:, -1:], *args[at:])
        return func(*args, **kwargs)


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2
