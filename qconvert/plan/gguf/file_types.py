"""Finds the file types of GGUF by name: the mixtures that users choose from.

Source: llama_ftype of llama.cpp's include/llama.h and QUANT_OPTIONS of tools/quantize/quantize.cpp (commit
0c1e57098).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from qconvert.core.ggml_types import GGMLType
from qconvert.core.scheme_names import GGUF_OF_BITS, bits_in, named_scheme, unwritten
from qconvert.core.schemes import is_integers
from qconvert.errors import BadRecipe

T = GGMLType
_ALL_TYPES = "`qconvert to-gguf --type list` shows all"


@dataclass(frozen=True, slots=True)
class FileType:
    """A mixture: the name users type, its number in `general.file_type`, and its base type."""

    name: str
    number: int
    base: GGMLType


FILE_TYPES: Mapping[str, FileType] = {
    name: FileType(name, number, base)
    for name, number, base in (
        ("F32", 0, T.F32),
        ("F16", 1, T.F16),
        ("BF16", 32, T.BF16),
        ("Q4_0", 2, T.Q4_0),
        ("Q4_1", 3, T.Q4_1),
        ("Q5_0", 8, T.Q5_0),
        ("Q5_1", 9, T.Q5_1),
        ("Q8_0", 7, T.Q8_0),
        ("Q2_K", 10, T.Q2_K),
        ("Q2_K_S", 21, T.Q2_K),
        ("Q3_K_S", 11, T.Q3_K),
        ("Q3_K_M", 12, T.Q3_K),
        ("Q3_K_L", 13, T.Q3_K),
        ("Q4_K_S", 14, T.Q4_K),
        ("Q4_K_M", 15, T.Q4_K),
        ("Q5_K_S", 16, T.Q5_K),
        ("Q5_K_M", 17, T.Q5_K),
        ("Q6_K", 18, T.Q6_K),
        ("IQ1_S", 24, T.IQ1_S),
        ("IQ1_M", 31, T.IQ1_M),
        ("IQ2_XXS", 19, T.IQ2_XXS),
        ("IQ2_XS", 20, T.IQ2_XS),
        ("IQ2_S", 28, T.IQ2_XS),
        ("IQ2_M", 29, T.IQ2_S),
        ("IQ3_XXS", 23, T.IQ3_XXS),
        ("IQ3_XS", 22, T.IQ3_S),
        ("IQ3_S", 26, T.IQ3_S),
        ("IQ3_M", 27, T.IQ3_S),
        ("IQ4_NL", 25, T.IQ4_NL),
        ("IQ4_XS", 30, T.IQ4_XS),
        ("TQ1_0", 36, T.TQ1_0),
        ("TQ2_0", 37, T.TQ2_0),
        ("MXFP4_MOE", 38, T.MXFP4),
        ("NVFP4", 39, T.NVFP4),
        ("Q1_0", 40, T.Q1_0),
        ("Q2_0", 41, T.Q2_0),
    )
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def find_file_type(name: str) -> FileType:
    """The file type of this name in any case, aliases included. Raises BadRecipe with the nearest."""
    upper = name.upper()
    found = FILE_TYPES.get(ALIASES.get(upper, upper))
    if found is None:
        raise BadRecipe(f"type {name!r}: no such GGUF file type", f"{_instead(name)}{_ALL_TYPES}")
    return found


def _instead(name: str) -> str:
    """What a name means that is none of a file type: the nearest one, or a scheme of `quantize`."""
    upper = name.upper()
    if bits := bits_in(name):
        return f"did you mean {GGUF_OF_BITS[bits]!r}? "
    if named_scheme(name) or is_integers(name):
        return f"`qconvert quantize MODEL --scheme {name}` writes it as safetensors; "
    other = unwritten(name)
    if other and other.hint.startswith("--scheme"):
        return f"in safetensors, `qconvert quantize MODEL` with {other.hint}; "
    near = [longer for end in ("_K_M", "_K", "_0") if (longer := upper + end) in FILE_TYPES]
    near = near or get_close_matches(upper, FILE_TYPES, n=1)
    return f"did you mean {near[0].lower()!r}? " if near else ""
