"""Stores the statistics of a model's inputs as one safetensors file, and gives them to what quantizes.

Tensors, named by the layer and the roles that read an input (`layers.3.attn.q+attn.k+attn.v`): `.squares` and
`.sums` float32 [I], `.counts` int64 [1]; of experts [E, I] and [E]. `token_counts` int64 [V]. The header's
metadata says of which model they are, and of which texts. Sums and counts of two texts add up to those of
both. Gradients are in it where they were measured (`gradients_file`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from qconvert.calibrate.gradients_file import gradient_arrays, gradients_in
from qconvert.calibrate.imatrix import open_imatrix
from qconvert.calibrate.moments import GradientMoments, InputMoments, InputStatistics
from qconvert.core.dtypes import Json
from qconvert.core.statistics import InputKey, StatisticsKey, StatisticsSource
from qconvert.core.version import __version__
from qconvert.errors import BadRecipe, CorruptCheckpoint, shown
from qconvert.formats.huggingface.array_file import read_arrays, write_arrays
from qconvert.formats.io.strict_json import parse_json_object
from qconvert.models import Architecture
from qconvert.models.statistics_keys import input_key

FILE_NAME = "statistics.safetensors"
"""The name of the file in a folder of statistics."""
FORMAT, VERSION = "qconvert-statistics", "1"
_TOKENS = "token_counts"
_NAME = re.compile(r"(?:layers\.(\d{1,6})|model)\.([\w.+]+)\.squares")
_AGAIN = "collect them with `qconvert calibrate`"


@dataclass(frozen=True)
class StoredStatistics:
    """Statistics, the model they are of, and what was read: a `StatisticsSource`.

    `model` has its name and the SHA-256 of its shapes; `texts` a record (`CalibrationText.record`) of each
    run. `file` is the name for the manifest; `gradients` are of all these texts, or of some.
    """

    statistics: InputStatistics
    model: Mapping[str, str]
    texts: tuple[Json, ...]
    file: str = FILE_NAME
    gradients: GradientMoments | None = None

    @cached_property
    def _by_linear(self) -> Mapping[StatisticsKey, InputMoments]:
        return self.statistics.by_linear

    def __contains__(self, key: object) -> bool:
        return key in self._by_linear

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]; ones for an expert that was never chosen."""
        return self._by_linear[key].mean_squares_I

    def rounding(self, key: StatisticsKey) -> None:
        """Nothing: Hessians are not stored."""

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the texts."""
        return tuple(dict.fromkeys(name for text in self.texts for name in text["texts"]))

    @property
    def text(self) -> Json:
        """The texts of all runs as one record, with the window and protocol of the first."""
        files = [file for text in self.texts for file in text["files"]]
        return {
            **self.texts[0],
            "texts": list(self.datasets),
            "files": files,
            "tokens": self.statistics.tokens,
        }

    @property
    def left_out(self) -> tuple[str, ...]:
        """The inputs of the model that some run could not see (`InputKey.place`)."""
        return tuple(dict.fromkeys(name for text in self.texts for name in text.get("left_out", ())))

    @property
    def window(self) -> int:
        """Tokens of a window; of several runs, of the first."""
        return int(self.texts[0]["window"])

    @property
    def record(self) -> Json:
        """The file and the texts, for the manifest."""
        chunks = self.statistics.tokens // self.window
        return {"file": self.file, "dataset": ", ".join(self.datasets), "chunks": chunks, "texts": self.texts}


def model_record(name: str, architecture: Architecture) -> dict[str, str]:
    """What says which model statistics are of: its name, and a hash of the roles and shapes of its weights.

    The hash is that of the model in any container, and of every fine-tune of it.
    """
    found = architecture.shapes.items()
    shapes = sorted(f"{layer} {role} {part} {shape}" for (role, layer, part), shape in found)
    return {"name": name, "shapes_sha256": sha256("\n".join(shapes).encode()).hexdigest()}


def write_statistics(path: Path, stored: StoredStatistics) -> None:
    """Write the file, which replaces an earlier one; the same statistics give the same bytes."""
    arrays: dict[str, np.ndarray] = {_TOKENS: stored.statistics.token_counts_V.astype(np.int64)}
    for name, members in _stacks(stored.statistics.inputs).items():
        is_stack = members[0][0].expert is not None
        for kind in ("squares", "sums"):
            rows = [getattr(moments, f"{kind}_I").astype(np.float32) for _, moments in members]
            arrays[f"{name}.{kind}"] = np.stack(rows) if is_stack else rows[0]
        arrays[f"{name}.counts"] = np.array([m.count for _, m in members], np.int64)
    if stored.gradients is not None:
        arrays |= gradient_arrays(stored.gradients, stored.statistics.by_linear)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "qconvert": __version__,
        "model": json.dumps(dict(stored.model)),
        "texts": json.dumps({"texts": stored.texts}),
    }
    write_arrays(path, arrays, metadata)


def _stacks(inputs: Mapping[InputKey, InputMoments]) -> dict[str, list[tuple[InputKey, InputMoments]]]:
    """The inputs of one place together, by its name: one, or those of all experts in their order."""
    found: dict[str, list[tuple[InputKey, InputMoments]]] = {}
    for key, moments in sorted(inputs.items(), key=lambda item: (item[0].roles, item[0].expert or 0)):
        found.setdefault(key.place, []).append((key, moments))
    return found


def read_statistics(path: Path) -> StoredStatistics:
    """Read the file, or the one in a folder. Raises CorruptCheckpoint for anything else."""
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file", _AGAIN)
    arrays, metadata = read_arrays(path, FORMAT, VERSION, _AGAIN)
    model = parse_json_object(metadata.get("model", "").encode(), f"{path.name}: model")
    texts = parse_json_object(metadata.get("texts", "").encode(), f"{path.name}: texts").get("texts")
    if not isinstance(texts, list) or not texts or not all(map(_is_record, texts)) or _TOKENS not in arrays:
        raise CorruptCheckpoint(f"{path.name}: does not say which texts it was measured on", _AGAIN)
    inputs = dict(pair for name in arrays for pair in _inputs_of(name, arrays, path.name))
    statistics, gradients = InputStatistics(inputs, arrays[_TOKENS]), gradients_in(arrays, path.name)
    return StoredStatistics(statistics, model, tuple(texts), path.name, gradients)


def _is_record(text: object) -> bool:
    if not isinstance(text, dict) or not isinstance(text.get("texts"), list):
        return False
    window = text.get("window")
    return type(window) is int and window > 0


def _inputs_of(
    name: str, arrays: Mapping[str, np.ndarray], file: str
) -> Iterable[tuple[InputKey, InputMoments]]:
    """The inputs whose squares are under this name; none for another tensor."""
    match = _NAME.fullmatch(name)
    if match is None:
        return
    stem = name.removesuffix(".squares")
    squares, sums, counts_E = (arrays.get(f"{stem}.{kind}") for kind in ("squares", "sums", "counts"))
    if squares is None or sums is None or counts_E is None or sums.shape != squares.shape or not squares.ndim:
        raise CorruptCheckpoint(f"{file}: {shown(stem)} lacks sums or counts of its squares", _AGAIN)
    squares_EI, sums_EI = squares.reshape(-1, squares.shape[-1]), sums.reshape(-1, squares.shape[-1])
    if counts_E.shape != (len(squares_EI),) or not (np.isfinite(squares).all() and (squares >= 0).all()):
        raise CorruptCheckpoint(f"{file}: {shown(stem)} holds no sums of squares", _AGAIN)
    layer = None if match[1] is None else int(match[1])
    for i, count in enumerate(counts_E):
        key = InputKey(tuple(match[2].split("+")), layer, i if squares.ndim > 1 else None)
        yield key, InputMoments(squares_EI[i].astype(float), sums_EI[i].astype(float), int(count))


def merge(parts: Sequence[StoredStatistics]) -> StoredStatistics:
    """The statistics of all texts of several files of one model, and the gradients of those that have any.

    Raises BadRecipe for two models.
    """
    first, *others = parts
    total, texts, gradients = first.statistics, first.texts, first.gradients
    for other in others:
        mine, its = first.model.get("shapes_sha256"), other.model.get("shapes_sha256")
        if mine != its or first.statistics.inputs.keys() != other.statistics.inputs.keys():
            raise BadRecipe(
                f"{other.file}: belongs to {other.model.get('name')} (shapes {str(its)[:12]}), and "
                f"{first.file} to {first.model.get('name')} (shapes {str(mine)[:12]})",
                "merge statistics of one model",
            )
        total, texts = total + other.statistics, texts + other.texts
        if other.gradients is not None:
            gradients = other.gradients if gradients is None else gradients + other.gradients
    return StoredStatistics(total, first.model, texts, first.file, gradients)


def check_model(stored: StoredStatistics, architecture: Architecture) -> None:
    """Raise BadRecipe for statistics of another model: with another number of columns or of layers."""
    hint = "give statistics that `qconvert calibrate` collected from this model"
    layers = 1 + max((key.layer for key in stored.statistics.inputs if key.layer is not None), default=-1)
    if layers != len(architecture.dimensions):
        raise BadRecipe(
            f"{stored.file}: has the statistics of {layers} layers ({stored.model.get('name')}), the model"
            f" {len(architecture.dimensions)}",
            hint,
        )
    found = stored.statistics.by_linear
    for parameter in architecture.parameters.values():
        moments = found.get(input_key(parameter)) if parameter.param == "weight" else None
        if moments is not None and len(moments.squares_I) != parameter.shape[-1]:
            raise BadRecipe(
                f"{parameter.name}: the statistics have {len(moments.squares_I)} columns for it, the model"
                f" {parameter.shape[-1]}",
                hint,
            )


def open_statistics(path: Path, architecture: Architecture) -> StatisticsSource:
    """The statistics in a file or folder of `qconvert calibrate`, or in llama.cpp's GGUF or .dat.

    Raises CorruptCheckpoint for a damaged file, BadRecipe for statistics of another model, UnsupportedModel
    for an importance matrix of a family without GGUF names.
    """
    if path.is_dir() or path.suffix == ".safetensors":
        stored = read_statistics(path)
        check_model(stored, architecture)
        return stored
    return open_imatrix(path, architecture)
