"""Keeps named arrays and what is said of them in one small safetensors file, which is read as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import BadRecipe, CorruptCheckpoint, shown
from qconvert.formats.huggingface.safetensors_file import SafetensorsFile
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import write_whole

_DTYPES = {
    np.dtype(np.int64): DType.I64,
    np.dtype(np.float32): DType.F32,
    np.dtype(np.float64): DType.F64,
}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays of int64, float32 and float64 by name; the file replaces an earlier one at once.

    The same arrays and metadata give the same bytes. Raises BadRecipe for more than are read back.
    """
    if len(arrays) > limits.STATISTICS_TENSORS:
        most = limits.STATISTICS_TENSORS
        raise BadRecipe(
            f"{path.name}: {len(arrays):,} arrays (limit {most:,} in one file)",
            "give an importance matrix of llama-imatrix, which has fewer",
        )
    specs = [TensorSpec(name, _DTYPES[each.dtype], each.shape) for name, each in arrays.items()]
    (plan,) = plan_files(specs, metadata=metadata)
    data = bytearray(plan.size)
    data[: len(plan.head)] = plan.head
    for name, offset in plan.offsets.items():
        data[offset : offset + arrays[name].nbytes] = arrays[name].tobytes()
    write_whole(path, bytes(data))


def read_arrays(
    path: Path, kind: str, version: str, again: str
) -> tuple[dict[str, np.ndarray], Mapping[str, str]]:
    """The arrays by name, and the metadata, of a file whose metadata say that format and version.

    Raises CorruptCheckpoint for any other file, with `again` as what to do.
    """
    with SafetensorsFile(path, most=limits.STATISTICS_TENSORS) as file:
        metadata, specs = file.header.metadata, file.header.specs
        if (metadata.get("format"), metadata.get("version")) != (kind, version):
            found = f"{metadata.get('format')} {metadata.get('version')}"
            raise CorruptCheckpoint(f"{path.name}: is {shown(found)}, not {kind} {version}", again)
        arrays = {name: file.read(name, 0, spec.rows).reshape(spec.shape) for name, spec in specs.items()}
    return arrays, metadata
