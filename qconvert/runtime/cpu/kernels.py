"""The kernels that records name by address: each is compiled, or loaded, when the first weight needs it.

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


def _float32(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.float32(_linear_at(record), x, y, start, stop)


def _bfloat16(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.bfloat16(_linear_at(record), x, y, start, stop)


def _nibbles_by_blocks(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.nibbles_by_blocks(_linear_at(record), x, y, start, stop)


def _nibbles_by_parts(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.nibbles_by_parts(_linear_at(record), x, y, start, stop)


def _nibbles_by_halves(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.nibbles_by_halves(_linear_at(record), x, y, start, stop)


def _sixes_by_blocks(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.sixes_by_blocks(_linear_at(record), x, y, start, stop)


def _sixes_by_parts(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.sixes_by_parts(_linear_at(record), x, y, start, stop)


def _sixes_by_halves(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.sixes_by_halves(_linear_at(record), x, y, start, stop)


def _looked_up_by_parts(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.looked_up_by_parts(_linear_at(record), x, y, start, stop)


def _looked_up_by_halves(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.looked_up_by_halves(_linear_at(record), x, y, start, stop)


def _bytes_by_blocks(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.bytes_by_blocks(_linear_at(record), x, y, start, stop)


def _bytes_by_parts(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.bytes_by_parts(_linear_at(record), x, y, start, stop)


def _bytes_by_halves(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.bytes_by_halves(_linear_at(record), x, y, start, stop)


def _e4m3(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.e4m3(_linear_at(record), x, y, start, stop)


def _e5m2(record, x, y, start, stop):  # type: ignore[no-untyped-def]
    dots.e5m2(_linear_at(record), x, y, start, stop)


KERNELS: dict[str, Callable[..., None]] = {
    kernel.__name__.removeprefix("_"): kernel
    for kernel in (
        _float32,
        _bfloat16,
        _nibbles_by_blocks,
        _nibbles_by_parts,
        _nibbles_by_halves,
        _sixes_by_blocks,
        _sixes_by_parts,
        _sixes_by_halves,
        _looked_up_by_parts,
        _looked_up_by_halves,
        _bytes_by_blocks,
        _bytes_by_parts,
        _bytes_by_halves,
        _e4m3,
        _e5m2,
    )
}
"""Entry points by the names of their routines in `dots.py`."""


@lru_cache
def _compiled(name: str) -> Any:
    return entry(KERNELS[name], _SIGNATURE)


def kernel_address(name: str) -> int:
    """The address of a kernel by its name in `dots.py`; it stays where it is."""
    address: int = _compiled(name).address
    return address
