"""Reports run metadata: arithmetic, device, versions."""

from __future__ import annotations

import platform

import torch

from qconvert.core.version import __version__
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.layer import Layer
from qconvert.runtime.model import Decoder


def arithmetic(decoder: Decoder, rows: int, activations: str = "exact") -> str:
    """What products with quantized weights are made of, in batches of at least so many tokens.

    `activations` are the inputs of linears in words, which are said where they are not exact alone.
    """
    fast = decoder.layout is Layout.AUTO  # in the others codes are decoded first
    packed = fast and any(_multiplies_codes(decoder.layers[i], rows) for i in range(len(decoder.layers)))
    name = dtype_name(decoder.dtype)
    worth = (
        f"rounded to {name}" if not packed else "in exact products with inputs of 16 bits per block of 128"
    )
    inputs = "" if activations == "exact" else f", inputs of linears {activations}"
    return f"{name}, quantized weights as scale * (code - zero) {worth}{inputs}, logits in float32"


def _multiplies_codes(layer: Layer, rows: int) -> bool:
    """Whether the attention of a layer, which may be read for this alone, multiplies codes."""
    return any(linear.weight.multiplies_codes(rows) for linear in layer.attention.linears)


def use_threads(threads: int | None) -> None:
    """Compute with so many threads, in torch and the decoder's kernels; None leaves the choice to torch."""
    if threads is not None:
        torch.set_num_threads(threads)


def device_name(decoder: Decoder) -> str:
    """The GPU by its name, or the CPU with the number of threads that compute on it."""
    if decoder.device.type == "cuda":
        return torch.cuda.get_device_name(decoder.device)
    threads = torch.get_num_threads()
    return f"{decoder.device.type}, {threads} thread{'s' if threads != 1 else ''}"


def versions() -> dict[str, str]:
    """Of qconvert, Python and torch."""
    return {"qconvert": __version__, "python": platform.python_version(), "torch": torch.__version__}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
