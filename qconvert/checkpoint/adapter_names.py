"""Finds the tensors of a base under the names that an adapter has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qconvert.checkpoint.open import Checkpoint
from qconvert.core.encodings import ModelTensor
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.huggingface.adapter import OTHER_BASE, Adapter
from qconvert.models import Architecture

_LAYERS = ".layers."
# Modules that only hold others: classes and files of several versions put them into names, or do not.
# What transformers calls modules by now that files have by another name.
_RENAMED = {"block_sparse_moe": "mlp"}
_HOLDERS = {"model", "transformer", "language_model", "text_model", "vision_model"}


class Names:
    """Finds the base's tensors under the names that an adapter has for them.

    Classes that read pictures, and those of other versions of transformers, begin the same names otherwise.
    Names are compared without the modules that only hold others, then from the number of the layer on.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._tensors, self._base = base.tensors, base.path.name
        self._every = len({*adapter.low_rank, *adapter.whole, *adapter.rows})
        self.embed, self.head = (_name(base.architecture, role) for role in ("embed", "lm_head"))
        # Without a head of its own, a tied model has the embedding as its head.
        self.tied = base.architecture.tied and self.head not in base.tensors
        self._plain = _unique((_plain(name), name) for name in base.tensors)
        self._ends = _unique((_end(name), name) for name in base.tensors)

    def of(self, name: str) -> str:
        """The base's name for a tensor of the adapter; UnsupportedModel where it has none."""
        if name in self._tensors:
            return name
        found = self._plain.get(_plain(name)) or self._ends.get(_end(name))
        if found is None and self.head is not None and _plain(name) == _plain(self.head):
            found = self.head  # of a tied base, which has none of its own
        if found is None:
            which = f"{shown(name)}: one of {self._every:,} tensors of the adapter"
            fact = f"{which}; {self._base} has no such tensor"
            raise UnsupportedModel(fact, OTHER_BASE)
        return found

    def base_of(self, name: str) -> ModelTensor:
        """The tensor that is changed: of a tied head, the embedding."""
        if name in self._tensors:
            return self._tensors[name]
        if self.embed is None or self.embed not in self._tensors:
            raise UnsupportedModel(f"{shown(name)}: the base has no such tensor", "name the adapter's base")
        return self._tensors[self.embed]


def _name(architecture: Architecture, role: str) -> str | None:
    found = architecture.table(role)
    return None if found is None else found.name


def _plain(name: str) -> str:
    return ".".join(_RENAMED.get(part, part) for part in name.split(".") if part not in _HOLDERS)


def _end(name: str) -> str | None:
    """What follows the last stack of layers in a name, with its number."""
    before, found, after = name.rpartition(_LAYERS)
    return after if found and "visual" not in before and "vision" not in before else None


def _unique(pairs: Iterable[tuple[str | None, str]]) -> Mapping[str | None, str]:
    """Names of tensors by what only one of them has."""
    found: dict[str | None, str] = {}
    twice: set[str | None] = {None}
    for key, name in pairs:
        if found.setdefault(key, name) != name:
            twice.add(key)
    return {key: name for key, name in found.items() if key not in twice}
