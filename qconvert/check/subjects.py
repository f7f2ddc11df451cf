"""Makes what the linter's rules look at: of a checkpoint that is there, and of one that is planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from qconvert.check.subject import Subject
from qconvert.checkpoint.open import Checkpoint
from qconvert.checkpoint.products import products_of
from qconvert.convert.job import Job
from qconvert.core.encodings import ModelTensor
from qconvert.core.protocols import Reader
from qconvert.core.values import CodebookRows
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.config_checks import dtype_of
from qconvert.formats.tokenizers.huggingface_files import read_tokenizer_json

_TOKENIZER = "tokenizer.json"


def subject_of(checkpoint: Checkpoint, loader: str, tp: int = 1, device: str = "cuda") -> Subject:
    """A checkpoint that a loader is to load on so many ranks of a device, "cuda" or "cpu"."""
    layout = registry.stored_as(checkpoint.config, checkpoint.layout.name)
    return Subject(
        checkpoint.tensors,
        checkpoint.architecture,
        layout,
        loader,
        tp,
        dtype_of(checkpoint.config),
        _tokens(checkpoint.path),
        checkpoint.bind(allow_unknown=True).unknown,
        tuple(checkpoint.products),
        device,
        tuple(path.name for path in checkpoint.files.sidecars.code),
        checkpoint.files.sidecars.missing,
        checkpoint.path.name,
        checkpoint.layout.traits if checkpoint.layout.name == layout else None,
        partial(_scale, checkpoint.reader) if checkpoint.files.has_weights else None,
    )


def _scale(reader: Reader, tensor: ModelTensor) -> float:
    """The scale of a tensor that has one."""
    from qconvert.quant.dequantize import group_scales

    value = reader.read(tensor, 0, 1)
    assert isinstance(value, CodebookRows)
    return float(group_scales(value).flat[0])


def planned_subject(job: Job, loader: str) -> Subject:
    """The folder that a job writes, on one rank of CUDA: its names, shapes and config are those of the plan.

    What `subject_of` makes of it once it is written, so that `check` says the same of both.
    """
    compiled, checkpoint = job.compiled, job.source.checkpoint
    config, sidecars = compiled.config, checkpoint.files.sidecars
    architecture = replace(compiled.architecture, config=config)
    layout = registry.stored_as(config, compiled.layout.name)
    known = {name: t for name, t in compiled.outputs.items() if architecture.parameter(name) is not None}
    return Subject(
        compiled.outputs,
        architecture,
        layout,
        loader,
        dtype=dtype_of(config),
        tokens=_tokens(checkpoint.path),
        products=tuple(products_of(config, known, architecture)),
        code=tuple(path.name for path in sidecars.code),
        missing_code=sidecars.missing,
        file=job.source.location.name,
        own_traits=compiled.layout.traits if compiled.layout.name == layout else None,
    )


def _tokens(folder: Path) -> int | None:
    """One more than the largest token of tokenizer.json; None where there is none, or of another shape."""
    path = folder / _TOKENIZER
    if not path.is_file():
        return None
    found = read_tokenizer_json(path)
    added = found.get("added_tokens") or []
    model = found.get("model") or {}
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [entry.get("id") for entry in added if isinstance(entry, dict)]
    numbers = [number for number in ids if isinstance(number, int)]
    return max(numbers) + 1 if numbers else None
