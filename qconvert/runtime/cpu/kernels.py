"""Compiles, or loads, the kernels that LINEAR records name by address, when the first weight needs them.

So a model costs the kernels of its own weights and no others, and the decode step is compiled without
any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import from_dtype, types

from qconvert.quant.simd.lanes import entry, primitive
from qconvert.runtime.cpu import dots
from qconvert.runtime.cpu.kernel_args import LINEAR
from qconvert.runtime.cpu.simd import float_at, put_float, routine

_SIGNATURE = types.void(*[types.intp] * 5)
_RECORD = from_dtype(LINEAR)


@primitive
def _linear_at(typing: Any, address: Any) -> Any:
    """The record at a byte address."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(_RECORD))

    return _RECORD(types.intp), emit


@primitive
def _address_of(typing: Any, record: Any) -> Any:
    """Where a record lies."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], context.get_value_type(types.intp))

    return types.intp(record), emit


@primitive
def _call(typing: Any, kernel: Any, record: Any, x: Any, y: Any, start: Any, stop: Any) -> Any:
    """Call the code at an address."""
    from llvmlite import ir  # type: ignore[import-untyped]

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kernel, *rest = args
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in rest])
        builder.call(builder.inttoptr(kernel, kind.as_pointer()), rest)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), emit


@routine
def multiply_rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
    """y[start:stop] of `y = W x + bias`; the width must be a multiple of 32 (dense: of 16)."""
    _call(linear.kernel, _address_of(linear), x, y, start, stop)
    if linear.bias:
        for row in range(start, stop):
            put_float(y + 4 * row, float_at(y + 4 * row) + float_at(linear.bias + 4 * row))


def _entry(name: str) -> Callable[..., None]:
    """The routine of that name in `dots.py`, called with the address of its LINEAR record."""
    dot = getattr(dots, name)

    def kernel(record, x, y, start, stop):  # type: ignore[no-untyped-def]
        dot(_linear_at(record), x, y, start, stop)

    kernel.__name__ = kernel.__qualname__ = f"entry_{name}"  # the name under which its code is cached
    return kernel


_BY_BLOCKS = tuple(f"{kind}_by_blocks" for kind in ("int4", "int6", "int8"))
_BY_PARTS = tuple(
    f"{kind}_by_{part}" for kind in ("int4", "int6", "lut", "int8") for part in ("parts", "half_parts")
)
KERNELS = {name: _entry(name) for name in ("float32", "bfloat16", *_BY_BLOCKS, *_BY_PARTS, "e4m3", "e5m2")}
"""Entry points by the names of their routines in `dots.py`."""


@lru_cache
def _compiled(name: str) -> Any:
    return entry(KERNELS[name], _SIGNATURE)


def kernel_address(name: str) -> int:
    """The address of a kernel by its name in `dots.py`; it stays where it is."""
    address: int = _compiled(name).address
    return address
