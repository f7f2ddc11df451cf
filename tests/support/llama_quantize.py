"""Runs llama.cpp's own quantizer in tests, which are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from evals import llama_quantize


def quantize_as_llama_cpp(
    source: Path,
    out: Path,
    file_type: int,
    *,
    pure: bool = False,
    imatrix: Mapping[str, np.ndarray] | None = None,
) -> None:
    """As in `evals.llama_quantize`; skips the test without cyllama, or with one that is not known."""
    with _skipped_where_unknown():
        llama_quantize.quantize_as_llama_cpp(source, out, file_type, pure=pure, imatrix=imatrix)


def types_of_llama_cpp(
    source: Path, file_type: int, *, imatrix: Mapping[str, np.ndarray] | None = None
) -> dict[str, str]:
    """As in `evals.llama_quantize`; skips the test as well."""
    with _skipped_where_unknown():
        return llama_quantize.types_of_llama_cpp(source, file_type, imatrix=imatrix)


@contextmanager
def _skipped_where_unknown() -> Iterator[None]:
    pytest.importorskip("cyllama.llama.llama_cpp", reason="cyllama brings llama.cpp")
    try:
        yield
    except llama_quantize.UnknownWheel as error:
        pytest.skip(str(error))
