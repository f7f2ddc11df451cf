"""Opens any checkpoint qconvert reads, whatever its container and layout, as logical tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from qconvert.checkpoint.gguf_model import GGUFModel, open_gguf
from qconvert.checkpoint.stored_shapes import input_major, output_major
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.protocols import Layout, Reader
from qconvert.errors import QConvertError, UnsupportedModel, shown
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.huggingface.folder import HFCheckpoint, open_hf_folder
from qconvert.formats.layouts import (
    awq,
    bitsandbytes,
    compressed_config,
    fp8,
    gptq,
    mlx,
    mxfp4,
    torchao,
)
from qconvert.formats.layouts.compressed_reading import open_compressed_tensors
from qconvert.formats.layouts.compressed_tensors import CompressedTensors, EightBits
from qconvert.formats.layouts.config_checks import settings_of
from qconvert.formats.layouts.conv1d import InputMajor
from qconvert.formats.layouts.gguf import GGUFLayout
from qconvert.models import Architecture, Binding, bind, find_family
from qconvert.models.declared import Declaration
from qconvert.models.guessed import guessed_family

# Weights that are looked at together.
_LOOK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its files, its logical tensors, and the layout that spells them."""

    files: HFCheckpoint | GGUFModel
    tensors: Mapping[str, ModelTensor]
    layout: Layout
    declared: Declaration | None = None

    @property
    def path(self) -> Path:
        return self.files.path

    @property
    def config(self) -> Json:
        return self.files.config

    @property
    def reader(self) -> Reader:
        return Reader(self.files, self.layout)

    @property
    def writer(self) -> Layout:
        """The layout of safetensors written from it when no other is asked for."""
        return self.layout_for(CompressedTensors()) if isinstance(self.files, GGUFModel) else self.layout

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that config.json describes, in the spelling of the stored names.

        A declared one where the user gave it; of a model that nobody declared, a guess from its tensors.
        """
        if self.declared is not None:
            return self.declared.architecture(self.config)
        try:
            return Architecture.of(self.config).spelled_like(self.tensors)
        except UnsupportedModel:
            if not self.tensors:
                raise
            return Architecture(guessed_family(self.config, self.tensors), self.config)

    @cached_property
    def computed(self) -> Mapping[str, str]:
        """The tensors whose plain numbers are not stored as such: what they are computed from, if it is
        codes, or "".
        """
        return self.layout.computed if isinstance(self.layout, GGUFLayout) else {}

    def layout_for(self, layout: Layout) -> Layout:
        """That layout, with this model's input-major linears as its class stores them."""
        if isinstance(self.files, GGUFModel) and self.architecture.stored_shapes:
            return input_major(layout, {}, self.architecture)
        return replace(self.layout, inside=layout) if isinstance(self.layout, InputMajor) else layout

    def bind(self, *, allow_unknown: bool = False) -> Binding:
        """The tensors held against the architecture (see `architecture.bind`); a guess needs consent."""
        if self.architecture.family.guess and not allow_unknown:
            find_family(self.config)
        return bind(self.architecture, self.tensors, allow_unknown=allow_unknown)

    @cached_property
    def ignored(self) -> frozenset[str]:
        """Names of stored buffers that carry no information."""
        return frozenset(name for name in self.tensors if self.architecture.ignores(name))

    def role(self, name: str) -> str:
        """The role of a tensor, "unknown" for one that the architecture does not declare."""
        parameter = self.architecture.parameter(name)
        return parameter.role if parameter else "unknown"

    @property
    def quantization(self) -> str | None:
        """The layout and forms of the quantized tensors, in words; None when all are plain.

        Of a config without weights, the method that it claims.
        """
        if not self.tensors:
            method = _claimed_method(self.config)
            return f"{method} (config.json says so)" if method else None
        encodings = {
            t.encoding.label for t in self.tensors.values() if not isinstance(t.encoding, Unquantized)
        }
        return f"{self.layout.name} ({', '.join(sorted(encodings))})" if encodings else None


def open_checkpoint(
    path: Path, headers: Mapping[str, TensorSpec] | None = None, declared: Declaration | None = None
) -> Checkpoint:
    """Open a Hugging Face folder, a single file of one, or a GGUF model. Only headers are read.

    `headers` are those of a Hub repository whose weights were not downloaded (`hub.resolve`);
    `declared` is the architecture of a model that the catalogue lacks.
    """
    if is_gguf(path):
        return _gguf(path, declared)
    files = open_hf_folder(path, headers)
    if not files.specs:  # nothing that the config's claims could be held against
        return Checkpoint(files, {}, CompressedTensors(), declared)
    layout, tensors = _opener(files.config)(files, files.config)
    checkpoint = Checkpoint(files, tensors, layout, declared)
    if not _turns(checkpoint):
        return checkpoint
    architecture = checkpoint.architecture
    return Checkpoint(
        files, output_major(tensors, architecture), input_major(layout, tensors, architecture), declared
    )


def _gguf(path: Path, declared: Declaration | None) -> Checkpoint:
    files, layout, tensors = open_gguf(path)
    return Checkpoint(files, tensors, layout, declared)


def _turns(checkpoint: Checkpoint) -> bool:
    """Whether the class stores arrays in an order of its own; not known of an inconsistent config."""
    try:
        return bool(checkpoint.architecture.stored_shapes)
    except QConvertError:
        return False


def _claimed_method(config: Json) -> str | None:
    """The quantization method that config.json names, known here or not; None where it has no settings."""
    settings = settings_of(config)
    if settings_of(config, mlx.KEY) and "quant_method" not in settings:
        return mlx.NAME
    return shown(settings.get("quant_method") or "unnamed") if settings else None


def _opener(config: Json) -> Opener:
    """The reader of the layout that config.json claims; plain weights read as any layout would."""
    method = _claimed_method(config)
    if method is None:
        return open_compressed_tensors
    if method == mlx.NAME:
        return mlx.open_mlx
    if method not in OPENERS:
        raise UnsupportedModel(
            f"config.json: quantization method {method!r} is not read here",
            f"read: plain safetensors, {', '.join(OPENERS)}, mlx",
        )
    return OPENERS[method]


# The layouts that are written, by the names that users give them.
WRITERS: Mapping[str, Callable[[], Layout]] = {
    "compressed-tensors": CompressedTensors,
    "int-quantized": lambda: CompressedTensors(EightBits()),
    "gptq": gptq.GPTQ,
    "gptq_v2": lambda: gptq.GPTQ(2),
    "awq": awq.AWQ,
    "mlx": mlx.MLX,
    "bitsandbytes": bitsandbytes.BitsAndBytes,
    "fp8": fp8.FP8,
    "mxfp4": mxfp4.MXFP4,
}
Opener = Callable[[HFCheckpoint, Json], tuple[Layout, dict[str, ModelTensor]]]
# The reader of a layout by the `quant_method` of its quantization_config.
OPENERS: Mapping[str, Opener] = {
    compressed_config.NAME: open_compressed_tensors,
    gptq.NAME: gptq.open_gptq,
    awq.NAME: awq.open_awq,
    bitsandbytes.NAME: bitsandbytes.open_bitsandbytes,
    fp8.NAME: fp8.open_fp8,
    mxfp4.NAME: mxfp4.open_mxfp4,
    torchao.NAME: torchao.open_torchao,
}
