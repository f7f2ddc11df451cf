"""Declares activation schemes: how loaders quantize the inputs of a linear before they multiply.

A checkpoint's config says it of its linears; nothing of it is in the weights, but for scales that are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from qconvert.core.dtypes import DType


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How the rows that a linear multiplies are quantized: integers, or with `floats` E4M3 or E2M1.

    One scale is shared by all rows ("tensor"), by a row ("token"), or by each `group_size` columns of a row
    ("group"). `dynamic` scales are of the numbers at hand; others are stored, one for each linear.
    `scale_dtype` is the type that scales are rounded to; E4M3 ones are of numbers times a stored global
    scale (NVFP4), E8M0 ones powers of two (MXFP4). `outliers` is, of LLM.int8, the magnitude from which on a
    whole column stays as it is (infinity: none does); `most`, of FBGEMM, the magnitude that larger numbers
    are cut to. `stored` names the arrays, beside the weight's, of the scale (or the global scale) and of the
    zero point, where there are some; with `inverse`, what is stored is one over the scale that numbers are
    computed with here.
    """

    bits: int
    floats: bool
    shared_by: Literal["tensor", "token", "group"]
    group_size: int | None = None
    dynamic: bool = True
    symmetric: bool = True
    scale_dtype: DType = DType.F32
    outliers: float | None = None
    most: float | None = None
    stored: tuple[str, ...] = ()
    inverse: bool = False

    @property
    def computed(self) -> ActivationScheme:
        """The same products, wherever the numbers for them are stored and under what name."""
        return replace(self, stored=("",) if self.stored else (), inverse=False)

    @property
    def label(self) -> str:
        """What inputs are rounded to, in words: `int8 per token`, `fp8 per group of 128`, `static int8`."""
        kind = f"{'fp' if self.floats else 'int'}{self.bits}{'' if self.symmetric else '-asym'}"
        if not self.dynamic:
            return f"static {kind}"
        shared = f"group of {self.group_size}" if self.shared_by == "group" else self.shared_by
        apart = "" if self.outliers in (None, inf) else " but for outliers"
        return f"{kind} per {shared}{apart}{'' if self.most is None else f' up to {self.most:g}'}"


@dataclass(frozen=True, slots=True)
class InputQuantization:
    """The scheme of one linear's inputs, and what is stored for it: a scale, or a global one, and a zero."""

    scheme: ActivationScheme
    scale: float = 1.0
    zero: float = 0.0


INT8_GROUPS = InputQuantization(ActivationScheme(8, False, "group", 32))
"""What the decoder rounds inputs to where it is asked for speed: as llama.cpp's Q8_0, but for the scale,
which is the largest magnitude over 127.5."""


@dataclass(frozen=True, slots=True)
class StoredScale:
    """What a number stored beside the weights scales: the inputs of a linear (`module`), or the keys or the
    values that an attention keeps in its cache (`module` is that of the attention). With `inverse`, one over
    it is stored.
    """

    of: Literal["inputs", "keys", "values"]
    module: str
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class ScalesBeside:
    """The numbers stored beside the weights of a model: the modules whose inputs have a scale, and the format
    ("FP8", "NVFP4") of the cache of keys and values, "" where the config says none.
    """

    inputs: frozenset[str] = frozenset()
    cache: str = ""


NO_SCALES = ScalesBeside()


@dataclass(frozen=True, slots=True)
class Products:
    """The products of some linears: `W8A8` for weights of 8 bits and inputs of 8 bits, A16 for exact inputs.

    `inputs` are the labels of their schemes, none for exact ones.
    """

    widths: str
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.widths} (inputs {' and '.join(self.inputs)})" if self.inputs else self.widths
