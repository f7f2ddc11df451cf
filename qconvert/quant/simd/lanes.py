"""Sixteen float32 numbers as one value inside numba code: how do exact kernels become SIMD code?

A lane usually holds one block. A sum over a block's elements is then a chain of additions that stays in
element order in every lane, so sixteen blocks are encoded at once and each gets the bits of the
sequential C code. Operators on lanes are IEEE float32: nothing is fused or reassociated, and a
float64 operand is a typing error, so no wider arithmetic slips in. LLVM splits the sixteen into what
the processor has (one AVX-512, two AVX or four NEON registers).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils, sigutils
from numba.core.ccallback import CFunc
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, register_jitable, register_model

LANES = 16


@lru_cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells whether the code of kernels in a folder changed: theirs, and that of the routines here."""
    paths = sorted({*Path(__file__).parent.rglob("*.py"), *folder.rglob("*.py")})
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)


def _watch(cache: Any, function: Callable[..., Any]) -> None:
    """Have stored code made anew when a routine in another file than the kernel's changes."""
    stored = cache._cache_file
    stored._source_stamp = (stored._source_stamp, _sources(Path(function.__code__.co_filename).parent))


def kernel(function: Callable[..., Any]) -> Any:
    """An entry point of compiled code: holds no lock, is cached on disk, divides by zero as C does."""
    compiled = partial(njit, nogil=True, error_model="numpy")
    try:
        dispatcher: Any = compiled(cache=True)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return compiled()(function)
    _watch(dispatcher._cache, function)
    return dispatcher


def entry(function: Callable[..., Any], signature: Any) -> Any:
    """Code that kernels call by its `address`, as C does; compiled here, or loaded as kernels are."""
    compiled: Any = CFunc(function, sigutils.normalize_signature(signature), {}, {"error_model": "numpy"})  # type: ignore[no-untyped-call]
    try:
        compiled.enable_caching()
    except RuntimeError:
        pass
    else:
        _watch(compiled._cache, function)
    compiled.compile()
    return compiled


# A part of kernels, compiled and cached with them (without the wrappers that make it callable from Python,
# which would take longer to compile than itself); outside of kernels it is a plain Python function.
routine = register_jitable(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)


class _Lanes(types.Type):
    """Sixteen float32 numbers."""


class _Mask(types.Type):
    """Sixteen truth values."""


lanes_type = _Lanes("lanes")
mask_type = _Mask("mask")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)  # type: ignore[no-untyped-call]


@register_model(_Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _BITS)  # type: ignore[no-untyped-call]


def _spread(builder: Any, value: Any, vector: Any) -> Any:
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def primitive(function: Callable[..., Any]) -> Any:
    """A function of numba code that is written as LLVM instructions."""
    return intrinsic(function)


def call_llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
    return builder.call(function, args)


def _define(op: Callable[..., Any], result: Any, emit: Callable[..., Any], *operands: Any) -> None:
    """Give an operator a meaning on `operands`, widening scalar float32 operands to lanes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = [
            _spread(builder, arg, _FLOATS) if kind == types.float32 else arg
            for kind, arg in zip(sig.args, args, strict=True)
        ]
        return emit(builder, *wide)

    cases = [signature(result, *operands)]  # type: ignore[no-untyped-call]
    members = {"cases": cases, "exact_match_required": True}
    template = type(f"Lanes_{op.__name__}", (ConcreteTemplate,), members)
    infer_global(op)(template)  # type: ignore[no-untyped-call]
    lower_builtin(op, *operands)(lower)  # type: ignore[no-untyped-call]


def _compare(sign: str) -> Callable[..., Any]:
    return lambda builder, a, b: builder.fcmp_ordered(sign, a, b)


for _op, _result, _emit in (
    (operator.add, lanes_type, lambda builder, a, b: builder.fadd(a, b)),
    (operator.sub, lanes_type, lambda builder, a, b: builder.fsub(a, b)),
    (operator.mul, lanes_type, lambda builder, a, b: builder.fmul(a, b)),
    (operator.truediv, lanes_type, lambda builder, a, b: builder.fdiv(a, b)),
    (operator.lt, mask_type, _compare("<")),
    (operator.gt, mask_type, _compare(">")),
    (operator.eq, mask_type, _compare("==")),
    (operator.ne, mask_type, lambda builder, a, b: builder.fcmp_unordered("!=", a, b)),
):
    for _operands in (
        (lanes_type, lanes_type),
        (lanes_type, types.float32),
        (types.float32, lanes_type),
    ):
        _define(_op, _result, _emit, *_operands)
_define(operator.and_, mask_type, lambda builder, a, b: builder.and_(a, b), mask_type, mask_type)
_define(operator.neg, lanes_type, lambda builder, a: builder.fneg(a), lanes_type)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Read sixteen neighbours of a flat array and widen them to float32.

    The array's dtype says how: float32 as it is, uint8 as whole numbers, uint16 as bfloat16, int16 as
    IEEE half (numba has no half-precision arrays on CPUs).
    """
    data = context.make_array(array_type)(context, builder, array).data
    element = data.type.pointee
    pointer = builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, LANES).as_pointer())
    stored = builder.load(pointer, align=array_type.dtype.bitwidth // 8)
    if array_type.dtype == types.float32:
        return stored
    bits = builder.zext(stored, _INTS)
    if array_type.dtype == types.uint8:
        return builder.uitofp(bits, _FLOATS)
    if array_type.dtype == types.uint16:
        return builder.bitcast(builder.shl(bits, _ints(16)), _FLOATS)
    return widen_halves(builder, bits)


def widen_halves(builder: Any, bits: Any) -> Any:
    """Half-precision numbers, as int32 of their bits, as float32; for code that emits instructions."""
    magnitude = builder.shl(builder.and_(bits, _ints(0x7FFF)), _ints(13))
    # The exponent moves from bias 15 to bias 127 by an exact product, which also normalises denormals.
    finite = builder.fmul(builder.bitcast(magnitude, _FLOATS), _floats(2.0**112))
    endless = builder.bitcast(builder.or_(magnitude, _ints(0x7F800000)), _FLOATS)
    is_finite = builder.icmp_unsigned("<", magnitude, _ints(0x7C00 << 13))
    value = builder.bitcast(builder.select(is_finite, finite, endless), _INTS)
    sign = builder.shl(builder.and_(bits, _ints(0x8000)), _ints(16))
    return builder.bitcast(builder.or_(value, sign), _FLOATS)


@primitive
def load(typing: Any, array: Any, index: Any) -> Any:
    """Sixteen neighbours `array[index:index + 16]` of a flat array, widened to float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(context, builder, sig.args[0], *args)

    return lanes_type(array, types.intp), emit


def _store(context: Any, builder: Any, array_type: Any, array: Any, index: Any, value: Any) -> None:
    data = context.make_array(array_type)(context, builder, array).data
    if array_type.dtype == types.uint8:
        value = builder.trunc(builder.fptosi(value, _INTS), ir.VectorType(ir.IntType(8), LANES))
    pointer = builder.bitcast(builder.gep(data, [index]), value.type.as_pointer())
    builder.store(value, pointer, align=array_type.dtype.bitwidth // 8)


@primitive
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write lanes to `array[index:index + 16]` of a flat float32 or uint8 array.

    Bytes take the lowest eight bits of whole numbers below 2**31, negative ones in two's complement.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(context, builder, sig.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), emit


@primitive
def load_columns(typing: Any, array: Any, starts: Any, offset: Any, out: Any, at: Any, step: Any) -> Any:
    """Turn sixteen runs of sixteen neighbours by a quarter: a run becomes a lane.

    `out[at + step * e + lane] = array[starts[lane] + offset + e]` for e below 16. `starts` is a flat
    intp array of sixteen; `array` is read as by `load`, `out` written as by `store`.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, starts, offset, out, at, step = args
        start_data = context.make_array(sig.args[1])(context, builder, starts).data
        runs = []
        for lane in range(LANES):
            start = builder.load(builder.gep(start_data, [ir.Constant(at.type, lane)]))
            runs.append(_load(context, builder, sig.args[0], array, builder.add(start, offset)))
        for element, value in enumerate(_transposed(builder, runs)):
            index = builder.add(at, builder.mul(step, ir.Constant(at.type, element)))
            _store(context, builder, sig.args[3], out, index, value)
        return context.get_dummy_value()

    return types.void(array, starts, types.intp, out, types.intp, types.intp), emit


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square of lanes: exchange its off-diagonal quarters, then theirs, and so on."""
    step = LANES // 2
    while step:
        upper = [lane if not lane & step else LANES + (lane ^ step) for lane in range(LANES)]
        lower = [(lane | step) if not lane & step else LANES + lane for lane in range(LANES)]
        for row in range(LANES):
            if not row & step:
                a, b = rows[row], rows[row | step]
                rows[row] = builder.shuffle_vector(a, b, ir.Constant(_INTS, upper))
                rows[row | step] = builder.shuffle_vector(a, b, ir.Constant(_INTS, lower))
        step //= 2
    return rows


@primitive
def splat(typing: Any, value: Any) -> Any:
    """The same float32 in every lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _spread(builder, args[0], _FLOATS)

    return lanes_type(types.float32), emit


@primitive
def where(typing: Any, mask: Any, yes: Any, no: Any) -> Any:
    """`yes` in the lanes where the mask holds, `no` in the others."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*args)

    return lanes_type(mask_type, lanes_type, lanes_type), emit


@primitive
def first(typing: Any, mask: Any) -> Any:
    """The number of the first lane where the mask holds, 16 when there is none."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))
        marked = builder.or_(bits, ir.Constant(bits.type, 1 << LANES))
        return builder.cttz(marked, ir.Constant(ir.IntType(1), 1))

    return types.intp(mask_type), emit


@primitive
def mask_bits(typing: Any, mask: Any) -> Any:
    """The mask as a 16-bit number: bit k is set when it holds in lane k."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))

    return types.intp(mask_type), emit


@primitive
def lane(typing: Any, value: Any, index: Any) -> Any:
    """The number in one lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(*args)

    return types.float32(lanes_type, types.intp), emit


@primitive
def peak(typing: Any, value: Any) -> Any:
    """The largest magnitude among the lanes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # Without the sign bit, floats are ordered as their bits are.
        magnitudes = builder.and_(builder.bitcast(args[0], _INTS), _ints(0x7FFFFFFF))
        return builder.bitcast(call_llvm(builder, "llvm.vector.reduce.umax.v16i32", _I32, magnitudes), _F32)

    return types.float32(lanes_type), emit


def _folded(builder: Any, value: Any, sign: str) -> Any:
    step = LANES // 2
    while step:
        swapped = ir.Constant(_INTS, [lane ^ step for lane in range(LANES)])
        other = builder.shuffle_vector(value, value, swapped)
        value = builder.select(builder.fcmp_ordered(sign, value, other), value, other)
        step //= 2
    return builder.extract_element(value, ir.Constant(_I32, 0))


@primitive
def lowest(typing: Any, value: Any) -> Any:
    """The smallest number among the lanes (a zero of either sign when that is zero)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _folded(builder, args[0], "<")

    return types.float32(lanes_type), emit


@primitive
def highest(typing: Any, value: Any) -> Any:
    """The largest number among the lanes (a zero of either sign when that is zero)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _folded(builder, args[0], ">")

    return types.float32(lanes_type), emit


@primitive
def absolute(typing: Any, value: Any) -> Any:
    """Magnitudes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.fabs.v16f32", _FLOATS, args[0])

    return lanes_type(lanes_type), emit


@primitive
def square_root(typing: Any, value: Any) -> Any:
    """Correctly rounded square roots."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.sqrt.v16f32", _FLOATS, args[0])

    return lanes_type(lanes_type), emit


@primitive
def nearest(typing: Any, value: Any) -> Any:
    """Whole numbers by ggml's `nearest_int`: half to even, read off the mantissa of value + 1.5 * 2**23.

    Beyond +-4194303 it yields what those mantissa bits say, which is nonsense but the same nonsense
    as the reference (its searches do get there, when a block's minimum lands next to its maximum).
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shifted = builder.bitcast(builder.fadd(args[0], _floats(12582912.0)), _INTS)
        whole = builder.sub(builder.and_(shifted, _ints(0x7FFFFF)), _ints(0x400000))
        return builder.sitofp(whole, _FLOATS)

    return lanes_type(lanes_type), emit


@primitive
def truncated(typing: Any, value: Any) -> Any:
    """Whole numbers towards zero; 0 for NaN and magnitudes of 2**31 or more, as cvttss2si's low byte."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = call_llvm(builder, "llvm.trunc.v16f32", _FLOATS, args[0])
        size = call_llvm(builder, "llvm.fabs.v16f32", _FLOATS, args[0])
        return builder.select(builder.fcmp_ordered("<", size, _floats(2.0**31)), whole, _floats(0.0))

    return lanes_type(lanes_type), emit


@primitive
def rounded_even(typing: Any, value: Any) -> Any:
    """Whole numbers by C's `rintf`, half to even."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.rint.v16f32", _FLOATS, args[0])

    return lanes_type(lanes_type), emit


@primitive
def rounded_away(typing: Any, value: Any) -> Any:
    """Whole numbers by C's `roundf`, half away from zero."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.round.v16f32", _FLOATS, args[0])

    return lanes_type(lanes_type), emit


@routine
def clamp(value: Any, low: Any, high: Any) -> Any:
    """Lanes limited to the float32 numbers [low, high]."""
    value = where(value < high, value, splat(high))
    return where(value > low, value, splat(low))
