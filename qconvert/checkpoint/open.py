"""Opens any checkpoint qconvert reads, whatever its container and layout, as logical tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.products import products_of
from qconvert.checkpoint.stored_shapes import input_major, output_major
from qconvert.core.activations import ActivationScheme, Products
from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor, Undecoded, Unquantized
from qconvert.core.protocols import Layout, Reader
from qconvert.core.short_repr import few_lines
from qconvert.errors import QConvertError, UnsupportedModel
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.huggingface.folder import HFCheckpoint, open_hf_folder
from qconvert.formats.io.byte_source import ByteSource
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.conv1d import InputMajor
from qconvert.formats.layouts.gguf import GGUFLayout
from qconvert.formats.layouts.merged import Merged
from qconvert.models import Architecture, Binding, bind
from qconvert.models.declared import Declaration
from qconvert.models.guessed import guessed_family, refuse_open

# Weights that are looked at together.
_LOOK_WEIGHTS = 1 << 20


if TYPE_CHECKING:
    from qconvert.checkpoint.gguf_model import GGUFModel


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its files, its logical tensors, and the layout that stores them.

    `assumed` says what the tensors are told from where no weights are here (`checkpoint.assumed`); `adapter`
    what is merged into it, in words (`checkpoint.adapted`).
    """

    files: HFCheckpoint | GGUFModel
    tensors: Mapping[str, ModelTensor]
    layout: Layout
    declared: Declaration | None = None
    guessed: Architecture | None = None
    assumed: str = ""
    adapter: str = ""

    def __repr__(self) -> str:
        """Counts, bytes and the first tensors in a few lines: a checkpoint holds thousands."""
        nbytes = sum(spec.nbytes for spec in self.files.specs.values())
        parameters = sum(tensor.count for tensor in self.tensors.values())
        held = f"{len(self.tensors):,} tensors, {parameters:,} parameters, {nbytes:,} bytes"
        rows = (tensor.row_of_a_table() for tensor in self.tensors.values())
        quantization = self.quantization or "not quantized"
        return few_lines(f"Checkpoint {self.path}, {quantization}: {held}", rows, len(self.tensors))

    @property
    def path(self) -> Path:
        return self.files.path

    @property
    def config(self) -> Json:
        return self.files.config

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.layout, GGUFLayout)

    @property
    def reader(self) -> Reader:
        return Reader(self.files, self.layout)

    @property
    def writer(self) -> Layout:
        """The layout of safetensors written from it when no other is asked for."""
        if self.is_gguf:
            return self.layout_for(registry.writer(registry.DEFAULT))
        return self.layout.rewritten

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that config.json describes, in the spelling of the stored names.

        A declared one where the user gave it; of an undeclared model, a guess from its tensors.
        """
        if self.declared is not None:
            return self.declared.architecture(self.config)
        try:
            return Architecture.of(self.config).spelled_like(self.tensors)
        except UnsupportedModel:
            if not self.tensors:
                raise
            if self.guessed is not None:  # from the shapes as they are stored
                return self.guessed
            return Architecture(guessed_family(self.config, self.tensors), self.config)

    @cached_property
    def computed(self) -> Mapping[str, str]:
        """The tensors whose plain numbers are not stored as such: what they are computed from, if it is
        codes, or "".
        """
        return self.layout.computed

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was odd and tolerated, and weights that are not read as they are stored."""
        found = {} if self.is_gguf else self.computed
        if not found:
            return self.files.warnings
        first, more = next(iter(found)), f" and {len(found) - 1} more" if len(found) > 1 else ""
        form = self.tensors[first].encoding.label
        said = f"{first}{more}: {found[first]}, and inputs are scaled before: read as the numbers ({form})"
        return (*self.files.warnings, said)

    def layout_for(self, layout: Layout) -> Layout:
        """That layout, with this model's input-major linears as its class stores them."""
        if self.is_gguf and self.architecture.stored_shapes:
            return input_major(layout, {}, self.architecture)
        own = self.layout.inside if isinstance(self.layout, Merged) else self.layout
        return replace(own, inside=layout) if isinstance(own, InputMajor) else layout

    def bind(self, *, allow_unknown: bool = False) -> Binding:
        """The tensors matched with the architecture (see `binding.bind`).

        A guess that leaves something open needs consent, too.
        """
        if self.architecture.family.open and not allow_unknown:
            refuse_open(self.architecture)
        return bind(self.architecture, self.tensors, allow_unknown=allow_unknown)

    @cached_property
    def ignored(self) -> frozenset[str]:
        """Names of stored buffers that carry no information."""
        return frozenset(name for name in self.tensors if self.architecture.ignores(name))

    def role(self, name: str) -> str:
        """The role of a tensor, "unknown" for one that the architecture does not declare."""
        parameter = self.architecture.parameter(name)
        return parameter.role if parameter else "unknown"

    def activations(self, tensor: ModelTensor) -> ActivationScheme | None:
        """How loaders quantize the inputs of the linear with this weight; None where they do not."""
        return registry.activations(self.config, tensor)

    @property
    def products(self) -> list[Products]:
        """What loaders multiply in its quantized linears."""
        return products_of(self.config, self.tensors, self.architecture)

    @property
    def quantization(self) -> str | None:
        """The layout and encodings of the quantized tensors, in words; None when all are plain.

        Of a config without weights, the method that it claims.
        """
        if not self.tensors:
            method = registry.claimed_method(self.config)
            return f"{method} (config.json says so)" if method else None
        encodings = {
            t.encoding.label for t in self.tensors.values() if not isinstance(t.encoding, Unquantized)
        }
        return f"{self.layout.name} ({', '.join(sorted(encodings))})" if encodings else None


def open_checkpoint(
    path: Path,
    remote: Mapping[str, ByteSource] | None = None,
    declared: Declaration | None = None,
    *,
    undecoded: bool = False,
) -> Checkpoint:
    """Open a Hugging Face folder, a single file of one, or a GGUF model. Only headers are read.

    `remote` are the weight files of a Hub repository that were not downloaded (`hub.resolve`);
    `declared` is the architecture of a model that the catalogue lacks. Weights whose format is known by name
    alone are an UnsupportedModel unless `undecoded` ones will do.
    """
    if is_gguf(path):
        from qconvert.checkpoint.gguf_model import open_gguf  # with all of llama.cpp's names

        gguf, stored, named = open_gguf(path)
        return Checkpoint(gguf, named, stored, declared)
    files = open_hf_folder(path, remote)
    if not files.specs:  # nothing that the config's claims could be checked against
        return Checkpoint(files, {}, registry.writer(registry.DEFAULT), declared)
    return checkpoint_of(files, declared, undecoded=undecoded)


def require_weights(checkpoint: Checkpoint, name: str, *, headers: bool = False) -> None:
    """Raise QConvertError for a model, called `name`, of which nothing is there but its config.

    Where `headers` do, as a model on the Hub has them, no rows need be there.
    """
    there = bool(checkpoint.tensors) if headers else checkpoint.files.has_weights
    if not there and not checkpoint.assumed:
        raise QConvertError(f"{name}: no weights beside the config.json", "give the whole model folder")


def checkpoint_of(
    files: HFCheckpoint, declared: Declaration | None = None, *, undecoded: bool = False
) -> Checkpoint:
    """The model whose arrays are in these files; `undecoded` as in `open_checkpoint`."""
    layout, tensors = registry.read(files, files.config)
    first = next((t for t in tensors.values() if isinstance(t.encoding, Undecoded)), None)
    if first is not None and not undecoded:
        raise UnsupportedModel(
            f"{first.name}: {layout.name} weights can be inspected, not decoded",
            f"{layout.traits.instead}; `qconvert inspect` shows bits and sizes",
        )
    return checkpoint_in(files, layout, tensors, declared)


def checkpoint_in(
    files: HFCheckpoint,
    layout: Layout,
    tensors: Mapping[str, ModelTensor],
    declared: Declaration | None = None,
) -> Checkpoint:
    """The model with these tensors in a layout, as the arrays are stored."""
    checkpoint = Checkpoint(files, tensors, layout, declared)
    if not _turns(checkpoint):
        return checkpoint
    architecture = checkpoint.architecture
    return Checkpoint(
        files,
        output_major(tensors, architecture),
        input_major(layout, tensors, architecture),
        declared,
        architecture if architecture.family.guess else None,
    )


def _turns(checkpoint: Checkpoint) -> bool:
    """Whether the class stores arrays in an order of its own; not known of an inconsistent config."""
    try:
        return bool(checkpoint.architecture.stored_shapes)
    except QConvertError:
        return False
