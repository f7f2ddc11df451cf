"""Writes a Hugging Face folder: safetensors, config.json, sidecars, manifest and model card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.convert.job import OpenedModel, RunOptions
from qconvert.convert.manifest import FILE_NAME, manifest, write_manifest
from qconvert.convert.model_card import model_card
from qconvert.convert.outcome import Outcome, WrittenRows
from qconvert.core.dtypes import Json
from qconvert.core.protocols import Layout
from qconvert.errors import BadRecipe, shown
from qconvert.formats.huggingface.safetensors_plan import plan_arrays
from qconvert.formats.io.journal import FILE_NAME as JOURNAL
from qconvert.formats.io.local_file import copy_whole
from qconvert.formats.io.output_folder import WORKING, OutputDir, check_target, partial_folder
from qconvert.formats.io.planned_files import FilePlan, FileSink
from qconvert.formats.io.read_back import Hashes, Progress, verify_files
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.stored_arrays import arrays_of
from qconvert.models.parameter_table import ParameterTable, table_of_outputs
from qconvert.plan.state import Compiled

if TYPE_CHECKING:
    import numpy as np

    from qconvert.convert.resume import RunJournal


@dataclass(frozen=True)
class SafetensorsFolder:
    """The output of every command but `to-gguf`."""

    source: OpenedModel
    compiled: Compiled
    options: RunOptions

    @property
    def layout(self) -> Layout:
        return self.compiled.layout

    @property
    def constants(self) -> Mapping[str, np.ndarray]:
        return {}

    @cached_property
    def table(self) -> ParameterTable:
        """The parameters of the output by role."""
        return table_of_outputs(self.compiled.outputs, self.compiled.architecture, self.layout.traits)

    @cached_property
    def _files(self) -> tuple[FilePlan, ...]:
        arrays = arrays_of(self.layout, (unit.output for unit in self.compiled.plan.units))
        tensors = (unit.output for unit in self.compiled.plan.units)
        metadata = {"format": "pt", **self.layout.file_metadata(tensors, self.compiled.config)}
        return plan_arrays(arrays, self.options.shard_size, metadata, self.table.parameters)

    def files(self, out: Path) -> tuple[FilePlan, ...]:
        """The shards, whose names do not depend on the folder's."""
        return self._files

    @property
    def bytes_needed(self) -> int:
        beside = self.source.checkpoint.files.sidecars
        copied = sum(path.stat().st_size for path in beside.copied)
        return sum(file.size for file in self._files) + copied + sum(map(len, beside.made.values()))

    def of(self, compiled: Compiled) -> SafetensorsFolder:
        return replace(self, compiled=compiled)

    def default_out(self, suffix: str) -> Path:
        return Path(f"{self.source.location.name}-{suffix}")

    def check_target(self, out: Path) -> None:
        if out.suffix == ".gguf":
            raise BadRecipe(
                f"{shown(out.name)}: a folder is written, not a GGUF file",
                f"`qconvert to-gguf MODEL --type q4_k_m -o {shown(out.name)}` writes one",
            )
        if self.options.keep:
            check_target(out, overwrite=self.options.overwrite, sources=[self.source.checkpoint.path])

    def partial(self, out: Path) -> Mapping[Path, int]:
        """They lie in a folder of their own."""
        folder = partial_folder(out.resolve())
        return {folder / file.name: file.size for file in self._files}

    def unfinished(self, out: Path) -> tuple[Path, ...]:
        """The folder of its own."""
        return (partial_folder(out.resolve()),)

    @property
    def check_header(self) -> None:
        return None

    def complete(self, folder: Path, out: Path, outcome: Outcome, hashes: Hashes) -> Json:
        """Sidecars, config.json, manifest and model card."""
        source = self.source
        self._write_sidecars(folder)
        files = {file.name: file.size for file in self._files}
        record = manifest(source, self.compiled, outcome, hashes, files, self.options)
        found = write_manifest(folder / FILE_NAME, record, self.compiled, outcome, hashes)
        readme, repo_id = source.checkpoint.files.readme, source.location.place.repo_id
        code = [path.name for path in source.checkpoint.files.sidecars.code]
        card = model_card(out.name, record, self.compiled, readme, repo_id, code, exact=found.exact)
        (folder / "README.md").write_text(card, encoding="utf-8")
        return {**record, "certificates": asdict(found)}

    def texts(self, folder: Path, path: Path) -> Mapping[str, bytes | Path]:
        """All that is in the folder."""
        weights = {file.name for file in self._files if file.specs}
        found = (path for path in folder.rglob("*") if path.is_file() and path.name not in weights)
        return {path.relative_to(folder).as_posix(): path for path in found if path.name not in WORKING}

    def _write_sidecars(self, folder: Path) -> None:
        sidecars, config = self.source.checkpoint.files.sidecars, self.compiled.config
        source = self.source.checkpoint.path
        for path in sidecars.copied:
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            copy_whole(path, target)
        for name, made in sidecars.made.items():
            (folder / name).write_text(made, encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        claimed = registry.claimed_by(config)
        if claimed and claimed.traits.settings_file:
            said = config[claimed.traits.config_key]
            settings = json.dumps(claimed.settings_file(said) if claimed.settings_file else said, indent=2)
            (folder / claimed.traits.settings_file).write_text(settings + "\n", encoding="utf-8")

    @contextmanager
    def create(self, out: Path, journal: RunJournal) -> Iterator[OpenFolder]:
        """The folder under a name of its own, renamed when all is there."""
        sizes = self.partial(out)
        folder = OutputDir(
            out,
            overwrite=self.options.overwrite,
            sources=[self.source.checkpoint.path],
            goes_on=lambda folder: journal.goes_on(folder / JOURNAL, sizes, partial_folder(out)),
            survives=journal.survives,
            keep=self.options.keep,
        )
        with folder as path:
            sink = FileSink(path, self._files, resumed=folder.resumed, sparse=self.options.drop)
            try:
                journal.open(path / JOURNAL)
                yield OpenFolder(self, out, path, sink)
            finally:
                sink.suspend()


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """The folder while it is written."""

    container: SafetensorsFolder
    path: Path
    folder: Path
    sink: FileSink

    def verify(
        self,
        written: Mapping[str, Sequence[WrittenRows]],
        jobs: int,
        progress: Progress,
        files: Sequence[FilePlan] | None = None,
    ) -> Hashes:
        files = self.container.files(self.path) if files is None else files
        return verify_files(self.folder, files, written, jobs, None, progress)

    def texts(self) -> Mapping[str, bytes | Path]:
        return self.container.texts(self.folder, self.path)

    def finish(self, outcome: Outcome, hashes: Hashes) -> Json:
        return self.container.complete(self.folder, self.path, outcome, hashes)
