"""Defines a sixteen-float32 vector type for numba code, so that bit-exact kernels become SIMD code.

A lane usually holds one block. A sum over a block's elements is then a chain of additions in element order in
every lane, so sixteen blocks are encoded at once and each gets the bits of the sequential C code. Operators
are IEEE float32: nothing is fused or reassociated, and a float64 operand is a typing error, so no wider
arithmetic slips in. LLVM splits the sixteen into the processor's registers (one AVX-512, two AVX or four
NEON).
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

from qconvert.quant.simd.compiler_events import KERNELS

LANES = 16


@lru_cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns names, times and sizes of the sources of kernels in a folder, and of the routines here."""
    paths = sorted({*Path(__file__).parent.rglob("*.py"), *folder.rglob("*.py")})
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)


def _watch(cache: Any, function: Callable[..., Any]) -> None:
    """Invalidates the cached machine code also when a routine in another file than the kernel's changes."""
    stored = cache._cache_file
    # In the version, which is compared before anything is unpickled: a class of the stored code may be gone.
    stored._version = (stored._version, _sources(Path(function.__code__.co_filename).parent))


def _find_by_name(cache: Any, function: Callable[..., Any]) -> None:
    """Caches code under the name of a function alone, which says what its closure holds.

    numba adds a hash of the pickled closure: of a routine there, which is another in every process.
    """
    cache._index_key = lambda signature, codegen: (signature, codegen.magic_tuple(), function.__qualname__)


def kernel(function: Callable[..., Any], *, by_name: bool = False) -> Any:
    """Compiles an entry point: releases the GIL, is cached on disk, divides by zero as C does.

    With `by_name`, its name says what its closure holds. Arrays are copied to parts of others in loops: for
    `a[:n] = b` numba compiles the words of an error, which takes 2 seconds.
    """
    compiled = partial(njit, nogil=True, error_model="numpy")
    try:
        dispatcher: Any = compiled(cache=True)(function)
    except RuntimeError:  # numba found no writable cache folder
        dispatcher = compiled()(function)
    else:
        _watch(dispatcher._cache, function)
        if by_name:
            _find_by_name(dispatcher._cache, function)
    KERNELS.add(dispatcher)
    return dispatcher


def entry(function: Callable[..., Any], signature: Any) -> Any:
    """Compiles a function that kernels call by its `address`, as C does; cached by its name."""
    compiled: Any = CFunc(function, sigutils.normalize_signature(signature), {}, {"error_model": "numpy"})  # type: ignore[no-untyped-call]
    try:
        compiled.enable_caching()
    except RuntimeError:
        pass
    else:
        _watch(compiled._cache, function)
        _find_by_name(compiled._cache, function)
    compiled.compile()
    return compiled


# A part of kernels, compiled and cached with them (without wrappers callable from Python, which would take
# longer to compile than the routine); outside of kernels it is a plain Python function.
routine = register_jitable(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
# The same for a small one of inner loops that several routines call: LLVM would not copy it into all of them.
inlined: Any = register_jitable(
    error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True
)

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)


class _Lanes(types.Type):
    """The type of sixteen float32 numbers."""


class _Mask(types.Type):
    """The type of sixteen truth values."""


lanes_type = _Lanes("lanes")
mask_type = _Mask("mask")


register_model(_Lanes)(lambda manager, kind: models.PrimitiveModel(manager, kind, _FLOATS))  # type: ignore[no-untyped-call]
register_model(_Mask)(lambda manager, kind: models.PrimitiveModel(manager, kind, _BITS))  # type: ignore[no-untyped-call]


def spread(builder: Any, value: Any, vector: Any) -> Any:
    """Emits instructions that copy a number to every element of a vector."""
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_I32, vector.count), None))


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def primitive(function: Callable[..., Any]) -> Any:
    """Declares a function of numba code that is written as LLVM instructions."""
    return intrinsic(function)


def call_llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Calls an LLVM intrinsic."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
    return builder.call(function, args)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emits `a * b + c` of vectors of float32, rounded once."""
    return call_llvm(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def _define(op: Callable[..., Any], result: Any, emit: Callable[..., Any], *operands: Any) -> None:
    """Defines an operator on `operands`, broadcasting scalar float32 operands to lanes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = [
            spread(builder, arg, _FLOATS) if kind == types.float32 else arg
            for kind, arg in zip(sig.args, args, strict=True)
        ]
        return emit(builder, *wide)

    cases = [signature(result, *operands)]  # type: ignore[no-untyped-call]
    members = {"cases": cases, "exact_match_required": True}
    template = type(f"Lanes_{op.__name__}", (ConcreteTemplate,), members)
    infer_global(op)(template)  # type: ignore[no-untyped-call]
    lower_builtin(op, *operands)(lower)  # type: ignore[no-untyped-call]


for _op, _result, _emit in (
    (operator.add, lanes_type, lambda builder, a, b: builder.fadd(a, b)),
    (operator.sub, lanes_type, lambda builder, a, b: builder.fsub(a, b)),
    (operator.mul, lanes_type, lambda builder, a, b: builder.fmul(a, b)),
    (operator.truediv, lanes_type, lambda builder, a, b: builder.fdiv(a, b)),
    (operator.lt, mask_type, lambda builder, a, b: builder.fcmp_ordered("<", a, b)),
    (operator.gt, mask_type, lambda builder, a, b: builder.fcmp_ordered(">", a, b)),
    (operator.eq, mask_type, lambda builder, a, b: builder.fcmp_ordered("==", a, b)),
    (operator.ne, mask_type, lambda builder, a, b: builder.fcmp_unordered("!=", a, b)),
):
    for _operands in ((lanes_type, lanes_type), (lanes_type, types.float32), (types.float32, lanes_type)):
        _define(_op, _result, _emit, *_operands)
_define(operator.and_, mask_type, lambda builder, a, b: builder.and_(a, b), mask_type, mask_type)
_define(operator.neg, lanes_type, lambda builder, a: builder.fneg(a), lanes_type)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Loads sixteen consecutive elements of a flat array, widened to float32.

    By the array's dtype: float32 unchanged, uint8 as integers, uint16 as bfloat16, int16 as IEEE half (numba
    has no half-precision arrays on CPUs).
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
    """Emits instructions that widen half-precision numbers, given as the int32 of their bits, to float32."""
    magnitude = builder.shl(builder.and_(bits, _ints(0x7FFF)), _ints(13))
    # An exact product moves the exponent from bias 15 to bias 127, and normalises denormals.
    finite = builder.fmul(builder.bitcast(magnitude, _FLOATS), _floats(2.0**112))
    infinite = builder.bitcast(builder.or_(magnitude, _ints(0x7F800000)), _FLOATS)
    is_finite = builder.icmp_unsigned("<", magnitude, _ints(0x7C00 << 13))
    value = builder.bitcast(builder.select(is_finite, finite, infinite), _INTS)
    sign = builder.shl(builder.and_(bits, _ints(0x8000)), _ints(16))
    return builder.bitcast(builder.or_(value, sign), _FLOATS)


@primitive
def load(typing: Any, array: Any, index: Any) -> Any:
    """Returns the sixteen elements `array[index:index + 16]` of a flat array, widened to float32 (see
    `_load`).
    """

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
    """Writes lanes to `array[index:index + 16]` of a flat float32 or uint8 array.

    Bytes take the lowest eight bits of integers below 2**31, negative ones in two's complement.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(context, builder, sig.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), emit


@primitive
def load_columns(typing: Any, array: Any, starts: Any, offset: Any, out: Any, at: Any, step: Any) -> Any:
    """Transposes sixteen runs of sixteen consecutive elements: a run becomes a lane.

    `out[at + step * e + lane] = array[starts[lane] + offset + e]` for e below 16. `starts` is a flat intp
    array of sixteen; `array` is read as by `load`, `out` written as by `store`.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, starts, offset, out, at, step = args
        start_data = context.make_array(sig.args[1])(context, builder, starts).data
        runs = []
        for lane in range(LANES):
            start = builder.load(builder.gep(start_data, [ir.Constant(at.type, lane)]))
            runs.append(_load(context, builder, sig.args[0], array, builder.add(start, offset)))
        for element, value in enumerate(transposed_lanes(builder, runs)):
            index = builder.add(at, builder.mul(step, ir.Constant(at.type, element)))
            _store(context, builder, sig.args[3], out, index, value)
        return context.get_dummy_value()

    return types.void(array, starts, types.intp, out, types.intp, types.intp), emit


def transposed_lanes(builder: Any, rows: list[Any]) -> list[Any]:
    """Transposes a square of lanes: swaps its off-diagonal quarters, then recursively theirs."""
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


def _unary(result: Any, operand: Any, instructions: Callable[[Any, Any], Any]) -> Any:
    """Declares a function of one value that is written as LLVM instructions."""

    def unary(typing: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return instructions(builder, args[0])

        return result(operand), emit

    return primitive(unary)


# The same float32 in every lane.
splat = _unary(lanes_type, types.float32, lambda builder, value: spread(builder, value, _FLOATS))


@primitive
def where(typing: Any, mask: Any, yes: Any, no: Any) -> Any:
    """Returns `yes` in the lanes where the mask is set, `no` in the others."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*args)

    return lanes_type(mask_type, lanes_type, lanes_type), emit


def _bits(builder: Any, mask: Any) -> Any:
    return builder.zext(builder.bitcast(mask, ir.IntType(LANES)), ir.IntType(64))


def _first(builder: Any, mask: Any) -> Any:
    bits = _bits(builder, mask)
    marked = builder.or_(bits, ir.Constant(bits.type, 1 << LANES))
    return builder.cttz(marked, ir.Constant(ir.IntType(1), 1))


# The mask as a 16-bit integer (bit k is lane k), and the index of the first lane that is set (16: none).
mask_bits = _unary(types.intp, mask_type, _bits)
first = _unary(types.intp, mask_type, _first)


@primitive
def lane(typing: Any, value: Any, index: Any) -> Any:
    """Returns the number in one lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(*args)

    return types.float32(lanes_type, types.intp), emit


def _peak(builder: Any, value: Any) -> Any:
    # Without the sign bit, floats sort as their bits do.
    magnitudes = builder.and_(builder.bitcast(value, _INTS), _ints(0x7FFFFFFF))
    return builder.bitcast(call_llvm(builder, "llvm.vector.reduce.umax.v16i32", _I32, magnitudes), _F32)


# The largest magnitude among the lanes.
peak = _unary(types.float32, lanes_type, _peak)


def _reduction(sign: str) -> Any:
    """Defines the number among the lanes that compares so with all others (either zero if that is zero)."""

    def reduce(builder: Any, value: Any) -> Any:
        for step in (8, 4, 2, 1):
            swapped = ir.Constant(_INTS, [lane ^ step for lane in range(LANES)])
            other = builder.shuffle_vector(value, value, swapped)
            value = builder.select(builder.fcmp_ordered(sign, value, other), value, other)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return _unary(types.float32, lanes_type, reduce)


lowest = _reduction("<")
highest = _reduction(">")


def _lanewise(name: str) -> Any:
    """Defines the LLVM intrinsic of this name on lanes."""
    return _unary(lanes_type, lanes_type, lambda builder, value: call_llvm(builder, name, _FLOATS, value))


absolute = _lanewise("llvm.fabs.v16f32")
square_root = _lanewise("llvm.sqrt.v16f32")
rounded_even = _lanewise("llvm.rint.v16f32")  # C's rintf
rounded_away = _lanewise("llvm.round.v16f32")  # C's roundf


def _nearest(builder: Any, value: Any) -> Any:
    """Rounds as ggml's `nearest_int`: half to even, from the mantissa bits of value + 1.5 * 2**23.

    Beyond +-4194303 those bits are nonsense, but the same nonsense as the reference (its searches do get
    there, when a block's minimum is next to its maximum).
    """
    shifted = builder.bitcast(builder.fadd(value, _floats(12582912.0)), _INTS)
    whole = builder.sub(builder.and_(shifted, _ints(0x7FFFFF)), _ints(0x400000))
    return builder.sitofp(whole, _FLOATS)


def _truncated(builder: Any, value: Any) -> Any:
    """Rounds towards zero; 0 for NaN and magnitudes of 2**31 or more, as cvttss2si's low byte."""
    whole = call_llvm(builder, "llvm.trunc.v16f32", _FLOATS, value)
    size = call_llvm(builder, "llvm.fabs.v16f32", _FLOATS, value)
    return builder.select(builder.fcmp_ordered("<", size, _floats(2.0**31)), whole, _floats(0.0))


nearest = _unary(lanes_type, lanes_type, _nearest)
truncated = _unary(lanes_type, lanes_type, _truncated)


@routine
def clamp(value: Any, low: Any, high: Any) -> Any:
    """Limits lanes to the float32 range [low, high]."""
    value = where(value < high, value, splat(high))
    return where(value > low, value, splat(low))
