"""Opens weights of other layouts than compressed-tensors' integers, for `speed.py decode --layouts`.

Heads that a layout leaves in 16 bits are rounded to 8 at load, so that what differs is the layers.
GGUF files are llama-quantize's, read by both decoders.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from evals.synthetic import converted, make_checkpoint

if TYPE_CHECKING:
    from evals.runners import Runner

INT4 = "int4, int8 head"
_CONVERTED = {
    "MLX 4-bit g64, int8 head": ("mlx", "int4-asym-g64"),
    "NF4, int8 head": ("bitsandbytes", "nf4"),
    "MXFP4, int8 head": ("compressed-tensors", "mxfp4"),
    "FP8 channel, int8 head": ("compressed-tensors", "fp8-channel"),
}


def layout_runners(work: Path, shape: str, room: int, threads: int) -> list[Runner]:
    """A decoder for every layout, int4 g128 first; llama.cpp for the GGUF files where it is installed."""
    from evals.runners import llama_cpp, ours

    source = make_checkpoint(work / f"{shape}-x1", shape)
    int4 = converted(source, work / f"{shape}-int4", "quantize", "--bits", "4", "--min-max")
    runners = [ours(INT4, int4, room, head_bits=8)]
    for name, (layout, scheme) in _CONVERTED.items():
        out = work / f"{shape}-{layout}-{scheme}"
        folder = converted(source, out, "convert", "--to", layout, "--scheme", scheme)
        runners.append(ours(name, folder, room, head_bits=8))
    if find_spec("cyllama") and find_spec("gguf"):
        from evals.peer_gguf import FILE_TYPES, gguf_files

        for name, path in gguf_files(source, work / shape, tuple(FILE_TYPES)).items():
            runners += [ours(f"GGUF {name}", path, room), llama_cpp(f"llama.cpp {name}", path, room, threads)]
    return runners
