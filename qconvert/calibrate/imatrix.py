"""Converts llama.cpp's importance matrices to statistics by role, layer and expert, and back.

The file names tensors of a GGUF; a model's own declaration says which linear each of them is, so that one
file serves GGUF and safetensors alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qconvert.calibrate.moments import InputMoments
from qconvert.core.dtypes import Json
from qconvert.core.statistics import StatisticsKey
from qconvert.errors import BadRecipe
from qconvert.formats.gguf.imatrix import Imatrix, ImatrixEntry, read_imatrix
from qconvert.models import Architecture
from qconvert.models.gguf.families import facts_of
from qconvert.models.gguf.tensors import records
from qconvert.models.statistics_keys import input_keys

# llama-quantize lets pass an entry for the embedding that has another number of columns.
_ANY_COLUMNS = "token_embd.weight"
_OF_THIS_MODEL = "give one that llama-imatrix measured on this model"
_LAYER = re.compile(r"(?:\w+\.)?blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class ImatrixStatistics:
    """An importance matrix of one model: for every key, its tensor, first column and number of columns."""

    imatrix: Imatrix
    entries: Mapping[StatisticsKey, tuple[str, int, int]]

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    @property
    def record(self) -> Json:
        """The file and what it says of the text it was measured on."""
        dataset, chunks = self.imatrix.dataset, self.imatrix.chunks
        return {"file": Path(self.imatrix.file).name, "dataset": dataset, "chunks": chunks}

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]."""
        name, first, width = self.entries[key]
        return np.asarray(self.imatrix.means[name], np.float32)[first : first + width]

    def rounding(self, key: StatisticsKey) -> None:
        """Nothing: an importance matrix has no Hessians."""


HEAD = "output.weight"


def imatrix_entries(
    moments: Mapping[StatisticsKey, InputMoments], architecture: Architecture, *, head: bool = False
) -> dict[str, ImatrixEntry]:
    """What llama-imatrix would have of these inputs, by the names of the GGUF tensors that read them.

    Every tensor has its own entry, also where several read one input; a stack of experts has a row for
    each. The head's is left out unless `head`, as `--process-output` has it; a tied head has none. Raises
    UnsupportedModel for a family without GGUF names.
    """
    entries = {}
    for record in records(facts_of(architecture)):
        keys = input_keys(architecture.parameters[piece.name] for piece in record.pieces)
        if not keys or not all(key in moments for key in keys) or (record.name == HEAD and not head):
            continue
        found = [moments[key] for key in keys]
        squares_EI = np.stack([each.squares_I for each in found])
        entries[record.name] = ImatrixEntry(squares_EI, np.array([each.count for each in found]))
    return entries


def open_imatrix(path: Path, architecture: Architecture) -> ImatrixStatistics:
    """Read an importance matrix as the statistics of a model.

    Raises CorruptCheckpoint for a damaged file, BadRecipe for one of another model, UnsupportedModel for a
    family without GGUF names.
    """
    return statistics_of(read_imatrix(path), architecture)


def statistics_of(imatrix: Imatrix, architecture: Architecture) -> ImatrixStatistics:
    """The entries of an importance matrix by what they are in a model; BadRecipe if they are another's."""
    entries: dict[StatisticsKey, tuple[str, int, int]] = {}
    known = tuple(records(facts_of(architecture)))
    _check_layers(imatrix, [record.name for record in known])
    for record in known:
        means = imatrix.means.get(record.name)
        keys = input_keys(architecture.parameters[piece.name] for piece in record.pieces)
        if means is None or not keys:
            continue
        width = record.shape[-1] if len(record.shape) > 1 else 1
        experts = record.shape[0] if len(record.shape) > 2 else 1
        if len(means) == width * experts:
            entries |= {key: (record.name, i * width, width) for i, key in enumerate(keys)}
        elif record.name != _ANY_COLUMNS:
            raise BadRecipe(
                f"{record.name}: the importance matrix has {len(means)} columns for it, the model "
                f"{width * experts}",
                _OF_THIS_MODEL,
            )
    return ImatrixStatistics(imatrix, entries)


def _check_layers(imatrix: Imatrix, names: Sequence[str]) -> None:
    """Raise BadRecipe for a file of a deeper model, or one of whose tensors the model has none."""
    theirs, ours = _layers(imatrix.means), _layers(names)
    if theirs > ours:
        raise BadRecipe(
            f"{imatrix.file}: the importance matrix has {theirs} layers, the model {ours}", _OF_THIS_MODEL
        )
    if not imatrix.means.keys() & set(names):
        raise BadRecipe(
            f"{imatrix.file}: the importance matrix has entries for {len(imatrix.means)} tensors, and none "
            f"of them is one of the model's {len(names)}",
            _OF_THIS_MODEL,
        )


def _layers(names: Iterable[str]) -> int:
    numbers = (_LAYER.match(name) for name in names)
    return max((int(found[1]) + 1 for found in numbers if found), default=0)
