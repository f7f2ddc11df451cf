"""Runs llama.cpp's own quantizer, out of cyllama's wheel, also with an importance matrix."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_HEAD = object.__basicsize__ + struct.calcsize("P")  # of an extension type: the object, a table of methods
_IMATRIX = 24  # where llama_model_quantize_params has it: after two ints, two enums and six flags
_CHOICE = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) +- \[.*\], type = +(\S+), size = .*?(?:\((\S+)\))?$", re.M)
"""A line of a dry run: a tensor's name, its type, and the type that it would get if that is another."""


class UnknownWheel(Exception):
    """A cyllama that holds its parameters elsewhere than is known here."""


class _Entry(ctypes.Structure):
    """llama_model_imatrix_data; the last one of an array has no name."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


def quantize_as_llama_cpp(
    source: Path,
    out: Path,
    file_type: int,
    *,
    pure: bool = False,
    imatrix: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes `out`, a file of this type; `imatrix` gives mean squares float32 [columns] by tensor name.

    Raises ImportError without cyllama, UnknownWheel where it cannot be given an importance matrix,
    RuntimeError where llama.cpp refuses.
    """
    _quantize(source, out, file_type, pure=pure, imatrix=imatrix)


def types_of_llama_cpp(
    source: Path, file_type: int, *, imatrix: Mapping[str, np.ndarray] | None = None
) -> dict[str, str]:
    """Returns the type by tensor name of a file of this type, in its order, without encoding any.

    As a dry run of llama-quantize prints them. Raises as `quantize_as_llama_cpp`, but does not refuse a type
    for want of an importance matrix.
    """
    from cyllama.llama import llama_cpp as llama

    said: list[str] = []
    llama.set_log_callback(lambda level, text: said.append(text))
    try:
        _quantize(source, source, file_type, imatrix=imatrix, dry_run=True)
    finally:
        llama.disable_logging()
    return {name: made or kept for name, kept, made in _CHOICE.findall("".join(said))}


def _quantize(
    source: Path, out: Path, file_type: int, *, imatrix: Mapping[str, np.ndarray] | None, **flags: bool
) -> None:
    """Sets flags of llama.cpp's parameters by their names, and the matrix where they have it."""
    from cyllama.llama import llama_cpp as llama

    params = llama.LlamaModelQuantizeParams()
    params.ftype, params.nthread = file_type, 1
    for flag, value in flags.items():
        setattr(params, flag, value)
    entries = (_Entry * (len(imatrix or {}) + 1))()
    for entry, (name, means) in zip(entries, (imatrix or {}).items(), strict=False):
        assert means.dtype == np.float32 and means.flags.c_contiguous
        entry.name, entry.data, entry.size = name.encode(), means.ctypes.data, means.size
    if imatrix is not None:  # which cyllama shows, but cannot set
        at = id(params) + _HEAD
        known = struct.unpack("iiiibbbbbbxxP", ctypes.string_at(at, _IMATRIX + struct.calcsize("P")))
        if known[:2] != (1, file_type) or known[7] != params.pure or known[-1] != 0:
            raise UnknownWheel("this cyllama holds its parameters elsewhere")
        ctypes.c_void_p.from_address(at + _IMATRIX).value = ctypes.addressof(entries)
    llama.model_quantize(str(source), str(out), params)
