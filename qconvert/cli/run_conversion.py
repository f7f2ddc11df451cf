"""What every writing command does once its wish is known: open, draft, say, carry out, report."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.exit_codes import after_the_work
from qconvert.cli.options import DEFAULT_MAX_MEMORY, DEFAULT_SHARD_SIZE, available_cores
from qconvert.cli.progress import compile_kernels, progress
from qconvert.core.sizes import parse_size
from qconvert.errors import QConvertError

if TYPE_CHECKING:
    from qconvert.convert.execute import Job, Limits, Made
    from qconvert.core.dtypes import Json
    from qconvert.models.parameter_table import ParameterTable
    from qconvert.plan.compile import Wish
    from qconvert.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Flags:
    """The values of `options.writing_options`."""

    out: Path | None
    overwrite: bool
    dry_run: bool
    as_json: bool
    quiet: bool
    verify: bool
    jobs: int | None
    max_memory: int
    shard_size: int
    hash_sources: bool
    dtype: str | None
    revision: str | None
    allow_unknown: bool
    allow_nonfinite: bool

    @classmethod
    def defaults(cls, out: Path, *, overwrite: bool = False, quiet: bool = False) -> Flags:
        """The flags of a call from within, as if nothing else had been typed."""
        return cls(
            out=out,
            overwrite=overwrite,
            dry_run=False,
            as_json=False,
            quiet=quiet,
            verify=True,
            jobs=None,
            max_memory=parse_size(DEFAULT_MAX_MEMORY),
            shard_size=parse_size(DEFAULT_SHARD_SIZE),
            hash_sources=False,
            dtype=None,
            revision=None,
            allow_unknown=False,
            allow_nonfinite=False,
        )

    @property
    def limits(self) -> Limits:
        from qconvert.convert.execute import Limits

        return Limits(
            self.jobs or available_cores(),
            self.max_memory,
            self.shard_size,
            verify=self.verify,
            overwrite=self.overwrite,
            hash_sources=self.hash_sources,
        )

    def wish(
        self, command: str, recipe: Recipe, *, unfuse: tuple[str, ...] = (), dequantize: bool = False
    ) -> Wish:
        """The wish of a command with this recipe."""
        from qconvert.core.dtypes import DTYPE_BY_CODE
        from qconvert.plan.compile import Wish

        return Wish(
            command,
            recipe,
            dtype=DTYPE_BY_CODE[self.dtype.upper()] if self.dtype else None,
            allow_unknown=self.allow_unknown,
            allow_nonfinite=self.allow_nonfinite,
            unfuse=unfuse,
            dequantize=dequantize,
        )


def write(model: str, wish: Wish, suffix: str, flags: Flags) -> None:
    """Carry out a writing command and print its result. `suffix` completes the derived name."""
    from qconvert.convert.execute import convert
    from qconvert.formats.io.local_file import require_free_disk
    from qconvert.formats.io.output_folder import check_target

    if flags.out and not flags.dry_run:  # before a download
        local = [path for path in (Path(model),) if path.exists()]
        check_target(flags.out, overwrite=flags.overwrite, sources=local)
    job = prepare(model, wish, flags)
    out = flags.out or Path(f"{job.model.name}-{suffix}")
    if not flags.dry_run:
        check_target(out, overwrite=flags.overwrite, sources=[job.checkpoint.path])
    _say_before(job, flags)
    if flags.dry_run:
        _print_plan(job, out, flags)
        return
    require_free_disk(out, job.bytes_needed)
    talks = not (flags.quiet or flags.as_json)
    compile_kernels(job.draft.plan, talks=talks)
    started = time.perf_counter()
    with progress(job.draft.plan, talks=talks) as listen:
        made = convert(job, out, listen)
    with after_the_work():
        _print_made(job, made, time.perf_counter() - started, flags)


def prepare(model: str, wish: Wish, flags: Flags) -> Job:
    """Open the source and draft the output; nothing is written."""
    from qconvert.check.compare import difference
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.convert.execute import Job
    from qconvert.formats.layouts import registry
    from qconvert.plan.compile import draft

    resolved = resolve(model, revision=flags.revision)
    checkpoint = open_checkpoint(resolved.path, declared=wish.recipe.architecture)
    layout = checkpoint.layout_for(registry.writer(wish.target.layout)) if wish.target else checkpoint.writer
    if not checkpoint.files.has_weights:
        raise QConvertError(f"{model}: no weights beside the config.json", "give the whole model folder")
    binding = checkpoint.bind(allow_unknown=wish.allow_unknown)
    drafted = draft(
        binding,
        wish,
        compare=lambda a, b: difference(checkpoint.reader, a, checkpoint.reader, b),
        write_config=layout.settings,
        groups_of=checkpoint.groups_of_columns,
        folds=checkpoint.folds,
    )
    return Job(resolved, checkpoint, wish, drafted, flags.limits, layout)


def _say_before(job: Job, flags: Flags) -> None:
    """Warnings and loader notices, on stderr, before the work starts."""
    from qconvert.plan.loader_notices import notice_lines

    if flags.as_json:
        return
    for warning in (*job.checkpoint.files.warnings, *job.draft.warnings):
        click.echo(f"Warning: {warning}", err=True)
    lines = notice_lines(job.draft.notices)
    if lines:
        click.echo("Warning: " + "\n".join(lines), err=True)


def _describe(job: Job) -> Json:
    """The numbers of a plan, the same before and after it is carried out."""
    from qconvert.models.parameter_table import table_of_tensors

    before = table_of_tensors(
        job.checkpoint.tensors, job.checkpoint.bind(allow_unknown=True), job.checkpoint.layout.traits
    )
    after = _census(job)
    return {
        "source": {"name": job.model.name, "bytes": before.nbytes, "tensors": before.tensors},
        "output": {
            **after.to_json(),
            "bits_per_weight": after.bits_per_weight,
            "files": [{"name": f.name, "bytes": f.size} for f in job.files],
        },
        "recipe": job.wish.recipe.to_json(),
        "max_memory": job.limits.max_memory,
        "warnings": [
            *job.checkpoint.files.warnings,
            *job.draft.warnings,
            *(notice.sentence for notice in job.draft.notices),
        ],
    }


def _census(job: Job) -> ParameterTable:
    from qconvert.models.parameter_table import table_of_outputs

    return table_of_outputs(job.draft.plan.outputs, job.draft.architecture, job.layout.traits)


def _print_table(job: Job, out: Path) -> None:
    from qconvert.report.tables import count, parameter_table_lines, size

    described = _describe(job)
    click.echo(f"{job.model.name}  ->  {out}/")
    click.echo("\n".join(parameter_table_lines(_census(job))))
    click.echo(
        f"{size(described['source']['bytes'])} -> {size(sum(f.size for f in job.files))} in "
        f"{count(len(job.files), 'file')}, at most {size(job.limits.max_memory)} of working memory"
    )


def _print_plan(job: Job, out: Path, flags: Flags) -> None:
    if flags.as_json:
        click.echo(json.dumps({"schema": 1, "dry_run": True, "out": str(out), **_describe(job)}))
    elif flags.quiet:
        click.echo(str(out))
    else:
        _print_table(job, out)
        click.echo("dry run: nothing was written", err=True)


def _print_made(job: Job, made: Made, seconds: float, flags: Flags) -> None:
    if flags.as_json:
        result = {"schema": 1, "dry_run": False, "out": str(made.path), "seconds": round(seconds, 3)}
        totals = made.manifest["totals"]
        click.echo(json.dumps({**result, **_describe(job), "totals": totals, "verified": job.limits.verify}))
        return
    if not flags.quiet:
        _print_table(job, made.path)
        click.echo(_verdict(made, seconds), err=True)
    else:
        click.echo(str(made.path))


def _verdict(made: Made, seconds: float) -> str:
    error = made.manifest["totals"]["relative_rms_error"]
    lost = "" if error is None else f", relative RMS error {error:.4f}"
    checked = "verified" if made.manifest["verified"] else "not verified"
    return f"done in {seconds:.1f} s, {certificate_line(made.manifest)}{lost}, {checked}"


def certificate_line(manifest: Json) -> str:
    """The certificate of an output in one line: `exact`, or how many tensors are what."""
    from qconvert.convert.manifest import certificates

    found = certificates(manifest)
    if set(found["counts"]) <= {"exact"}:
        return "exact"
    phrases = [f"{count} {kind}" for kind, count in sorted(found["counts"].items())]
    measured = f" (at most {found['max_steps']:.2g} steps)" if found["max_steps"] else ""
    return " + ".join(phrases) + measured
