"""Opens any checkpoint qconvert reads, whatever its container and layout, as logical tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qconvert.architecture import Architecture, Binding, bind
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.formats.files import shown
from qconvert.formats.hf import HFCheckpoint, open_hf_folder
from qconvert.formats.layouts import compressed_tensors
from qconvert.tensors import GroupInt, Json, Layout, Logical, Reader, TensorSpec


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its files, its logical tensors, and the layout that spells them."""

    files: HFCheckpoint
    tensors: Mapping[str, Logical]
    layout: Layout

    @property
    def path(self) -> Path:
        return self.files.path

    @property
    def config(self) -> Json:
        return self.files.config

    @property
    def reader(self) -> Reader:
        return Reader(self.files, self.layout)

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that config.json describes, in the spelling of the stored names."""
        return Architecture.of(self.config).spelled_like(self.tensors)

    def bind(self, *, allow_unknown: bool = False) -> Binding:
        """The tensors held against the architecture (see `architecture.bind`)."""
        return bind(self.architecture, self.tensors, allow_unknown=allow_unknown)

    @cached_property
    def ignored(self) -> frozenset[str]:
        """Names of stored buffers that carry no information."""
        return frozenset(name for name in self.tensors if self.architecture.ignores(name))

    def role(self, name: str) -> str:
        """The role of a tensor, "unknown" for one that the architecture does not declare."""
        place = self.architecture.place(name)
        return place.role if place else "unknown"

    @property
    def quantization(self) -> str | None:
        """The layout and forms of the quantized tensors, in words; None when all are plain."""
        forms = {t.form.label: t.form for t in self.tensors.values() if isinstance(t.form, GroupInt)}
        return f"{self.layout.name} ({', '.join(sorted(forms))})" if forms else None


def open_checkpoint(path: Path, headers: Mapping[str, TensorSpec] | None = None) -> Checkpoint:
    """Open a Hugging Face folder, or a single file of one. Only headers are read.

    `headers` are those of a Hub repository whose weights were not downloaded (`hub.resolve`).
    """
    files = open_hf_folder(path, headers)
    method = _quantization_method(files.config)
    if method not in (None, compressed_tensors.NAME):
        raise UnsupportedModel(
            f"config.json: quantization method {method!r} is not read here",
            f"read: plain safetensors and {compressed_tensors.NAME}",
        )
    tensors = compressed_tensors.bind(files, files.config)
    return Checkpoint(files, tensors, compressed_tensors.CompressedTensors())


def _quantization_method(config: Json) -> str | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise CorruptCheckpoint("config.json: quantization_config is not an object", "correct the file")
    return shown(quantization.get("quant_method"))
