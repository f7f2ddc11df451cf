"""The manifest `qconvert.json`: how an output was made, from what, and what it lost.

Its shape is fixed by `manifest.schema.json` beside this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING

from qconvert import __version__
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import Encoding, Unquantized
from qconvert.models.parameter_table import linear_bits, table_of_outputs
from qconvert.ops.rows import Cast, Dequantize, EncodeBlocks, Quantize
from qconvert.ops.transcode import EncodeTable
from qconvert.plan.passes.activation_order import reordered
from qconvert.plan.passes.tensor_parallel_padding import zeros_added

if TYPE_CHECKING:
    from qconvert.core.protocols import Layout
    from qconvert.plan.compile import Draft, Wish
    from qconvert.plan.passes.transcode import Target
    from qconvert.plan.plan import Unit
    from qconvert.quant.affine import QuantError

FILE_NAME = "qconvert.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Where the input came from, file by file; hashes in hexadecimal."""

    name: str
    repo_id: str | None
    commit: str | None
    index_sha256: str | None
    files: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """What a run found out: error per quantized tensor, steps per tensor that changed its grid, hashes
    per array and per file.
    """

    errors: Mapping[str, QuantError] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    file_sha256: Mapping[str, str] = field(default_factory=dict)
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    verified: bool = False


def manifest(source: SourceRecord, wish: Wish, *, draft: Draft, layout: Layout, results: Results) -> Json:
    """The manifest of an output as plain data."""
    outputs = draft.plan.outputs
    parameter_table = table_of_outputs(outputs, draft.architecture, layout.traits)
    return {
        "schema": SCHEMA_VERSION,
        "tool": {"name": "qconvert", "version": __version__},
        "command": wish.command,
        "source": {
            "name": source.name,
            "repo_id": source.repo_id,
            "commit": source.commit,
            "index_sha256": source.index_sha256,
            "files": list(source.files),
        },
        "recipe": wish.recipe.to_json(),
        **({"conversion": _conversion(wish.target)} if wish.target else {}),
        "totals": {
            "tensors": parameter_table.tensors,
            "parameters": parameter_table.parameters,
            "bytes": parameter_table.nbytes,
            "bits_per_weight": parameter_table.bits_per_weight,
            "linear_bits_per_weight": linear_bits(outputs, draft.architecture, layout.traits),
            "relative_rms_error": relative_error(results.errors.values()),
        },
        "warnings": [*draft.warnings, *(notice.sentence for notice in draft.notices)],
        "verified": results.verified,
        "files": [
            {"name": name, "bytes": nbytes, "sha256": results.file_sha256.get(name)}
            for name, nbytes in results.file_bytes.items()
        ],
        "tensors": {unit.output.name: _tensor(unit, layout, results) for unit in draft.plan.units},
    }


def _conversion(target: Target) -> Json:
    """What `convert.execute` was asked for besides a layout."""
    return {
        "scheme": target.table or (target.scheme.label if target.scheme else None),
        "allow_requantize": target.allow_requantize,
        "undo_act_order": target.undo_act_order,
    }


def _tensor(unit: Unit, layout: Layout, results: Results) -> Json:
    output = unit.output
    steps = results.steps.get(output.name, 0.0)
    certificate = certificate_of(unit, steps)
    parts = {spec.name: results.tensor_sha256.get(spec.name) for spec in layout.stored_arrays(output)}
    entry: Json = {
        "form": output.encoding.label,
        "shape": list(output.shape),
        "exact": certificate == "exact",
        "certificate": {
            "kind": certificate,
            **({"max_steps": finite(steps)} if certificate in _KEPT else {}),
        },
        "parts": parts,
    }
    rows, columns = zeros_added(unit)
    if rows or columns:
        entry["zeros_added"] = {"rows": rows, "columns": columns}
    if sides := reordered(unit):
        entry["reordered"] = sides
    error = results.errors.get(output.name)
    if error is not None:
        entry["error"] = {
            "relative_rms": relative_error([error]),
            "max_abs": error.max_abs,
            "max_steps": error.max_steps,
        }
    return entry


# What keeps codes, whose moves are measured.
_KEPT = ("exact", "measured")


def certificate_of(unit: Unit, steps: float) -> str:
    """In one word, what became of a tensor's numbers; `steps` is by how many its codes have moved."""
    ops = {type(op) for op in unit.ops}
    plain = isinstance(unit.inputs[0].tensor.encoding, Unquantized)
    if ops & {Quantize, EncodeBlocks, EncodeTable}:
        return "quantized" if plain else "requantized"
    if Dequantize in ops:
        return "dequantized"
    if any(isinstance(op, Cast) and not _holds(op.dtype, unit.inputs[0].tensor.encoding) for op in unit.ops):
        return "cast"
    return "measured" if steps else "exact"


def _holds(dtype: DType, encoding: Encoding) -> bool:
    """Whether a float type holds every number of plain tensors of another."""
    wider = {DType.BF16: (DType.F32, DType.F64), DType.F16: (DType.F32, DType.F64), DType.F32: (DType.F64,)}
    return isinstance(encoding, Unquantized) and (
        encoding.dtype is dtype or dtype in wider.get(encoding.dtype, ())
    )


def certificates(manifest: Json) -> Json:
    """How many tensors of an output have each certificate, and the largest measured distance in steps."""
    found = [entry["certificate"] for entry in manifest["tensors"].values()]
    counts = Counter(entry["kind"] for entry in found)
    measured = (entry.get("max_steps", 0.0) for entry in found)
    steps = (inf if most is None else most for most in measured)
    return {"counts": dict(counts), "max_steps": max(steps, default=0.0)}


def relative_error(errors: Iterable[QuantError]) -> float | None:
    """Root of summed squared error over summed squares; None when nothing was quantized.

    None also where squares leave float32 (weights beyond 1e19), in which the kernels sum. To 9 digits:
    the last ones of a sum depend on how the threads happened to divide the work.
    """
    listed = list(errors)
    norm = sum(error.sum_sq for error in listed)
    if not norm:
        return 0.0 if listed else None
    return finite(float(f"{sqrt(sum(error.sum_sq_error for error in listed) / norm):.9g}"))


def finite(number: float) -> float | None:
    """The number as JSON can hold it: NaN and Inf, which it cannot, are None."""
    return number if isfinite(number) else None
