"""Keeps the prices of encodings in a file, so that a model that is aimed at many sizes is priced once.

A price depends on the model, the text and the method, never on the size that is aimed at. Metadata of the
safetensors file say what these three are; it holds

    prices.SHA256            float64 [G], nats per token of one encoding, by group of weights; the hash is of
                             its plan and of the groups
    layers.3.mlp.down        float32 [I], the mean squares of what a linear reads (model.lm_head, model.embed)

so a run that takes them weighs errors as the run did that measured them, and writes the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qconvert.calibrate.sensitivity import Sensitivity, TextStatistics
from qconvert.convert.identity import described, hashed, source_identity
from qconvert.convert.job import Job, OpenedModel
from qconvert.convert.prices import Costs, grouped, priced, sized_groups
from qconvert.core.dtypes import Json
from qconvert.core.version import NUMERICS, __version__
from qconvert.errors import BadRecipe, CorruptCheckpoint, shown
from qconvert.formats.huggingface.array_file import read_arrays, write_arrays
from qconvert.formats.io.strict_json import parse_json_object
from qconvert.plan.budget import Group

FORMAT, VERSION = "qconvert-prices", "1"
_AGAIN = "name another file, which will be made"
_PRICES = "prices."
_INPUT = re.compile(r"(?:layers\.(\d{1,6})|model)\.([\w.]+)")


@dataclass(slots=True)
class SavedPrices:
    """The prices in the file at `path`, which need not be there yet.

    `of` says what they are of: names and hashes of model, text, method and version. `taken` are the labels
    whose prices the file had.
    """

    path: Path
    of: Json
    taken: list[str] = field(default_factory=list)

    @staticmethod
    def at(path: Path, source: OpenedModel, tokens_BT: np.ndarray, damping: float | None) -> SavedPrices:
        """Prices of a model on the windows of a text; with a `damping`, of codes chosen together.

        Raises BadRecipe where the file could not be written.
        """
        if not path.parent.is_dir():
            raise BadRecipe(f"--prices {path}: there is no folder {path.parent}", "make it, or name another")
        text = hashed([str(tokens_BT.shape), np.ascontiguousarray(tokens_BT).tobytes()])
        method = "nearest" if damping is None else f"feedback, damping {damping:g}"
        version = f"{__version__}, numerics {NUMERICS}"
        model = hashed([json.dumps(source_identity(source), sort_keys=True)])
        return SavedPrices(path, {"model": model, "text": text, "method": method, "version": version})

    def groups(
        self, jobs: Mapping[str, Job], sensitivities: Iterable[Sensitivity], statistics: TextStatistics
    ) -> list[Group]:
        """What `priced_groups` returns; the sensitivities are asked for only if a price is not in the file.

        The file then has it. `statistics` are those of the sensitivities; from the file, they are mean
        squares alone. Raises BadRecipe for a file of another model, text or method, CorruptCheckpoint for
        one that holds no prices.
        """
        arrays = self._read()
        members = [group.members for group in sized_groups(jobs)]
        names = {label: _PRICES + _plan(job, members) for label, job in jobs.items()}
        self.taken = [label for label, name in names.items() if name in arrays]
        missing = [label for label in jobs if label not in self.taken]
        if missing:
            costs = priced(jobs, sensitivities, missing)
            found = {names[label]: np.array([costs[each, label] for each in members]) for label in missing}
            arrays = arrays | found | _moments(statistics)
            metadata = {"format": FORMAT, "version": VERSION, "of": json.dumps(self.of)}
            write_arrays(self.path, arrays, metadata)
        known = Costs()
        for label, name in names.items():
            if arrays[name].shape != (len(members),):
                raise CorruptCheckpoint(
                    f"{self.path.name}: {shown(name)} are not {len(members)} prices", _AGAIN
                )
            known |= {(each, label): float(cost) for each, cost in zip(members, arrays[name], strict=True)}
        statistics.moments |= dict(_stored_moments(arrays))
        return grouped(jobs, known)

    def _read(self) -> dict[str, np.ndarray]:
        if not self.path.exists():
            return {}
        arrays, metadata = read_arrays(self.path, FORMAT, VERSION, _AGAIN)
        of = parse_json_object(metadata.get("of", "").encode(), f"{self.path.name}: of")
        other = next((key for key, value in self.of.items() if of.get(key) != value), None)
        if other is not None:
            stored = f" ({shown(str(of.get(other)))})" if other in ("method", "version") else ""
            raise BadRecipe(f"{self.path}: holds prices of another {other}{stored}", _AGAIN)
        for name, array in arrays.items():
            prices = name.startswith(_PRICES)
            right = prices or _INPUT.fullmatch(name)
            if not right or array.ndim != 1 or array.dtype != (np.float64 if prices else np.float32):
                raise CorruptCheckpoint(
                    f"{self.path.name}: {shown(name)} is neither prices nor squares", _AGAIN
                )
            if not (np.isfinite(array).all() and (array >= 0).all()):
                raise CorruptCheckpoint(
                    f"{self.path.name}: {shown(name)} has numbers below 0, or none", _AGAIN
                )
        return arrays


def _plan(job: Job, members: Iterable[tuple[str, ...]]) -> str:
    """What says how a job makes every weight, and which weights are priced together."""
    return hashed([*described(job.compiled.plan.units), *(" ".join(each) for each in members)])


def _moments(statistics: TextStatistics) -> dict[str, np.ndarray]:
    return {
        f"{'model' if layer is None else f'layers.{layer}'}.{role}": moments_I.astype(np.float32)
        for (role, layer), moments_I in statistics.moments.items()
    }


def _stored_moments(arrays: Mapping[str, np.ndarray]) -> Iterable[tuple[tuple[str, int | None], np.ndarray]]:
    for name, array in arrays.items():
        match = _INPUT.fullmatch(name)
        if match is not None and not name.startswith(_PRICES):
            yield (match[2], None if match[1] is None else int(match[1])), array
