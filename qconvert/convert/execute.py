"""Carries a draft out: writes the files, verifies them, and gives them their name.

The order is fixed: disk space, data, sidecars, verification, manifest and card, rename. Whatever
fails on the way leaves nothing under the final name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf
from pathlib import Path

from qconvert.checkpoint.hub import ResolvedModel
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.manifest import FILE_NAME, Results, SourceRecord, manifest
from qconvert.convert.model_card import model_card
from qconvert.convert.runner import MOST_STEPS, BlockDone, Outcome, Terms, run
from qconvert.core.dtypes import Json
from qconvert.core.protocols import Layout
from qconvert.formats.huggingface.safetensors_file import plan_files
from qconvert.formats.io.local_file import copy_whole
from qconvert.formats.io.output_folder import OutputDir
from qconvert.formats.io.planned_files import FilePlan, FileSink
from qconvert.formats.io.read_back import Hashes, file_sha256, verify_files
from qconvert.formats.layouts import registry
from qconvert.models.parameter_table import table_of_outputs
from qconvert.plan.compile import Draft, Wish
from qconvert.plan.plan import Unit


@dataclass(frozen=True, slots=True)
class Limits:
    """How an output is made, as far as it does not change a byte of it (but `shard_size` does)."""

    jobs: int
    max_memory: int
    shard_size: int | None
    verify: bool = True
    overwrite: bool = False
    hash_sources: bool = False

    def terms(self, *, allow_nonfinite: bool, allow_requantize: bool) -> Terms:
        """How the plan of a wish is run within these limits."""
        most_steps = inf if allow_requantize else MOST_STEPS
        return Terms(self.jobs, self.max_memory, self.verify, allow_nonfinite, most_steps)


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a conversion needs: the opened source, what was asked, and how to go about it."""

    model: ResolvedModel
    checkpoint: Checkpoint
    wish: Wish
    draft: Draft
    limits: Limits
    layout: Layout

    @property
    def bytes_needed(self) -> int:
        """Bytes of the weight files and of the files copied beside them; the rest is a few pages of text."""
        beside = self.checkpoint.files.sidecars
        copied = sum(path.stat().st_size for path in beside.copied)
        return sum(file.size for file in self.files) + copied + sum(map(len, beside.made.values()))

    @property
    def files(self) -> tuple[FilePlan, ...]:
        """The weight files of the output, to the byte."""
        specs = [spec for unit in self.draft.plan.units for spec in self.layout.stored_arrays(unit.output)]
        parameters = table_of_outputs(self.draft.plan.outputs, self.draft.architecture).parameters
        return plan_files(specs, self.limits.shard_size, {"format": "pt"}, parameters)


@dataclass(frozen=True, slots=True)
class Made:
    """A finished output: where it is, and its manifest."""

    path: Path
    manifest: Json


Listener = Callable[[BlockDone], None]


def convert(job: Job, out: Path, listen: Listener = lambda done: None) -> Made:
    """Write the drafted output to the folder `out`. Errors leave nothing there."""
    checkpoint, limits, files = job.checkpoint, job.limits, job.files
    with OutputDir(out, overwrite=limits.overwrite, sources=[checkpoint.path]) as folder:
        outcome = _write(job, files, folder, listen)
        _copy_sidecars(checkpoint, job.draft, folder)
        hashes = (
            verify_files(folder, files, outcome.written, limits.jobs) if limits.verify else Hashes({}, {})
        )
        record = manifest(
            source_record(job.model, checkpoint, hash_sources=limits.hash_sources),
            job.wish,
            draft=job.draft,
            layout=job.layout,
            results=Results(
                errors=outcome.errors,
                steps=outcome.steps,
                tensor_sha256=hashes.tensors,
                file_sha256=hashes.files,
                file_bytes={file.name: file.size for file in files},
                verified=limits.verify,
            ),
        )
        (folder / FILE_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        card = model_card(
            out.name, record, job.draft, job.layout.traits, checkpoint.files.readme, job.model.repo_id
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return Made(out, record)


def _write(job: Job, files: Sequence[FilePlan], folder: Path, listen: Listener) -> Outcome:
    sink = FileSink(folder, files)
    try:
        events = run(
            job.draft.plan,
            job.checkpoint.reader,
            job.layout,
            sink,
            job.limits.terms(
                allow_nonfinite=job.wish.allow_nonfinite,
                allow_requantize=job.wish.target is not None and job.wish.target.allow_requantize,
            ),
            order=lambda unit: position(job.checkpoint, unit),
        )
        outcome = collect(events, Outcome(), listen)
        sink.commit()
    except BaseException:
        sink.abort()
        raise
    return outcome


def collect(events: Generator[BlockDone, None, None], outcome: Outcome, listen: Listener) -> Outcome:
    """Run to the end: every event goes into `outcome`, and to `listen`."""
    with closing(events):
        for done in events:
            outcome.add(done)
            listen(done)
    return outcome


def position(checkpoint: Checkpoint, unit: Unit) -> tuple[int, int]:
    """Where a unit's first array lies in the source files, so that reading goes forward."""
    first = checkpoint.layout.stored_arrays(unit.inputs[0].tensor)[0]
    return checkpoint.files.source_offset(first.name)


def _copy_sidecars(checkpoint: Checkpoint, draft: Draft, folder: Path) -> None:
    for path in checkpoint.files.sidecars.copied:
        copy_whole(path, folder / path.name)
    for name, made in checkpoint.files.sidecars.made.items():
        (folder / name).write_text(made, encoding="utf-8")
    text = json.dumps(draft.config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    claimed = registry.claimed_by(draft.config)
    if claimed and claimed.traits.settings_file:
        settings = json.dumps(draft.config[claimed.traits.config_key], indent=2)
        (folder / claimed.traits.settings_file).write_text(settings + "\n", encoding="utf-8")


def source_record(model: ResolvedModel, checkpoint: Checkpoint, *, hash_sources: bool) -> SourceRecord:
    """The source's files and header hashes; whole-file hashes only when asked for."""
    files = tuple(
        {
            "name": file.path.name,
            "bytes": file.size,
            "header_sha256": file.header_sha256,
            "sha256": file_sha256(file.path) if hash_sources else None,
        }
        for file in checkpoint.files.files
    )
    return SourceRecord(
        model.repo_id or model.name, model.repo_id, model.commit, checkpoint.files.index_sha256, files
    )
