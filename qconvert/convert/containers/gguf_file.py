"""Writes a GGUF file, or numbered parts of one: metadata, tokenizer, tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.calibration import PlannedStatistics
from qconvert.calibrate.imatrix import ImatrixStatistics
from qconvert.checkpoint.gguf_model import GGUFModel
from qconvert.convert.gguf_sidecars import card
from qconvert.convert.job import OpenedModel, RunOptions
from qconvert.convert.outcome import Outcome, WrittenRows
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import GgmlBlocks, ModelTensor, Unquantized
from qconvert.core.ggml_types import KV, GGUFTensor
from qconvert.core.protocols import Layout
from qconvert.errors import REPORT, BadRecipe, CheckFailed, UnsupportedModel, shown
from qconvert.formats.gguf.header import read_gguf
from qconvert.formats.gguf.publication import partial_file, settle
from qconvert.formats.gguf.writer import GGUFSink, check_target, plan_files
from qconvert.formats.huggingface.model_card_header import read_front_matter
from qconvert.formats.huggingface.pooling import read_pooling
from qconvert.formats.io.journal import discard
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.read_back import Hashes, HeaderCheck, Progress, verify_files
from qconvert.formats.io.strict_json import read_json_object
from qconvert.formats.layouts.gguf import stored
from qconvert.formats.tokenizers.to_gguf import GGUFTokenizer, has_tokenizer, read_tokenizer
from qconvert.models.gguf.identity import Identity, ParameterCounts, identify
from qconvert.models.gguf.keys import file_keys
from qconvert.models.parameter_table import table_of_outputs
from qconvert.plan.gguf.constants import constants_of
from qconvert.plan.gguf.mixture import visit_order
from qconvert.plan.passes.activation_order import reordered
from qconvert.plan.request import GGUFTarget
from qconvert.plan.scales import record_of
from qconvert.plan.state import Compiled, GGUFPlan

if TYPE_CHECKING:
    import numpy as np

    from qconvert.convert.resume import RunJournal

JOURNAL_SUFFIX = ".partial-journal"
# Our own key: the tensors (by the source's names) whose rows or columns are in another order than there.
REORDERED = "qconvert.reordered"
# Our own key: the text on which codes were chosen together, and how, as JSON.
CALIBRATION = "qconvert.calibration"
# Our own key: what a target made of every weight and at what price, as JSON (`target` in a manifest).
TARGET = "qconvert.target"
# Our own key: the inputs whose channels are scaled, as JSON (`scaling` in the manifest of a folder).
SCALING = "qconvert.scaling"
# llama.cpp recognises Phi-3 by its name, and looks these tokens up without checking that they exist
# (llama_vocab::impl::load in src/llama-vocab.cpp).
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_TOKENS = ("</s>", "<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class GGUFFileContainer:
    """The output of `to-gguf`. `pre_tokenizer` is llama.cpp's name, where it is not recognised."""

    source: OpenedModel
    compiled: Compiled
    options: RunOptions
    pre_tokenizer: str | None = None
    _planned: dict[str, tuple[FilePlan, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def layout(self) -> Layout:
        return self.compiled.layout

    @property
    def gguf(self) -> GGUFPlan:
        assert self.compiled.gguf is not None
        return self.compiled.gguf

    @property
    def is_tower(self) -> bool:
        """Whether the file holds the vision tower beside the language model, which has no tokens."""
        target = self.compiled.request.target
        return isinstance(target, GGUFTarget) and target.tower

    @cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        return constants_of(self.gguf.facts)

    @cached_property
    def tensors(self) -> list[GGUFTensor]:
        """The records of all tensors, in the order of the tool that would have written the file last.

        The converter keeps the source's order, llama-quantize sorts.
        """
        f32 = Unquantized(DType.F32)
        constants = {n: ModelTensor(n, values.shape, f32) for n, values in self.constants.items()}
        found = constants | self.compiled.outputs
        names = visit_order(found) if self.gguf.file_type.base.is_quantized else found
        return [stored(found[name]) for name in names]

    @cached_property
    def tokenizer(self) -> GGUFTokenizer:
        """The tokenizer of a folder; that of a GGUF file stays as it is."""
        checkpoint = self.source.checkpoint
        if self.is_tower:
            return GGUFTokenizer((), ())
        if isinstance(checkpoint.files, GGUFModel):
            if self.pre_tokenizer:
                raise BadRecipe(
                    "--pre-tokenizer: the tokenizer of a GGUF file stays as it is", "leave it out"
                )
            return checkpoint.files.tokenizer
        embed = checkpoint.architecture.table("embed")
        assert embed is not None
        if checkpoint.assumed and not any(map(has_tokenizer, checkpoint.files.sidecars.copied)):
            return GGUFTokenizer((), ("the tokenizer is not here: the file will be larger by its lists",))
        return read_tokenizer(checkpoint.path, embed.shape[0], checkpoint.config, self.pre_tokenizer)

    @cached_property
    def identity(self) -> Identity:
        """What the model is called, from its folder, its card and its configs, or from its own keys."""
        checkpoint, name = self.source.checkpoint, self.source.location.name
        generation = checkpoint.path / "generation_config.json"
        counts = ParameterCounts.of((t.name, t.shape) for t in self.tensors)
        if isinstance(checkpoint.files, GGUFModel):
            kv = checkpoint.files.general
            name = next((str(e.value) for e in kv if e.key == "general.name"), name)
            return replace(identify(name, {}, counts), kv=kv)
        return identify(
            name,
            checkpoint.config,
            counts,
            card=read_front_matter(checkpoint.path),
            generation=read_json_object(generation) if generation.is_file() else None,
        )

    def keys(self) -> Sequence[KV]:
        """All metadata, in the order of the tool that would have written this file type last."""
        path, statistics = self.source.checkpoint.path, self.compiled.request.statistics
        keys = file_keys(
            self.gguf.facts,
            file_type=self.gguf.file_type.number,
            general=self.identity.kv,
            tokenizer=self.tokenizer.kv,
            requantized=self.gguf.file_type.base.is_quantized,
            pooling=read_pooling(path) if path.is_dir() else None,
        )
        undone = self.compiled.plan.units if self.compiled.request.undo_act_order else ()
        moved = [unit.source.name for unit in undone if reordered(unit)]
        own = [KV.texts(REORDERED, moved)] if moved else []
        if self.compiled.request.chosen is not None:
            own.append(KV.text(TARGET, self._target_record(self.compiled.request.chosen)))
        measured: Sequence[KV] = ()
        if isinstance(statistics, ImatrixStatistics):
            measured = statistics.imatrix.kv
        elif isinstance(statistics, PlannedStatistics):
            # One string, as `calibration` in the manifest of a folder: keys that llama.cpp does not know.
            measured = (KV.text(CALIBRATION, json.dumps(statistics.record)),)
        if self.compiled.scaled:
            own.append(KV.text(SCALING, json.dumps(record_of(self.compiled.scaled))))
        return (*keys, *measured, *own)

    def _target_record(self, chosen: Json) -> str:
        """What a target chose, as JSON; without the groups' prices where these took over 1 % of the file."""
        text = json.dumps(chosen, separators=(",", ":"))
        if len(text) > sum(tensor.nbytes for tensor in self.tensors) // 100:
            text = json.dumps({k: v for k, v in chosen.items() if k != "groups"}, separators=(",", ":"))
        return text

    def check(self) -> None:
        """Raise UnsupportedModel for a name that llama.cpp expects tokens of which the vocabulary lacks."""
        lists = (e.value for e in self.tokenizer.kv if e.key == "tokenizer.ggml.tokens")
        known = next((set(tokens) for tokens in lists if isinstance(tokens, tuple)), set(_PHI3_TOKENS))
        name, lacking = self.identity.name, [token for token in _PHI3_TOKENS if token not in known]
        if lacking and any(each in name.lower() for each in _PHI3_NAMES):
            raise UnsupportedModel(
                f"general.name {shown(name)}: llama.cpp takes the model for Phi-3 and does not load it "
                f"without {', '.join(lacking)}, which this tokenizer lacks",
                "give the folder another name, or its card another model_name; or add the tokenizer of Phi-3",
            )

    def files(self, out: Path) -> tuple[FilePlan, ...]:
        """The file, or parts of at most `shard_size` bytes of tensors, to the byte."""
        if out.name not in self._planned:  # once: the vocabulary alone can have 150,000 strings
            limit = self.options.shard_size
            self._planned[out.name] = plan_files(out.name, self.keys(), self.tensors, max_part_bytes=limit)
        return self._planned[out.name]

    @property
    def bytes_needed(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def of(self, compiled: Compiled) -> GGUFFileContainer:
        return replace(self, compiled=compiled)

    def default_out(self, suffix: str) -> Path:
        if self.is_tower:  # as llama.cpp's programs look for it
            return Path(
                f"mmproj-{replace(self.identity, size_label=None).file_name(self.gguf.file_type.name)}"
            )
        return Path(self.identity.file_name(suffix or self.gguf.file_type.name))

    def check_target(self, out: Path) -> None:
        if not self.options.keep:
            return
        files = [out.with_name(file.name) for file in self.files(out)]
        settle(files)
        if all(path.exists() for path in files) and not any(partial_file(path).exists() for path in files):
            discard(out.with_name(f"{out.name}{JOURNAL_SUFFIX}"))  # of a run that was killed when it was done
        for file in self.files(out):
            check_target(
                out.with_name(file.name),
                overwrite=self.options.overwrite,
                sources=[self.source.checkpoint.path],
            )

    def partial(self, out: Path) -> Mapping[Path, int]:
        """They lie beside their final names."""
        return {partial_file(out.with_name(file.name)): file.size for file in self.files(out)}

    def unfinished(self, out: Path) -> tuple[Path, ...]:
        """The files, the journal last."""
        return (*self.partial(out), out.with_name(f"{out.name}{JOURNAL_SUFFIX}"))

    @property
    def check_header(self) -> HeaderCheck:
        return check_gguf_header

    def complete(self, folder: Path, out: Path, outcome: Outcome, hashes: Hashes) -> Json:
        """How far each tensor whose codes were kept has moved, and the certificates of all."""
        units = self.compiled.plan.units
        kept = {
            unit.output.name: outcome.code_error(unit.output.name)
            for unit in units
            if isinstance(unit.output.encoding, GgmlBlocks) and any(op.keeps_codes for op in unit.ops)
        }
        return {"kept": kept, "certificates": outcome.certificates(units)}

    def texts(self, folder: Path, path: Path) -> Mapping[str, bytes | Path]:
        """The model card; nothing else of the folder belongs to the file."""
        compiled, source = self.compiled, self.source
        rows = table_of_outputs(compiled.outputs, compiled.architecture, compiled.layout.traits)
        return {"README.md": card(path, rows, source.checkpoint, source.location.name).encode()}

    @contextmanager
    def create(self, out: Path, journal: RunJournal) -> Iterator[OpenGGUF]:
        """The files under the suffix `.partial`, renamed when all of them are verified."""
        files, sizes = self.files(out), self.partial(out)
        journaled = out.with_name(f"{out.name}{JOURNAL_SUFFIX}")
        sink = GGUFSink(
            out.parent,
            files,
            overwrite=self.options.overwrite or not self.options.keep,
            goes_on=lambda: journal.goes_on(journaled, sizes, next(iter(sizes))),
            sparse=self.options.drop,
        )
        try:
            journal.open(journaled)
            yield OpenGGUF(self, out.with_name(files[0].name), files, sink)
            sink.publish() if self.options.keep else sink.abort()
        except BaseException as error:
            if journal.survives(error):
                sink.leave()
            else:
                with suppress(OSError):  # of a disk that fails: without its files a journal does not count
                    journaled.unlink(missing_ok=True)
                sink.abort()
            raise
        discard(journaled)


@dataclass(frozen=True, slots=True)
class OpenGGUF:
    """The files while they are written."""

    container: GGUFFileContainer
    path: Path
    files: tuple[FilePlan, ...]
    sink: GGUFSink

    def verify(
        self,
        written: Mapping[str, Sequence[WrittenRows]],
        jobs: int,
        progress: Progress,
        files: Sequence[FilePlan] | None = None,
    ) -> Hashes:
        files = self.files if files is None else files
        partial = [replace(file, name=partial_file(Path(file.name)).name) for file in files]
        found = verify_files(self.path.parent, partial, written, jobs, check_gguf_header, progress)
        names = zip(files, partial, strict=True)
        return Hashes({file.name: found.files[part.name] for file, part in names}, found.tensors)

    def finish(self, outcome: Outcome, hashes: Hashes) -> Json:
        return self.container.complete(self.path.parent, self.path, outcome, hashes)

    def texts(self) -> Mapping[str, bytes | Path]:
        return self.container.texts(self.path.parent, self.path)


def check_gguf_header(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Read the file's header back with the strict reader; CheckFailed if it holds other tensors.

    The reader shares no code with the writer; in the tests, the gguf package and llama.cpp read what
    it accepts. (The gguf package alone takes 6 s for a vocabulary of 150,000 tokens.)
    """
    header = read_gguf(path)
    seen = {name: tensor.stored for name, tensor in header.tensors.items()}
    if seen != dict(specs):
        odd = next(name for name in {**seen, **specs} if seen.get(name) != specs.get(name))
        raise CheckFailed(f"{path.name}: {odd} is {seen.get(odd)}, not {specs.get(odd)}", REPORT)
