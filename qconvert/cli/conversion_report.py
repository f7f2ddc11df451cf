"""Reports what a conversion will write, or has written: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import sqrt
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qconvert.calibrate.calibration import METHODS
from qconvert.cli.plain_tables import decoded_tables, plain_tables
from qconvert.cli.printing import terminal_columns
from qconvert.cli.serving import refused_forms, serving
from qconvert.convert.job import Job, Result
from qconvert.convert.manifest import finite
from qconvert.convert.outcome import Outcome
from qconvert.core.dtypes import Json
from qconvert.core.encodings import AffineMin, Unquantized
from qconvert.errors import shown
from qconvert.formats.layouts import registry
from qconvert.models.family_of import model_type_of
from qconvert.models.parameter_table import ParameterTable, table_of_tensors
from qconvert.plan.loader_notices import notice_lines
from qconvert.report.tables import count, parameter_table_lines, size, table

if TYPE_CHECKING:
    from qconvert.convert.containers.gguf_file import GGUFFileContainer


class ConversionReport(Protocol):
    """What is printed about one conversion."""

    @property
    def path(self) -> Path: ...

    def warnings(self) -> Iterable[str]: ...

    def lines(self) -> list[str]: ...

    def plan_json(self) -> Json: ...

    def result_json(self, result: Result, seconds: float) -> Json: ...

    def verdict(self, result: Result, seconds: float) -> str: ...


def report_of(job: Job, out: Path) -> ConversionReport:
    """The report of an output: GGUF files are counted by type, folders by role."""
    if not job.compiled.is_gguf:
        return FolderReport(job, out)
    from qconvert.convert.containers.gguf_file import GGUFFileContainer

    assert isinstance(job.container, GGUFFileContainer)
    return GGUFReport(job, out, job.container)


@dataclass(frozen=True)
class FolderReport:
    """A folder of safetensors, role by role."""

    job: Job
    path: Path

    def warnings(self) -> Iterable[str]:
        compiled = self.job.compiled
        yield from (*self.job.source.checkpoint.warnings, *compiled.warnings)
        if lines := notice_lines(compiled.notices):
            yield "\n".join(lines)
        yield from refused_forms(self.job)

    @cached_property
    def _table(self) -> ParameterTable:
        from qconvert.convert.containers.safetensors_folder import SafetensorsFolder

        assert isinstance(self.job.container, SafetensorsFolder)
        return self.job.container.table

    @cached_property
    def _before(self) -> ParameterTable:
        return _table_before(self.job)

    def lines(self) -> list[str]:
        files = self.job.container.files(self.path)
        return [
            *_source_lines(self.job, f"{self.path}/"),
            *parameter_table_lines(self._table, terminal_columns()),
            f"{size(self._before.nbytes)} -> {size(sum(file.size for file in files))} in "
            f"{count(len(files), 'file')}, at most {size(self.job.options.max_memory)} of working memory",
            *self._own_code(),
        ]

    def _own_code(self) -> list[str]:
        """What becomes of the Python files and modules that the model brings."""
        files = self.job.source.checkpoint.files
        parents = (path.parent for path in files.sidecars.copied)
        told = {
            "the model's own code, copied as it is and never run": files.sidecars.code,
            "modules of sentence-transformers, copied as they are": [p for p in parents if p != files.path],
            "left out, for no config names it as the model's code": [
                path for path in files.sidecars.skipped if path.suffix == ".py"
            ],
        }
        return [
            f"{what}: {', '.join(dict.fromkeys(shown(path.name) for path in paths))}"
            for what, paths in told.items()
            if paths
        ]

    def plan_json(self) -> Json:
        return {"schema": 1, "ok": True, "dry_run": True, "out": str(self.path), **self._described()}

    def result_json(self, result: Result, seconds: float) -> Json:
        return {
            "schema": 1,
            "ok": True,
            "dry_run": False,
            "out": str(result.path),
            "seconds": round(seconds, 3),
            **_measured(result),
            **self._described(),
            **({"calibration": result.record["calibration"]} if "calibration" in result.record else {}),
            "totals": result.record["totals"],
            "verified": self.job.options.verify,
            "sha256": dict(result.hashes.files),
        }

    def _described(self) -> Json:
        """The numbers of a plan, the same before and after it is carried out."""
        compiled, before = self.job.compiled, self._before
        code = [path.name for path in self.job.source.checkpoint.files.sidecars.code]
        return {
            "source": _source_of(self.job, before),
            "files": files_json(self.job, self.path),
            "output": {
                **self._table.to_json(),
                "bits_per_weight": self._table.bits_per_weight,
                **({"code": code} if code else {}),
            },
            "recipe": compiled.request.recipe.to_json(),
            "max_memory": self.job.options.max_memory,
            "warnings": [
                *self.job.source.checkpoint.warnings,
                *compiled.warnings,
                *(notice.sentence for notice in compiled.notices),
            ],
        }

    def verdict(self, result: Result, seconds: float) -> str:
        error = result.record["totals"]["relative_rms_error"]
        lost = "" if error is None else f", relative RMS error {error:.4f}"
        checked = "verified" if self.job.options.verify else "not verified"
        found = f"{certificate_line(result.record)}{lost}, {outputs_line(self.job, result.outcome)}"
        return f"done in {seconds:.1f} s, {found}{checked}"


def _measured(result: Result) -> Json:
    """What a run took: seconds by stage, and the most memory that the process had at once."""
    from qconvert.calibrate.memory_limit import peak_resident

    seconds = {stage: round(taken, 3) for stage, taken in result.seconds.items()}
    return {"seconds_by_stage": seconds, "peak_memory": peak_resident()}


def outputs_line(job: Job, outcome: Outcome) -> str:
    """What choosing codes together has won, as the beginning of more; empty where codes are nearest.

    Two-sided codes lower the model's error, not that of each linear by itself.
    """
    over_rows = job.calibration is not None and job.calibration.traits.over_rows
    if not outcome.output_errors or over_rows:
        return ""
    error = reduce(add, outcome.output_errors.values())
    nearest, made = (sqrt(lost / error.energy) for lost in (error.plain, error.made))
    return f"outputs' error on held-out tokens {nearest:.4f} -> {made:.4f}, "


def advice(job: Job, out: str, beside: Collection[str] = ()) -> list[str]:
    """What to do next: what a calibration text would buy, and how the output is served.

    `beside` are the suffixes of the files that were written beside a GGUF.
    """
    from qconvert.convert.gguf_sidecars import MODELFILE, ollama_create

    last = f"next: {ollama_create(Path(out))}" if MODELFILE in beside else serving(job, out)
    found = (plain_tables(job), decoded_tables(job), _symmetric(job), _calibrating(job), last)
    return [line for line in found if line]


def _symmetric(job: Job) -> str | None:
    """One line on a symmetric scheme, where the layout stores a minimum for each group all the same."""
    request, units = job.compiled.request, job.compiled.plan.units
    target = request.layout_target
    scheme = (target.scheme if target else None) or request.recipe.scheme
    stored = any(isinstance(u.output.encoding, AffineMin) and u.certificate() == "quantized" for u in units)
    if scheme is None or not scheme.symmetric or not stored:
        return None
    asymmetric = replace(scheme, symmetric=False).label
    return (
        f"note: {target.layout if target else 'the layout'} stores a minimum for each group, also with the "
        f"symmetric {scheme.label}; {asymmetric} loses less in the same bytes"
    )


def _calibrating(job: Job) -> str | None:
    """One line on what a calibration text would buy, where new codes were chosen without one."""
    from qconvert.runtime.graphs import GRAPHS

    request, plan = job.compiled.request, job.compiled.plan
    encodings = [u.output.encoding for u in plan.units if u.quantizes and u.certificate() == "quantized"]
    # At 8 bits there is little left to win.
    quantized = any(not isinstance(each, Unquantized) and each.bits < 8 for each in encodings)
    runs = model_type_of(job.source.checkpoint.architecture.config) in GRAPHS
    if not quantized or request.statistics is not None or not runs:
        return None
    target = request.layout_target
    method = registry.traits_of(target.layout).method if target is not None else ""
    if method:
        stored = f"note: {method} names how the codes are stored; no {method} was run"
        own = METHODS.get(method.lower())
        beside = f" ({method}'s own way: --method {own})" if own not in (None, "feedback") else ""
        return f"{stored}: --method feedback chooses them on a text{beside}"
    return (
        "note: weights are rounded to nearest; --method feedback --text FILE, with a text like yours, loses "
        "less (0.3 to 0.5 times the KL divergence, measured on small models)"
    )


def certificate_line(record: Json) -> str:
    """The certificate of an output in one line: `exact`, or how many tensors are what."""
    found = record["certificates"]
    if set(found["counts"]) <= {"exact"}:
        return "exact"
    return _phrases(dict(sorted(found["counts"].items())), found["max_steps"])


def _phrases(counts: dict[str, int], most: float) -> str:
    measured = f" (at most {most:.2g} steps)" if most else ""
    return " + ".join(f"{number} {kind}" for kind, number in counts.items()) + measured


def files_json(job: Job, out: Path) -> list[Json]:
    """The weight files of an output with their bytes, as --json prints them."""
    return [{"name": file.name, "bytes": file.size} for file in job.container.files(out)]


def _source_lines(job: Job, out: str) -> list[str]:
    """What is read and what is written; of an adapter, what it is."""
    adapter = job.source.checkpoint.adapter
    return [f"{job.source.location.title}  ->  {out}", *([f"adapter: {adapter}"] if adapter else [])]


def _source_of(job: Job, before: ParameterTable) -> Json:
    adapter = job.source.checkpoint.adapter
    merged = {"base": job.source.location.place.known_as, "adapter": adapter} if adapter else {}
    return {
        "name": job.source.location.name,
        **merged,
        "bytes": before.nbytes,
        "tensors": before.tensors,
    }


def _table_before(job: Job) -> ParameterTable:
    checkpoint, binding = job.source.checkpoint, job.compiled.binding
    return table_of_tensors(binding.tensors, binding, checkpoint.layout.traits)


@dataclass(frozen=True)
class GGUFReport:
    """A GGUF file, type by type."""

    job: Job
    out: Path
    container: GGUFFileContainer

    @property
    def path(self) -> Path:
        return self.out.with_name(self.container.files(self.out)[0].name)

    def warnings(self) -> Iterable[str]:
        checkpoint, compiled = self.job.source.checkpoint, self.job.compiled
        yield from (*checkpoint.files.warnings, *compiled.warnings, *self.container.tokenizer.warnings)
        substituted = self.container.gguf.substituted
        if substituted:
            base = self.container.gguf.file_type.base.label
            yield (
                f"{len(substituted)} tensors have rows that {base}'s blocks do not divide and "
                f"got a bigger type, for example {substituted[0]}; --no-fallback makes this an error"
            )

    @cached_property
    def _described(self) -> Json:
        rows: dict[str, Json] = {}
        for tensor in self.container.tensors:
            label = tensor.type.label
            row = rows.setdefault(label, {"type": label, "tensors": 0, "parameters": 0, "bytes": 0})
            row["tensors"] += 1
            row["parameters"] += tensor.nbytes * tensor.type.block // tensor.type.block_bytes
            row["bytes"] += tensor.nbytes
        parameters = sum(row["parameters"] for row in rows.values())
        nbytes = sum(row["bytes"] for row in rows.values())
        return {
            "file_type": self.container.gguf.file_type.name,
            "types": list(rows.values()),
            "parameters": parameters,
            "bytes": nbytes,
            "bits_per_weight": 8 * nbytes / parameters,
            "substituted": self.container.gguf.substituted,
        }

    def _told(self) -> Json:
        """The numbers of a plan as --json prints them; those of the source are not in the table."""
        return {
            "out": str(self.path),
            "source": _source_of(self.job, _table_before(self.job)),
            "files": files_json(self.job, self.out),
            **self._described,
        }

    def lines(self) -> list[str]:
        found = self._described
        cells = [[row["type"], str(row["tensors"]), *_sizes(row)] for row in found["types"]]
        total = ["total", str(len(self.container.tensors)), *_sizes(found)]
        head = ["type", "tensors", "parameters", "bytes", "bpw"]
        code = ", ".join(shown(path.name) for path in self.job.source.checkpoint.files.sidecars.code)
        return [
            *_source_lines(self.job, str(self.path)),
            *table(head, [*cells, total], most=terminal_columns()),
            *([f"left out, for a GGUF holds no code of a model: {code}"] if code else []),
        ]

    def plan_json(self) -> Json:
        seen: Json = {"kept": {}, "certificates": {}, "sha256": {}}
        return {"schema": 1, "ok": True, "dry_run": True, **self._told(), "seconds": 0.0, **seen}

    def result_json(self, result: Result, seconds: float) -> Json:
        kept = {name: finite(moved) if moved else "exact" for name, moved in result.record["kept"].items()}
        return {
            "schema": 1,
            "ok": True,
            "dry_run": False,
            **self._told(),
            "seconds": round(seconds, 3),
            **_measured(result),
            "kept": kept,
            "certificates": result.record["certificates"],
            "sha256": dict(result.hashes.files),
        }

    def verdict(self, result: Result, seconds: float) -> str:
        checked = "verified" if self.job.options.verify else "not verified"
        found = f"{self._certificate(result)}{outputs_line(self.job, result.outcome)}"
        return f"done in {seconds:.1f} s, {found}{checked}"

    def _certificate(self, result: Result) -> str:
        """What became of a source that was quantized already: `exact, `, or how many tensors are what."""
        checkpoint = self.job.source.checkpoint
        if checkpoint.quantization is None and not checkpoint.adapter:
            return ""
        found = result.record["certificates"]
        if set(found) == {"exact"}:
            return "exact, "
        return f"{_phrases(found, max(result.record['kept'].values(), default=0.0))}, "


def _sizes(row: Json) -> list[str]:
    bits = f"{8 * row['bytes'] / row['parameters']:.2f}"
    return [f"{row['parameters']:,}", size(row["bytes"]), bits]
