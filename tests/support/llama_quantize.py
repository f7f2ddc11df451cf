"""Runs llama.cpp's own quantizer in tests, which are skipped where there is none."""

from __future__ import annotations

from collections.abc import Mapping
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
    pytest.importorskip("cyllama.llama.llama_cpp", reason="cyllama brings llama.cpp")
    try:
        llama_quantize.quantize_as_llama_cpp(source, out, file_type, pure=pure, imatrix=imatrix)
    except llama_quantize.UnknownWheel as error:
        pytest.skip(str(error))
