"""Identifies a job: everything that the bytes of its output depend on.

A run goes on with what an earlier one left only where all of it is the same; else two halves of different
models would make one file. Names and times of files do not count, their contents do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.calibration import Calibration, PlannedStatistics
from qconvert.checkpoint.hub import ResolvedModel
from qconvert.convert.job import Job, OpenedModel
from qconvert.core.dtypes import Json
from qconvert.core.schemes import Scheme
from qconvert.core.version import NUMERICS, __version__
from qconvert.formats.huggingface.adapter import config_path
from qconvert.formats.io import limits
from qconvert.formats.io.journal import VERSION
from qconvert.formats.io.local_file import open_regular, read_exactly
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.strict_json import read_bounded
from qconvert.plan.plan import Plan, Unit

if TYPE_CHECKING:
    from qconvert.checkpoint.gguf_model import WeightFile
    from qconvert.core.statistics import StatisticsSource
    from qconvert.formats.huggingface.safetensors_file import SafetensorsHeader
    from qconvert.plan.request import Request

    WeightHeader = SafetensorsHeader | WeightFile

# What of a file's contents is hashed. Fine-tunes may share most of their weights: where adapters of q and v
# were merged, a tenth of the bytes differ, and 16 windows would miss that once in five times.
SAMPLES = 256
SAMPLE_BYTES = 4 << 10
# Short texts are hashed so many bytes at a time.
_TOGETHER = 64 << 10


def identity(job: Job, files: Iterable[FilePlan]) -> Json:
    """The facts, by name, as JSON has them; those first that say most where they differ."""
    from qconvert.convert.precompile import fingerprint

    request, calibration = job.compiled.request, job.calibration
    facts: dict[str, Any] = {
        "source": source_identity(job.source),
        "request": _request(request),
        "statistics": _calibrated(calibration) if calibration else _statistics(request, job.compiled.plan),
        "files": {file.name: _file(file) for file in files},
        "plan": hashed(described(job.compiled.plan.units)),
        "version": {"qconvert": __version__, "numerics": NUMERICS, "journal": VERSION},
        "kernels": fingerprint(job.compiled.plan),
    }
    if calibration is not None:
        from qconvert.convert.calibrated import torch_record

        facts["torch"] = torch_record()
    found: Json = json.loads(json.dumps(facts))
    return found


def sample_hash(path: Path, size: int) -> str:
    """The SHA-256 of 256 windows of 4 KiB of a file, spread evenly from its first bytes to its last.

    Where they lie depends on the size alone.
    """
    fd = open_regular(path)
    try:
        last = max(0, size - SAMPLE_BYTES)
        window = memoryview(bytearray(min(SAMPLE_BYTES, size)))
        digest = sha256()
        for number in range(SAMPLES):
            read_exactly(fd, window, last * number // (SAMPLES - 1), path.name)
            digest.update(window)
        return digest.hexdigest()
    finally:
        os.close(fd)


def source_samples(source: OpenedModel) -> dict[str, str]:
    """The samples of a model's files by name; none of one on the Hub (its commit tells) or in a bucket.

    An adapter is sampled wherever its base is.
    """
    place, files = source.location.place, source.checkpoint.files.files
    if place.repo_id is not None or place.address is not None:
        files = files[-1:] if source.location.adapter else ()
    return {file.path.name: _sampled(file.path, file.size, file.path.stat().st_mtime_ns) for file in files}


def source_etags(source: OpenedModel) -> dict[str, str | None]:
    """What a bucket or web server calls the bytes of each file, by name; none of another source."""
    location, files = source.location.place, source.checkpoint.files.files
    return {} if location.address is None else {file.path.name: _etag(file.path, location) for file in files}


@lru_cache(maxsize=4096)
def _sampled(path: Path, size: int, mtime_ns: int) -> str:
    """`sample_hash` of a file as it is since it was last written, read once: journal and manifest want it."""
    return sample_hash(path, size)


def source_identity(source: OpenedModel) -> Json:
    """What tells models apart: of a revision on the Hub, its commit and the files' ETags; of local files,
    sizes, headers and samples.
    """
    files, place = source.checkpoint.files.files, source.location.place
    if source.location.adapter:
        files, own = files[:-1], files[-1:]
        about = {"config": adapter_config_hash(source.location), "files": _contents(source, own)}
        return {"adapter": about, "base": _place_identity(source, files, place)}
    return _place_identity(source, files, place)


def adapter_config_hash(location: ResolvedModel) -> str | None:
    """The SHA-256 of an adapter's config, which has the factor of its products; None of another model."""
    if location.adapter is None:
        return None
    return sha256(read_bounded(config_path(location.adapter), limits.CONFIG_BYTES)).hexdigest()


def _place_identity(source: OpenedModel, files: Sequence[WeightHeader], place: ResolvedModel) -> Json:
    if place.repo_id is not None:
        etags = {file.path.name: _etag(file.path, place) for file in files}
        return {"repository": place.repo_id, "commit": place.commit, "files": etags}
    if place.address is not None:
        sizes = {file.path.name: [file.size, _etag(file.path, place)] for file in files}
        return {"address": place.address, "files": sizes}
    return _contents(source, files)


def _contents(source: OpenedModel, files: Sequence[WeightHeader]) -> Json:
    samples = source_samples(source)
    return {
        file.path.name: {
            "bytes": file.size,
            "header": file.header_sha256,
            "sample": samples[file.path.name],
        }
        for file in files
    }


def _etag(path: Path, location: ResolvedModel) -> str | None:
    """What the Hub calls a file's bytes: in the cache, the name of the blob that its name leads to."""
    if location.remote and path.name in location.remote:
        return location.remote[path.name].file.etag
    return path.resolve().name if path.is_symlink() else None


def _request(request: Request) -> Json:
    """What was asked for; the statistics are told apart by their numbers."""
    asked = {each.name: getattr(request, each.name) for each in fields(request) if each.name != "statistics"}
    recipe = asked.pop("recipe")
    return {**{name: _told(value) for name, value in asked.items()}, "recipe": recipe.to_json()}


def _told(value: Any) -> Any:
    """A value of a request as its user writes it, so that a difference can be shown: no names of classes."""
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Scheme):
        return value.label
    if isinstance(value, tuple):
        return [_told(each) for each in value]
    if is_dataclass(value):
        return {each.name.replace("_", " "): _told(getattr(value, each.name)) for each in fields(value)}
    return repr(value)


def described(units: Iterable[Unit]) -> Iterator[str]:
    """Every unit in words, those that most units share made once."""
    texts: dict[int, str] = {}

    def text(shared: object) -> str:
        found = texts.get(id(shared))
        if found is None:
            found = texts[id(shared)] = repr(shared)
        return found

    for unit in units:
        pieces = [
            f"{p.tensor.name} {p.tensor.shape} {text(p.tensor.encoding)} {p.start} {p.stop} {p.step} "
            f"{p.zeros_like} {p.factors}"
            for p in unit.inputs
        ]
        ops = [text(op) for op in unit.ops]
        output, encoding = unit.output, text(unit.output.encoding)
        yield f"{output.name} {output.shape} {encoding} {ops} {pieces} {unit.statistics}"


def _file(file: FilePlan) -> Json:
    """Offsets follow from the header of safetensors, but not from that of every format."""
    header = sha256()
    for part in file.head_parts():
        header.update(part)
    return {
        "bytes": file.size,
        "header": header.hexdigest(),
        "offsets": hashed(f"{name} {offset}" for name, offset in file.offsets.items()),
    }


def _statistics(request: Request, plan: Plan) -> Json | None:
    source = request.statistics
    if source is None or isinstance(source, PlannedStatistics):
        return None
    return {"numbers": hashed(_numbers(source, plan))}


def _numbers(source: StatisticsSource, plan: Plan) -> Iterator[bytes]:
    for key in (key for unit in plan.units for key in unit.statistics):
        yield repr(key).encode()
        yield source.second_moments(key).tobytes()


def _calibrated(calibration: Calibration) -> Json:
    apart = ("tokens_BT", "text", "savings")
    named = {each.name: getattr(calibration, each.name) for each in fields(calibration)}
    text = {"tokens": hashed([calibration.tokens_BT.tobytes()]), "shape": calibration.tokens_BT.shape}
    saved = {name: how for name, how in calibration.savings.record.items() if name != "rows_bytes"}
    kept = {name: value for name, value in named.items() if name not in apart}
    return {**kept, "text": text, "savings": saved}


def hashed(parts: Iterable[str | bytes]) -> str:
    """The SHA-256 of all parts, each told from the next."""
    digest, waiting, nbytes = sha256(), list[bytes](), 0
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        waiting += (len(raw).to_bytes(8, "little"), raw)
        nbytes += len(raw)
        if nbytes > _TOGETHER:
            digest.update(b"".join(waiting))
            waiting, nbytes = [], 0
    digest.update(b"".join(waiting))
    return digest.hexdigest()
