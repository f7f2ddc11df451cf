"""Triton's interpreter on a CPU, in half of its time: what it does for every operation, at less cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

_EXACT: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def hasten() -> None:
    """Have the interpreter patch triton's language once for a launch, and look for overflows in numpy.

    A call of a function from a kernel patches the same attributes of the same modules, which takes 0.2 ms,
    and leaves them to the launch to restore. Every sum and product of integers is computed in 64 bits too and
    compared with what its type holds, by six more interpreted operations, a third of all time; what they find
    is dropped unless triton debugs. Here it is an error. A triton of another form stays as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patched_once(interpreter._patch_lang, interpreter._LangPatchScope, tl)
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    if hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        semantic.binary_op_sanitize_overflow_impl = _refuse_overflow


def _refuse_overflow(left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """Raise an AssertionError where a sum or product of integers is beyond their type."""
    kind = left.type.scalar
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACT[operation.__name__](*(each.handle.data.astype(np.int64) for each in (left, right)))
    if exact.size and (exact.max() > kind.get_int_max_value() or exact.min() < kind.get_int_min_value()):
        raise AssertionError(f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}")


def _patched_once(
    patch: Callable[[Any], Any], scope_class: Callable[[], Any], tl: Any
) -> Callable[[Any], Any]:
    patched: set[int] = set()  # ids of the modules that a launch in progress has patched

    def patch_unless_patched(fn: Any) -> Any:
        found = {id(value) for value in fn.__globals__.values() if inspect.ismodule(value)}
        wanted = found & {id(tl), id(tl.core)}
        if wanted and wanted <= patched:
            return scope_class()
        scope = patch(fn)
        restore, mine = scope.restore, wanted - patched
        patched.update(mine)

        def restore_all() -> None:
            restore()
            patched.difference_update(mine)

        scope.restore = restore_all
        return scope

    return patch_unless_patched
