"""Carries a GGUF draft out: one file (or numbered parts), verified before it gets its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np

from qconvert.checkpoint.gguf_model import GGUFModel
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.execute import Limits, Listener, collect, position
from qconvert.convert.runner import Outcome, WrittenRows, run
from qconvert.core.dtypes import TensorSpec
from qconvert.core.ggml_types import KV, GGUFTensor
from qconvert.errors import REPORT, BadRecipe, CheckFailed, UnsupportedModel, shown
from qconvert.formats.gguf.header import read_gguf
from qconvert.formats.gguf.imatrix import Imatrix
from qconvert.formats.gguf.writer import GGUFSink, plan_files
from qconvert.formats.huggingface.model_card_header import read_front_matter
from qconvert.formats.huggingface.pooling import read_pooling
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.read_back import Hashes, verify_files
from qconvert.formats.io.strict_json import read_json_object
from qconvert.formats.layouts.gguf import GGUFLayout, stored
from qconvert.formats.tokenizers.to_gguf import GGUFTokenizer
from qconvert.models.gguf.identity import Identity, ParameterCounts, identify
from qconvert.models.gguf.keys import file_keys
from qconvert.ops.transcode import IntoBlocks
from qconvert.plan.gguf.compile import KEPT, GGUFDraft, GGUFWish

# Our own key: the tensors (by the source's names) whose rows or columns are in another order than there.
REORDERED = "qconvert.reordered"


@dataclass(frozen=True)
class GGUFJob:
    """Everything that decides a GGUF file: source, what was asked, draft, vocabulary and name."""

    checkpoint: Checkpoint
    wish: GGUFWish
    draft: GGUFDraft
    tokenizer: GGUFTokenizer
    model_name: str
    limits: Limits
    imatrix: Imatrix | None = None

    @property
    def tensors(self) -> list[GGUFTensor]:
        """The records of all tensors, in the order of the file."""
        return [stored(tensor) for tensor in self.draft.tensors]

    @property
    def identity(self) -> Identity:
        """What the model is called, from its folder, its card and its configs, or from its own keys."""
        path = self.checkpoint.path
        generation = path / "generation_config.json"
        counts = ParameterCounts.of((t.name, t.shape) for t in self.tensors)
        if isinstance(self.checkpoint.files, GGUFModel):
            kv = self.checkpoint.files.general
            name = next((str(e.value) for e in kv if e.key == "general.name"), self.model_name)
            return replace(identify(name, {}, counts), kv=kv)
        return identify(
            self.model_name,
            self.checkpoint.config,
            counts,
            card=read_front_matter(path),
            generation=read_json_object(generation) if generation.is_file() else None,
        )

    def keys(self) -> Sequence[KV]:
        """All metadata, in the order of the tool that would have written this file type last."""
        keys = file_keys(
            self.draft.facts,
            file_type=self.draft.file_type.number,
            general=self.identity.kv,
            tokenizer=self.tokenizer.kv,
            requantized=self.draft.file_type.base.is_quantized,
            pooling=read_pooling(self.checkpoint.path) if self.checkpoint.path.is_dir() else None,
        )
        own = [KV.texts(REORDERED, self.draft.reordered)] if self.draft.reordered else []
        return (*keys, *(self.imatrix.kv if self.imatrix else ()), *own)

    def files(self, name: str, split: int | None) -> tuple[FilePlan, ...]:
        """The file (or parts of at most `split` bytes of tensors), to the byte."""
        return plan_files(name, self.keys(), self.tensors, max_part_bytes=split)


def check_encoders(draft: GGUFDraft) -> None:
    """Raise BadRecipe naming the first tensor that got a type which cannot be written here."""
    from qconvert.quant.ggml import ENCODED

    for name, choice in draft.choices.items():
        if choice.type.is_quantized and choice.type.name not in ENCODED and choice.reason != KEPT:
            raise BadRecipe(
                f"{name}: {choice.type.label} ({choice.reason}) is read here, but not written",
                "`qconvert to-gguf --type list` shows what is",
            )


# llama.cpp tells Phi-3 by its name, and looks these tokens up without asking whether they are there
# (llama_vocab::impl::load in src/llama-vocab.cpp).
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_TOKENS = ("</s>", "<unk>", "<s>", "<|endoftext|>")


def check_name(job: GGUFJob) -> None:
    """Raise UnsupportedModel for a name that llama.cpp expects tokens of which the vocabulary lacks."""
    name = job.identity.name
    if not any(each in name.lower() for each in _PHI3_NAMES):
        return
    lists = (e.value for e in job.tokenizer.kv if e.key == "tokenizer.ggml.tokens")
    known = next((set(tokens) for tokens in lists if isinstance(tokens, tuple)), set(_PHI3_TOKENS))
    lacking = [token for token in _PHI3_TOKENS if token not in known]
    if lacking:
        raise UnsupportedModel(
            f"general.name {shown(name)}: llama.cpp takes the model for Phi-3 and does not load it without "
            f"{', '.join(lacking)}, which this tokenizer lacks",
            "give the folder another name, or its card another model_name; or add the tokenizer of Phi-3",
        )


@dataclass(frozen=True, slots=True)
class GGUFMade:
    """What came of it: hashes, and for every tensor whose codes were kept how far that moved a weight,
    in steps of its old grid (0 is exact).
    """

    hashes: Hashes
    kept: Mapping[str, float]


def convert_gguf(job: GGUFJob, out: Path, files: Sequence[FilePlan], listen: Listener) -> GGUFMade:
    """Write planned files into the folder of `out`; nothing is left under a final name on error."""
    limits = job.limits
    sink = GGUFSink(out.parent, files, overwrite=limits.overwrite)
    try:
        outcome = _write(job, sink, listen)
        sink.commit()
        hashes = Hashes({}, {})
        if limits.verify:
            partial = [replace(file, name=f"{file.name}.partial") for file in files]
            found = verify_files(out.parent, partial, outcome.written, limits.jobs, check_gguf_header)
            hashes = Hashes(
                {f.name: found.files[p.name] for f, p in zip(files, partial, strict=True)}, found.tensors
            )
        sink.publish()
    except BaseException:
        sink.abort()
        raise
    carried = (u for u in job.draft.plan.units if any(isinstance(op, IntoBlocks) for op in u.ops))
    return GGUFMade(hashes, {u.output.name: outcome.steps[u.output.name] for u in carried})


def _write(job: GGUFJob, sink: GGUFSink, listen: Listener) -> Outcome:
    outcome = Outcome()
    for name, values in job.draft.constants.items():
        rows = np.ascontiguousarray(values.reshape(len(values), -1), "<f4")
        sink.write(name, 0, rows)
        outcome.written[name].append(WrittenRows(name, 0, len(rows), rows.shape[1], crc32(octets(rows))))
    events = run(
        job.draft.plan,
        job.checkpoint.reader,
        GGUFLayout(),
        sink,
        job.limits.terms(
            allow_nonfinite=job.wish.allow_nonfinite, allow_requantize=job.wish.allow_requantize
        ),
        order=lambda unit: position(job.checkpoint, unit),
    )
    return collect(events, outcome, listen)


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
