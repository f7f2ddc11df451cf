"""Lists the arrays that tensors have in a layout, for very many tensors of few kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qconvert.core.dtypes import TensorSpec
from qconvert.core.encodings import Encoding, ModelTensor, identity
from qconvert.core.protocols import Layout
from qconvert.formats.io.array_table import Parts


class StoredArrays:
    """Lists the arrays of tensors in a layout, once for many tensors alike."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[tuple[int, tuple[int, ...], str], Parts] = {}
        self._held: list[Encoding] = []  # so that no other gets the identity of one

    def of(self, tensor: ModelTensor) -> tuple[str, Parts]:
        """What the names of its arrays begin with, and what is said of each.

        That of tensors alike is the same object. Names that have nothing in common begin with "".
        """
        layout, name = self._layout, tensor.name
        if layout.named_by is None:
            return "", _parts(layout.stored_arrays(tensor), "")
        ending = ".weight" if name.endswith(".weight") else "weight" if name.endswith("weight") else ""
        begin = name.removesuffix("weight") if layout.named_by == "module" and ending == ".weight" else name
        alike = identity(tensor.encoding), tensor.shape, ending  # which names of arrays depend on
        found = self._known.get(alike)
        if found is None:
            specs = layout.stored_arrays(tensor)
            if not all(spec.name.startswith(begin) for spec in specs):
                return "", _parts(specs, "")
            self._held.append(tensor.encoding)
            found = self._known[alike] = _parts(specs, begin)
        return begin, found


def _parts(specs: Iterable[TensorSpec], begin: str) -> Parts:
    return tuple((spec.name.removeprefix(begin), (spec.dtype, spec.shape)) for spec in specs)


def arrays_of(layout: Layout, tensors: Iterable[ModelTensor]) -> Iterator[tuple[str, Parts]]:
    """The arrays of tensors in a layout: the beginning of their names, and what is said of each."""
    for begin, parts in map(StoredArrays(layout).of, tensors):
        if begin:
            yield begin, parts
        else:
            yield from ((name, (("", kind),)) for name, kind in parts)
