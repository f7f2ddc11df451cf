"""Triton's interpreter on a CPU, without the work that tells nothing new: a third of its time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def patch_once() -> None:
    """Have the interpreter patch triton's language once for a launch, not for each function called in it.

    A call of a function from a kernel patches the same attributes of the same modules, which takes 0.2 ms,
    and leaves them to the launch to restore. A triton whose interpreter has another form stays as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return
    interpreter._patch_lang = _patched_once(interpreter._patch_lang, interpreter._LangPatchScope, tl)


def trust_integers() -> None:
    """Leave out the interpreter's check of every sum and product of integers for overflow.

    It takes a third of all time; tests/runtime/interpreted_*.py keep it, for the same kernels.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


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
