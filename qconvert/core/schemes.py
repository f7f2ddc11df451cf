"""Parses quantization schemes as users write them: `int4`, `int4-asym-g64`, `int8-channel`, `keep`.

A scheme is a choice for one weight; `Scheme.encoding` gives the encoding that the weight will have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, ModelTensor
from qconvert.errors import BadRecipe

DEFAULT_GROUP_SIZE = 128
SMALLER_GROUP_SIZES = (128, 64, 32)
_SCHEME = re.compile(
    r"int(?P<bits>[2-8])(?P<asym>-asym)?(?:-(?:g(?P<group>[1-9]\d{0,8})|(?P<channel>channel)))?"
)

# llm-compressor's word for integers without numbers for the inputs: groups of 128 columns, symmetric but for
# one of 4 bits (compressed-tensors 0.20, `quant_scheme.py`: PRESET_SCHEMES).
_PRESET = re.compile(r"W(?P<bits>[2-8])A16|W4A16_ASYM")
_GGUF_TYPE = re.compile(r"(i?q[1-8]|tq[12])_", re.IGNORECASE)


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
    """Whether a text names a scheme of integers."""
    return _SCHEME.fullmatch(text) is not None


KEEP = "keep"


def parse_scheme(text: str) -> Scheme | None:
    """Parses a scheme, also as llm-compressor says W4A16; returns None for `keep`.

    Raises BadRecipe, naming the nearest scheme.
    """
    if text == KEEP:
        return None
    if preset := _PRESET.fullmatch(text):
        return Scheme(int(preset["bits"] or 4), symmetric=preset["bits"] is not None)
    match = _SCHEME.fullmatch(text)
    if match is None:
        known = [KEEP] + [
            f"int{b}{a}{g}"
            for b in range(2, 9)
            for a in ("", "-asym")
            for g in ("", "-g128", "-g64", "-g32", "-channel")
        ]
        if _GGUF_TYPE.match(text):
            raise BadRecipe(
                f"scheme {text!r}: a type of GGUF files", f"`qconvert to-gguf MODEL --type {text}`"
            )
        near = get_close_matches(text, known, n=1, cutoff=0.5)
        spelling = "write int{2..8}[-asym]-g{N}, int{2..8}[-asym]-channel, or keep"
        raise BadRecipe(
            f"scheme {text!r}: not a scheme", f"{spelling}; did you mean {near[0]!r}?" if near else spelling
        )
    group = None if match["channel"] else int(match["group"] or DEFAULT_GROUP_SIZE)
    return Scheme(int(match["bits"]), group, match["asym"] is None)
