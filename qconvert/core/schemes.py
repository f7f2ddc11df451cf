"""Parses quantization schemes as users write them: `int4`, `int4-asym-g64`, `int8-channel`, `keep`.

A scheme is a choice for one weight; `Scheme.encoding` gives the encoding that the weight will have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, ModelTensor
from qconvert.core.scheme_names import WRITTEN, named_scheme, unwritten
from qconvert.errors import BadRecipe

DEFAULT_GROUP_SIZE = 128
SMALLER_GROUP_SIZES = (128, 64, 32)
_SCHEME = re.compile(
    r"int(?P<bits>[2-8])(?P<asym>-asym)?(?:-(?:g(?P<group>[1-9]\d{0,8})|(?P<channel>channel)))?"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Group quantization to `bits`; `group_size` None means one scale per output row."""

    bits: int
    group_size: int | None = DEFAULT_GROUP_SIZE
    symmetric: bool = True

    def encoding(self, scale_dtype: DType) -> AffineInt:
        """Returns the encoding of a weight quantized by this scheme, its scales stored as `scale_dtype`."""
        return AffineInt(self.bits, self.group_size, self.symmetric, scale_dtype)

    @property
    def label(self) -> str:
        """The canonical name, which `parse_scheme` accepts."""
        return self.encoding(DType.BF16).label


def check_scheme(scheme: object) -> None:
    """Raise BadRecipe for what is neither a scheme nor None, such as the name of one."""
    if scheme is not None and not isinstance(scheme, Scheme):
        kind = type(scheme).__name__
        raise BadRecipe(
            f"scheme {scheme!r}: {kind}, where a Scheme or None is wanted", "write parse_scheme('int4-g128')"
        )


def fitting(scheme: Scheme, tensor: ModelTensor, scale_dtype: DType) -> AffineInt:
    """Returns the encoding of this weight quantized by the scheme.

    Raises BadRecipe unless the group size divides the weight's width.
    """
    size, width = scheme.group_size, tensor.width
    if size is not None and width % size:
        fits = [str(smaller) for smaller in SMALLER_GROUP_SIZES if width % smaller == 0]
        raise BadRecipe(
            f"{tensor.name}: its rows of {width} columns are not divisible by group size {size}",
            f"choose a scheme of another group size (sizes that divide: {', '.join([*fits, 'channel'])})",
        )
    return scheme.encoding(scale_dtype)


def is_integers(text: str) -> bool:
    """Whether a text names a scheme of integers, in any case."""
    return text != "INT8" and _SCHEME.fullmatch(text.lower()) is not None


KEEP = "keep"


def parse_scheme(text: str) -> Scheme | None:
    """Parses a scheme in any case, also by another tool's name (W4A16); returns None for `keep`.

    Raises BadRecipe, naming the nearest scheme.
    """
    named, other = named_scheme(text), unwritten(text)
    if named is not None and named.layout:
        raise BadRecipe(
            f"scheme {text!r}: not a scheme of integers, and rules and recipes take only those",
            f"`qconvert quantize MODEL --scheme {text}` gives it to all linears",
        )
    own = named.scheme if named else text.lower()
    if own == KEEP:
        return None
    match = _SCHEME.fullmatch(own)
    if other is not None and (match is None or text == "INT8"):
        raise BadRecipe(f"scheme {text!r}: {other.fact}", other.hint)
    if match is None:
        raise BadRecipe(f"scheme {text!r}: not a scheme", _nearest(own))
    group = None if match["channel"] else int(match["group"] or DEFAULT_GROUP_SIZE)
    return Scheme(int(match["bits"]), group, match["asym"] is None)


def _nearest(text: str) -> str:
    known = [KEEP, *WRITTEN] + [
        f"int{b}{a}{g}"
        for b in range(2, 9)
        for a in ("", "-asym")
        for g in ("", "-g128", "-g64", "-g32", "-channel")
    ]
    near = get_close_matches(text, known, n=1, cutoff=0.5)
    grammar = "write int{2..8}[-asym]-g{N}, int{2..8}[-asym]-channel, or keep"
    return f"{grammar}; did you mean {near[0]!r}?" if near else grammar
