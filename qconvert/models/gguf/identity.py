"""Derives a GGUF file's general keys: name, size, licence, ancestors; and its file name.

Names follow the GGUF naming convention; the heuristics for the parts of "Qwen2.5-0.5B-Instruct" are those of
the `gguf` package (gguf.Metadata), which llama.cpp's converter uses. Pure: the model card and configs come in
as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV, ArrayOf, KVType
from qconvert.errors import CorruptCheckpoint

# generation_config.json -> general.sampling.*, in the order they are written.
_SAMPLING = (
    ("sequence", "sequence", str),
    ("top_k", "top_k", int),
    ("top_p", "top_p", float),
    ("min_p", "min_p", float),
    ("xtc_probability", "xtc_probability", float),
    ("xtc_threshold", "xtc_threshold", float),
    ("temperature", "temp", float),
    ("penalty_last_n", "penalty_last_n", int),
    ("repetition_penalty", "penalty_repeat", float),
    ("mirostat", "mirostat", int),
    ("mirostat_tau", "mirostat_tau", float),
    ("mirostat_eta", "mirostat_eta", float),
)


MAX_STEM = 200
_UNSAFE = re.compile(r"[^\w.+-]+")  # a model card may contain anything, also "../"


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of weights: of the model, of those every token uses, and of one expert."""

    total: int
    shared: int
    expert: int
    experts: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> ParameterCounts:
        """Counts GGUF tensors (name, shape), as gguf.GGUFWriter counts them."""
        total = shared = expert = stacked = tensors_stacked = 0
        for name, shape in tensors:
            size = prod(shape)
            total += size
            if "_exps." in name and len(shape) >= 3:
                expert += size // shape[-3]
                stacked += shape[-3]
                tensors_stacked += 1
            else:
                shared += size
        return cls(total, shared, expert, stacked // tensors_stacked if tensors_stacked else 0)

    @property
    def label(self) -> str:
        """The size in the naming convention: `494M`, `128x1.3B`."""
        from gguf.utility import size_label

        return size_label(self.total, self.shared, self.expert, self.experts)


@dataclass(frozen=True, slots=True)
class Identity:
    """The general keys of a model, and the parts of its file name."""

    kv: tuple[KV, ...]
    name: str
    basename: str | None
    finetune: str | None
    version: str | None
    size_label: str | None

    def file_name(self, file_type: str) -> str:
        """Returns the default name of a file of this type, such as `Qwen2.5-0.5B-Instruct-Q4_K_M.gguf`."""
        from gguf.utility import naming_convention

        stem = naming_convention(
            self.name, self.basename, self.finetune, self.version, self.size_label, file_type
        )
        return f"{_UNSAFE.sub('-', stem).lstrip('.-')[:MAX_STEM]}.gguf"


def identify(
    folder: str,
    config: Json,
    counts: ParameterCounts,
    *,
    card: Json | None = None,
    generation: Json | None = None,
) -> Identity:
    """Identifies the model in a folder of this name.

    `card` is the model card's front matter, `generation` generation_config.json; of `config` only its
    `_name_or_path` is used. Raises CorruptCheckpoint when a name cannot be written.
    """
    import gguf

    named = {key: value for key in ("_name_or_path",) if isinstance(value := config.get(key), str)}
    try:
        found = gguf.Metadata.apply_metadata_heuristic(
            gguf.Metadata(), card or {}, named, Path(folder), counts.total
        )
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise CorruptCheckpoint(
            f"README.md: its front matter cannot be understood ({error})", "correct it, or remove the file"
        ) from error
    found.name = found.name or folder or "model"
    found.size_label = found.size_label or (counts.label if counts.total else None)
    # The keys that the gguf package would write, taken from its writer instead of a file.
    writer = gguf.GGUFWriter(path=None, arch="")
    found.set_gguf_meta_model(writer)
    general = (_typed(key, entry.value) for key, entry in writer.kv_data[0].items())
    kv = (*_sampling_keys(generation or {}), *general)
    return Identity(kv, found.name, found.basename, found.finetune, found.version, found.size_label)


def _sampling_keys(generation: Json) -> Iterator[KV]:
    for source, name, kind in _SAMPLING:
        value = generation.get(source)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            continue
        key = f"general.sampling.{name}"
        if kind is str:
            yield KV.text(key, str(value))
        else:
            yield KV.i32(key, int(value)) if kind is int else KV.f32(key, float(value))


def _typed(key: str, value: Any) -> KV:
    if isinstance(value, int):
        return KV.u32(key, value)
    if isinstance(value, str):
        return KV.text(key, value)
    return KV(key, ArrayOf(KVType.TEXT), tuple(map(str, value)))
