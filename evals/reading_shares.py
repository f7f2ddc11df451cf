"""Says what reading a text spends its processor time on: products, attention, norms, losses and the rest.

The decoder's own functions are timed where it calls them, each without what it calls of the others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

from qconvert.runtime import layer
from qconvert.runtime.cpu.packed_weights import PackedGrid
from qconvert.runtime.cpu.softmax_rows import CompiledSoftmax
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm
from qconvert.runtime.scoring import Outputs

MATMUL = ("linears", "logits")
_REST = "rest"
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (Linear, "__call__", "linears"),
    (PackedGrid, "rows", "dequantization"),
    (layer, "attend_widened", "attention"),
    (Norm, "__call__", "norms"),
    (CompiledSoftmax, "fold", "losses"),
)


class _Clock:
    """Processor seconds by kind; what is timed inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._kinds, self._since = [_REST], time.process_time()

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._kinds[-1]] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The function, whose calls count for a kind."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self._switch()
            self._kinds.append(kind)
            try:
                return function(*args, **options)
            finally:
                self._switch()
                self._kinds.pop()

        return call

    def finish(self) -> dict[str, float]:
        """The share of every kind."""
        self._switch()
        whole = sum(self.seconds.values())
        return {kind: seconds / whole for kind, seconds in self.seconds.items()}


def reading_shares(read: Callable[[], object], readings: int = 3) -> dict[str, float]:
    """The share of every kind in the processor time of some readings."""
    clock, blocks = _Clock(), Outputs.blocks
    with ExitStack() as patched:
        for owner, name, kind in _PARTS:
            patched.enter_context(patch.object(owner, name, clock.timed(getattr(owner, name), kind)))
        made = clock.timed(lambda outputs: clock.timed(blocks(outputs), "logits"), "logits")
        patched.enter_context(patch.object(Outputs, "blocks", made))
        for _ in range(readings):
            read()
        return clock.finish()


def matmul_share(shares: dict[str, float]) -> float:
    """That of products with weights."""
    return sum(shares[kind] for kind in MATMUL)
