"""Writes the manifest `qconvert.json`, beside a GGUF `NAME.qconvert.json`: how an output was made, from what,
and what it lost.

Its shape is fixed by `manifest.schema.json` beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from json.encoder import encode_basestring_ascii
from math import inf, isfinite, sqrt
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.calibration import PlannedStatistics
from qconvert.checkpoint.hub import ResolvedModel
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.gguf_sidecars import MANIFEST, sidecar
from qconvert.convert.identity import adapter_config_hash, source_etags, source_samples
from qconvert.convert.job import OpenedModel, RunOptions
from qconvert.convert.outcome import Outcome
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.formats.io.read_back import Hashes, file_sha256
from qconvert.formats.layouts.stored_arrays import StoredArrays
from qconvert.models.parameter_table import linear_bits, table_of_outputs
from qconvert.ops import OutputError
from qconvert.plan.passes.activation_order import reordered
from qconvert.plan.passes.tensor_parallel_padding import zeros_added
from qconvert.plan.passes.transcode import Target
from qconvert.plan.plan import Unit
from qconvert.plan.request import Request
from qconvert.plan.scales import record_of
from qconvert.plan.state import Compiled

if TYPE_CHECKING:
    from qconvert.quant.affine import QuantError

FILE_NAME = "qconvert.json"
SCHEMA_VERSION = 1


def manifest_path(output: Path) -> Path:
    """Where the manifest of an output is, if it has one: in its folder, or beside a GGUF file."""
    return output / FILE_NAME if output.is_dir() else sidecar(output, MANIFEST)


def manifest(
    source: OpenedModel,
    compiled: Compiled,
    outcome: Outcome,
    hashes: Hashes,
    files: Mapping[str, int],
    options: RunOptions,
) -> Json:
    """The manifest of an output as plain data, but for its tensors (`write_manifest`).

    `files` are its weight files by name, in bytes.
    """
    outputs, request, layout = compiled.outputs, compiled.request, compiled.layout
    table = table_of_outputs(outputs, compiled.architecture, layout.traits)
    target = request.layout_target
    return {
        "schema": SCHEMA_VERSION,
        "tool": {"name": "qconvert", "version": __version__},
        "command": request.command,
        "source": _sampled(
            source, source_record(source.location, source.checkpoint, hash_sources=options.hash_sources)
        ),
        "recipe": request.recipe.to_json() | ({"layout": layout.name} if compiled.gguf else {}),
        **({"file_type": compiled.gguf.file_type.name} if compiled.gguf else {}),
        **({"conversion": _conversion(target)} if target else {}),
        **_measured(compiled, outcome),
        **({"target": request.chosen} if request.chosen else {}),
        **({"scaling": record_of(compiled.scaled)} if compiled.scaled else {}),
        "totals": {
            "tensors": table.tensors,
            "parameters": table.parameters,
            "bytes": table.nbytes,
            "bits_per_weight": table.bits_per_weight,
            "linear_bits_per_weight": linear_bits(outputs, compiled.architecture, layout.traits),
            "relative_rms_error": relative_error(outcome.errors.values()),
        },
        "warnings": [*compiled.warnings, *(notice.sentence for notice in compiled.notices)],
        "verified": options.verify,
        "files": [
            {"name": name, "bytes": nbytes, "sha256": hashes.files.get(name)}
            for name, nbytes in files.items()
        ],
    }


@dataclass(slots=True)
class Certificates:
    """How many tensors of an output have each certificate, and the largest measured distance in steps."""

    counts: dict[str, int] = field(default_factory=dict)
    max_steps: float = 0.0

    def add(self, certificate: Json) -> None:
        kind = certificate["kind"]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        steps = certificate.get("max_steps", 0.0)
        self.max_steps = max(self.max_steps, inf if steps is None else steps)

    @property
    def exact(self) -> bool:
        return set(self.counts) <= {"exact"}


def write_manifest(
    path: Path, record: Json, compiled: Compiled, outcome: Outcome, hashes: Hashes
) -> Certificates:
    """Write a manifest with an entry for each tensor, one at a time; return what their certificates are."""
    found, before = Certificates(), _MARGIN
    entries = _Entries(compiled.request, StoredArrays(compiled.layout), outcome, hashes)
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({**record, "tensors": {}}, indent=1).removesuffix("}\n}"))
        for unit in compiled.plan.units:
            certificate, text = entries.of(unit)
            found.add(certificate)
            file.write(f"{before}{encode_basestring_ascii(unit.output.name)}: {text}")
            before = f",{_MARGIN}"
        file.write("}\n}\n" if before == _MARGIN else "\n }\n}\n")
    return found


_MARGIN = "\n  "
"""Before a tensor of a manifest."""


def _indented(value: object, margin: str) -> str:
    """What `json.dumps(value, indent=1)` says after a margin, in a tenth of its time."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, float) and isfinite(value):
        return float.__repr__(value)
    if type(value) is int:
        return int.__repr__(value)
    if isinstance(value, dict) and value:
        inner = f"{margin} "
        parts = [f"{encode_basestring_ascii(key)}: {_indented(each, inner)}" for key, each in value.items()]
        return f"{{{inner}{f',{inner}'.join(parts)}{margin}}}"
    if isinstance(value, list) and value:
        inner = f"{margin} "
        return f"[{inner}{f',{inner}'.join(_indented(each, inner) for each in value)}{margin}]"
    return json.dumps(value)


def source_record(model: ResolvedModel, checkpoint: Checkpoint, *, hash_sources: bool) -> Json:
    """The source's files and header hashes; whole-file hashes only when asked for.

    Of a file that stays on the Hub, that is its hash there, where it has one.
    """
    files, remote, place = checkpoint.files, model.remote or {}, model.place

    def whole(path: Path) -> str | None:
        return remote[path.name].file.sha256 if path.name in remote else file_sha256(path)

    adapted = {"base": place.known_as, "adapter_config_sha256": adapter_config_hash(model)}
    return {
        "name": model.known_as,
        **(adapted if model.adapter else {}),
        "repo_id": place.repo_id,
        "commit": place.commit,
        "index_sha256": files.index_sha256,
        "files": [
            {
                "name": file.path.name,
                "bytes": file.size,
                "header_sha256": file.header_sha256,
                "sha256": whole(file.path) if hash_sources else None,
            }
            for file in files.files
        ],
    }


def _sampled(source: OpenedModel, record: Json) -> Json:
    """A source's record with the samples of its files, if they are here, or their ETags in a bucket or on a
    web server: `--skip-existing` compares them.
    """
    samples, etags = source_samples(source), source_etags(source)
    files = [
        {
            **file,
            "sample_sha256": samples.get(file["name"]),
            **({"etag": etags[file["name"]]} if etags else {}),
        }
        for file in record["files"]
    ]
    return {**record, "files": files}


def _measured(compiled: Compiled, outcome: Outcome) -> Json:
    """What weighed the errors of new codes or chose them together, and of how many tensors."""
    source = compiled.request.statistics
    if source is None:
        return {}
    if not isinstance(source, PlannedStatistics):
        return {
            "statistics": {**source.record, "tensors": sum(bool(u.statistics) for u in compiled.plan.units)}
        }
    errors = outcome.output_errors
    lost = _output_error(reduce(add, errors.values())) if errors else None
    return {"calibration": {**source.record, "tensors": len(errors), "output_error": lost}}


def _output_error(error: OutputError) -> Json:
    """The relative error of linears' outputs on held-out tokens: of nearest codes, and of those written."""
    energy = error.energy or 1.0
    return {
        "nearest": finite(float(f"{sqrt(error.plain / energy):.9g}")),
        "written": finite(float(f"{sqrt(error.made / energy):.9g}")),
        "rows_kept_nearest": error.kept,
    }


def _conversion(target: Target) -> Json:
    """What `qconvert convert` was asked for besides a layout."""
    return {
        "scheme": target.table or (target.scheme.label if target.scheme else None),
        "allow_requantize": target.allow_requantize,
        "undo_act_order": target.undo_act_order,
    }


class _Entries:
    """Makes the entries of tensors; what those of one kind have in common is made once."""

    def __init__(self, request: Request, arrays: StoredArrays, outcome: Outcome, hashes: Hashes) -> None:
        self._request, self._arrays, self._outcome, self._hashes = request, arrays, outcome, hashes
        self._alike: dict[tuple[object, ...], tuple[Json, str]] = {}

    def of(self, unit: Unit) -> tuple[Json, str]:
        """The certificate of a unit's output, and its entry as text."""
        name = unit.output.name
        code_error = self._outcome.code_error(name)
        alike = code_error, *unit.kind
        if alike not in self._alike:
            said = _described(unit, code_error)
            self._alike[alike] = said["certificate"], _indented(said, _MARGIN).removesuffix(f"{_MARGIN}}}")
        certificate, before = self._alike[alike]
        begin, parts = self._arrays.of(unit.output)
        hashes = self._hashes.tensors
        entry: Json = {"parts": {begin + end: hashes.get(begin + end) for end, _ in parts}}
        self._add_changes(unit, entry)
        return certificate, f"{before},{_indented(entry, _MARGIN)[1:]}"

    def _add_changes(self, unit: Unit, entry: Json) -> None:
        """Add what else became of a tensor, and what it lost."""
        request, outcome, name = self._request, self._outcome, unit.output.name
        rows, columns = zeros_added(unit) if request.recipe.pad_to_tp else (0, 0)
        if rows or columns:
            entry["zeros_added"] = {"rows": rows, "columns": columns}
        if request.undo_act_order and (sides := reordered(unit)):
            entry["reordered"] = sides
        error = outcome.errors.get(name)
        if error is not None:
            entry["error"] = {
                "relative_rms": relative_error([error]),
                "max_abs": error.max_abs,
                "max_steps": error.max_steps,
            }
        output_error = outcome.output_errors.get(name)
        if output_error is not None:
            entry["output_error"] = _output_error(output_error)


def _described(unit: Unit, code_error: float) -> Json:
    """What a manifest says first of a tensor."""
    certificate = unit.certificate(code_error)
    return {
        "form": unit.output.encoding.label,
        "shape": list(unit.output.shape),
        "exact": certificate == "exact",
        "certificate": {
            "kind": certificate,
            **({"max_steps": finite(code_error)} if certificate in _MEASURED else {}),
        },
    }


# The certificates of tensors whose codes are kept.
_MEASURED = ("exact", "measured")


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
