"""Compiles, or loads, the kernels that LINEAR records name by address, when the first weight needs them.

So a model costs the kernels of its own weights and no others, and the decode step is compiled without
any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import from_dtype, types
from numba.core.registry import cpu_target

from qconvert.quant.simd.lanes import entry
from qconvert.runtime.cpu.byte_dots import byte_routine
from qconvert.runtime.cpu.dots import ROUTINES
from qconvert.runtime.cpu.kernel_args import LINEAR
from qconvert.runtime.cpu.simd import float_at, instructions, put_float, routine

_SIGNATURE = types.void(*[types.intp] * 5)
_RECORD = from_dtype(LINEAR)


@instructions(_RECORD, types.intp)
def _linear_at(builder: Any, address: Any) -> Any:
    """The record at a byte address."""
    return builder.inttoptr(address, cpu_target.target_context.get_value_type(_RECORD))


@instructions(types.intp, _RECORD)
def _address_of(builder: Any, record: Any) -> Any:
    """Where a record lies."""
    return builder.ptrtoint(record, cpu_target.target_context.get_value_type(types.intp))


@instructions(types.void, *[types.intp] * 6)
def _call(builder: Any, kernel: Any, record: Any, x: Any, y: Any, start: Any, stop: Any) -> None:
    """Call the code at an address."""
    args = (record, x, y, start, stop)
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.inttoptr(kernel, kind.as_pointer()), args)


@routine
def multiply_rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
    """y[start:stop] of `y = W x + bias`; the width must be a multiple of 32 (dense: of 16)."""
    _call(linear.kernel, _address_of(linear), x, y, start, stop)
    if linear.bias:
        for row in range(start, stop):
            put_float(y + 4 * row, float_at(y + 4 * row) + float_at(linear.bias + 4 * row))


def _entry(name: str, dot: Any) -> Callable[..., None]:
    """A routine of `dots.py`, called with the address of its LINEAR record."""

    def kernel(record, x, y, start, stop):  # type: ignore[no-untyped-def]
        dot(_linear_at(record), x, y, start, stop)

    kernel.__name__ = kernel.__qualname__ = f"entry_{name}"  # the name under which its code is cached
    return kernel


@lru_cache
def compiled(name: str) -> Any:
    """A kernel by the name of its routine in `dots.py` or `byte_dots.py`; its `address` stays what it is."""
    return entry(_entry(name, ROUTINES[name] if name in ROUTINES else byte_routine(name)), _SIGNATURE)
