"""Opens a model and compiles a request for it; nothing is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qconvert.calibrate.imatrix import open_imatrix
from qconvert.checkpoint.facts import gather_facts
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import WRITERS, open_checkpoint
from qconvert.convert.containers.gguf_file import GGUFFileContainer
from qconvert.convert.containers.safetensors_folder import SafetensorsFolder
from qconvert.convert.job import Job, RunOptions, Source
from qconvert.core.protocols import Layout
from qconvert.errors import QConvertError
from qconvert.formats.layouts.gguf import GGUFLayout
from qconvert.models.declared import Declaration
from qconvert.plan.compile import compile_request
from qconvert.plan.request import GGUFTarget, Request


def open_source(model: str, *, revision: str | None = None, declared: Declaration | None = None) -> Source:
    """Find a model (a path, or `org/name[@revision]` on the Hub) and open it; only headers are read.

    `declared` is the architecture of a model that the catalogue lacks.
    """
    resolved = resolve(model, revision=revision)
    return Source(resolved, open_checkpoint(resolved.path, declared=declared))


def prepare(
    source: Source,
    request: Request,
    options: RunOptions,
    *,
    imatrix: Path | None = None,
    pre_tokenizer: str | None = None,
) -> Job:
    """Compile a request for an opened model.

    `imatrix` is an importance matrix, whose statistics weigh the errors of new codes; `pre_tokenizer`
    llama.cpp's name of a GGUF's pre-tokenizer. Raises BadRecipe for a request that contradicts the model,
    UnsupportedModel for a model that the output cannot hold.
    """
    checkpoint = source.checkpoint
    if not checkpoint.files.has_weights:
        raise QConvertError(
            f"{source.model.name}: no weights beside the config.json", "give the whole model folder"
        )
    binding = checkpoint.bind(allow_unknown=request.allow_unknown)
    if imatrix is not None:
        request = replace(request, statistics=open_imatrix(imatrix, checkpoint.architecture))
    layout = _layout(source, request)
    facts = gather_facts(checkpoint, binding, request, layout)
    compiled = compile_request(request, binding, facts, layout)
    if not compiled.is_gguf:
        return Job(source, compiled, SafetensorsFolder(source, compiled, options), options)
    container = GGUFFileContainer(source, compiled, options, pre_tokenizer)
    container.check()
    return Job(source, compiled, container, options)


def _layout(source: Source, request: Request) -> Layout:
    """The layout of the output: the one asked for, or the source's."""
    if isinstance(request.target, GGUFTarget):
        return GGUFLayout()
    if request.target is not None:
        return source.checkpoint.layout_for(WRITERS[request.target.layout]())
    return source.checkpoint.writer
