"""Runs kernels in the threads that torch computes with, where these are GNU OpenMP's, as on Linux.

After an operator of torch they spin for a while before they sleep, so work given to them starts at once:
1 microsecond from the call to the return of a kernel that does nothing, on two threads of Zen 5, and 54
where each thread enters it from Python, whose lock they then hand to each other.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch  # loads the OpenMP that is looked for below
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from qconvert.quant.simd.lanes import kernel, primitive
from qconvert.runtime.cpu.simd import I8, I32

_POINTER = I8.as_pointer()


class _OpenMP(NamedTuple):
    """Addresses of `GOMP_parallel` of libgomp's binary interface (libgomp/parallel.c), of
    `omp_get_thread_num` and `omp_get_num_threads`.
    """

    parallel: int
    thread_number: int
    number_of_threads: int


class SharedKernel:
    """A kernel that threads share: called without its last two arguments, a thread's rank and their number.

    `share` is a routine that does the part of one thread. It raises nothing.
    """

    def __init__(self, share: Callable[..., None]) -> None:
        def launch(parallel, thread_number, number_of_threads, threads, *args):  # type: ignore[no-untyped-def]
            _in_openmp(share, parallel, thread_number, number_of_threads, threads, args)

        launch.__name__ = launch.__qualname__ = f"{share.__module__}.{share.__name__}"
        self._launch, self._alone = kernel(launch, by_name=True), kernel(share)

    def __call__(self, *args: Any, threads: int | None = None) -> None:
        """Run it in so many threads at once, this one among them; as many as torch uses by default.

        There may be fewer where OpenMP has fewer to give.
        """
        count, openmp = threads or torch.get_num_threads(), _openmp()
        if openmp is not None:
            self._launch(*openmp, count, *args)
            return
        others = [_pool(count).submit(partial(self._alone, *args, rank, count)) for rank in range(1, count)]
        self._alone(*args, 0, count)
        for other in others:
            other.result()


@primitive
def _in_openmp(typing, share, parallel, thread_number, number_of_threads, threads, args):  # type: ignore[no-untyped-def]
    """Call a routine in an OpenMP team, by the addresses of OpenMP's functions; `args` is a tuple.

    OpenMP calls a function of one pointer in every thread: one is made here that takes the arguments out of
    memory, asks for its rank and the number of threads, and calls the routine.
    """
    part = types.void(*args.types, types.intp, types.intp)

    def emit(context: Any, builder: Any, _: Any, values: Any) -> Any:
        parallel, thread_number, number_of_threads, threads, packed = values[1:]
        made = context.compile_subroutine(builder, share.typing_key, part)
        arguments = cgutils.unpack_tuple(builder, packed, len(args.types))  # type: ignore[no-untyped-call]
        held = _stored(builder, [thread_number, number_of_threads, *arguments])

        name = builder.module.get_unique_name("thread")
        body = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_POINTER]), name)
        body.linkage = "internal"
        inside = ir.IRBuilder(body.append_basic_block())
        rank, size, *taken = _loaded(inside, inside.bitcast(body.args[0], held.type))
        numbers = [inside.sext(_answer(inside, ask), ask.type) for ask in (rank, size)]
        context.call_internal_no_propagate(inside, made.fndesc, part, [*taken, *numbers])
        inside.ret_void()

        start = ir.FunctionType(ir.VoidType(), [body.type, _POINTER, I32, I32]).as_pointer()
        given = [body, builder.bitcast(held, _POINTER), builder.trunc(threads, I32), ir.Constant(I32, 0)]
        builder.call(builder.inttoptr(parallel, start), given)
        return context.get_dummy_value()

    return types.void(share, parallel, thread_number, number_of_threads, threads, args), emit


def _stored(builder: Any, values: list[Any]) -> Any:
    """The address of a struct of these values."""
    struct = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in values]))  # type: ignore[no-untyped-call]
    for at, value in enumerate(values):
        builder.store(value, cgutils.gep_inbounds(builder, struct, 0, at))  # type: ignore[no-untyped-call]
    return struct


def _loaded(builder: Any, struct: Any) -> list[Any]:
    """The values of a struct at an address."""
    count = len(struct.type.pointee.elements)
    return [builder.load(cgutils.gep_inbounds(builder, struct, 0, at)) for at in range(count)]  # type: ignore[no-untyped-call]


def _answer(builder: Any, address: Any) -> Any:
    """The int32 that the function at an address returns."""
    return builder.call(builder.inttoptr(address, ir.FunctionType(I32, []).as_pointer()), [])


@lru_cache(maxsize=1)
def _openmp() -> _OpenMP | None:
    """OpenMP as torch loaded it; LLVM's and Intel's on Linux have the same functions."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        found = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except AttributeError:
        return None
    return _OpenMP(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found))


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="qconvert")
