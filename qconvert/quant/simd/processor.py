"""Chooses the processor's instructions that kernels are made of: once, before the first is compiled.

The choice is what the processor has, as LLVM sees it, or less where the environment variable
`QCONVERT_CPU` selects less. Machine code is cached apart for each choice.
"""

from __future__ import annotations

import os
from functools import lru_cache

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba import config
from numba.core.registry import cpu_target

from qconvert.errors import BadRecipe

VARIABLE = "QCONVERT_CPU"
_SETS = {
    "avx2": ("avx2",),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "vnni": ("avx512vnni",),
    "bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-bf16"),
}
"""Instruction sets that decide how products are made, each needing those before it, as LLVM names them."""
_ABOVE = {
    "avx2": ("avx512", "avx10", "avxvnni", "avxifma", "avxneconvert", "amx"),
    "avx512": (
        "avx512vnni",
        "avx512bf16",
        "avx512vbmi",
        "avx512fp16",
        "avx512vp2",
        "avx10",
        "avxvnni",
        "amx",
    ),
    "vnni": ("avx512bf16", "avx512fp16", "avx10", "amx"),
    "bf16": ("amx",),
    "amx": (),
}
"""How the names of LLVM's features begin that a choice leaves out."""


@lru_cache
def choose() -> str | None:
    """Tell numba what to compile for; returns what `QCONVERT_CPU` selects, None for all there is.

    Later calls change nothing. Raises BadRecipe for an unknown name, or one that the processor lacks.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    if asked not in _SETS:
        raise BadRecipe(f"{VARIABLE}={asked}: no such choice", f"take one of {', '.join(_SETS)}")
    features = llvm.get_host_cpu_features()
    missing = [name for name in _SETS[asked] if not features.get(name)]
    if missing:
        raise BadRecipe(f"{VARIABLE}={asked}: this processor lacks {', '.join(missing)}", f"unset {VARIABLE}")
    for name in features:
        if name.startswith(_ABOVE[asked]):
            features[name] = False
    config.CPU_NAME, config.CPU_FEATURES = llvm.get_host_cpu_name(), features.flatten()  # type: ignore[attr-defined]
    return asked


@lru_cache
def compiled_for() -> tuple[str, str, frozenset[str]]:
    """What machine code is made for: LLVM's target, its name of the processor, the features it may use."""
    choose()
    target, name, features = cpu_target.target_context.codegen().magic_tuple()
    present = (feature[1:] for feature in str(features).split(",") if feature.startswith("+"))
    return str(target), str(name), frozenset(present)


def has(*features: str) -> bool:
    """Whether kernels may use instructions that LLVM calls so."""
    return compiled_for()[2].issuperset(features)


def is_arm() -> bool:
    """Whether kernels are compiled for a 64-bit ARM."""
    return compiled_for()[0].startswith(("aarch64", "arm64"))


def instruction_sets() -> tuple[str, ...]:
    """Those sets that decide how products are made, the least first: `avx2` to `amx`."""
    return tuple(name for name, features in _SETS.items() if has(*features))


def multiplies_bf16() -> bool:
    """Whether kernels multiply bfloat16 numbers without widening them."""
    return has("avx512bf16", "avx512bw")


def multiplies_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 numbers (AMX), as torch does and kernels cannot."""
    return has("amx-tile", "amx-bf16")


@lru_cache
def halves_512() -> bool:
    """Whether the processor takes instructions on 512 bits in two halves, as Zen 4 (`znver4`) does.

    They then save instructions, but moving numbers from half to half costs more than it does in 256 bits.
    """
    return has("avx512bw") and compiled_for()[1] == "znver4"


@lru_cache
def widens_bf16() -> bool:
    """Whether many products of bfloat16 numbers are faster as float32 ones: on Intel's processors that have
    pairs of bfloat16 but no AMX.

    Their instruction of pairs makes 32 products in two cycles, those of float32 make 32 in one. AMD's
    processors, which LLVM calls `znver4` and so on, take pairs in one cycle.
    """
    features, name = llvm.get_host_cpu_features(), llvm.get_host_cpu_name()
    pairs = features.get("avx512bf16") and has("avx512bw")
    return bool(pairs) and not features.get("amx-bf16") and not name.startswith("znver")


def in_words() -> str:
    """The choice, for `qconvert env`: the processor, its sets, and how the kernels multiply."""
    _, name, _ = compiled_for()
    sets = ", ".join(instruction_sets()) or ("neon" if is_arm() else "none of " + ", ".join(_SETS))
    integers = "vnni" if has("avx512vnni") or has("avxvnni") else "16-bit pairs"
    floats = "bf16 pairs" if multiplies_bf16() else "float32"
    floats = "torch's AMX tiles" if multiplies_tiles() else floats
    asked = f"; {VARIABLE}={choose()}" if choose() else ""
    return f"{name}: {sets}; codes by {integers}, bfloat16 by {floats}{asked}"
