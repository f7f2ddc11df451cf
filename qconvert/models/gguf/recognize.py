"""Recognizes the model in a GGUF file: the model type whose declaration would write these tensors.

Pure. Several model types share a graph of llama.cpp; the first whose tensors match those of the file wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel, shown
from qconvert.models.architecture import Architecture
from qconvert.models.gguf.declaration import LOST, NOT_WRITTEN, Facts
from qconvert.models.gguf.families import gguf_model
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.gguf.tensors import Record, records
from qconvert.models.gguf.to_config import candidates, check_keys, config_of

_QKV = "attn.qkv"
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Reading:
    """A file as a model: its config.json, its declaration, and the records of its tensors."""

    config: Json
    facts: Facts
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()


# Why a file is not of a model type, and the number of mismatches.
_Mismatch = tuple[QConvertError, float]


def read_model(file: Metadata) -> Reading:
    """Recognizes the model that a file holds.

    Raises UnsupportedModel or CorruptCheckpoint with the missing, unknown or misshaped tensors of the model
    type that fits best; or with the key of the file that config.json has no equivalent of.
    """
    misfits: list[_Mismatch] = []
    for model_type in candidates(file):
        try:
            config = config_of(model_type, file)
            facts = Facts(gguf_model(config), Architecture.of(config))
            readings = [_compared(each, file) for each in _fusion_variants(facts, file)]
        except QConvertError as error:
            misfits.append((error, float("inf")))
            continue
        for found in readings:
            if isinstance(found, Reading):
                return replace(found, warnings=tuple(_warnings(found, file)))
            misfits.append(found)
    raise min(misfits, key=lambda misfit: misfit[1])[0]


def _fusion_variants(facts: Facts, file: Metadata) -> Iterator[Facts]:
    """Yields the model as its declaration writes it; and with q, k and v fused, which llama.cpp can do."""
    yield facts
    fused = any(f.role == _QKV for f in facts.architecture.family.fusions)
    if fused and _QKV not in facts.model.whole and "blk.0.attn_qkv.weight" in file.tensors:
        yield replace(facts, model=replace(facts.model, whole=(*facts.model.whole, _QKV)))


def _compared(facts: Facts, file: Metadata) -> Reading | _Mismatch:
    expected = {record.name: record for record in records(facts)}
    if facts.architecture.tied and "output.weight" not in file.tensors:
        expected.pop("output.weight", None)
    declared = facts.model.constants
    constants = {constant.name for constant in (declared(facts) if declared else ())}
    missing = [name for name in expected if name not in file.tensors]
    others = (name for name in file.tensors if name not in expected and name not in constants)
    strange = [name for name in others if not _is_beyond(name, file)]
    family = facts.architecture.family.name
    if strange:
        what = f"{file.file}: {shown(strange[0])}: not a tensor of {family}"
        hint = "tell qconvert's makers which model this is; llama.cpp may read it"
        return UnsupportedModel(what, hint), len(missing) + len(strange)
    if missing:
        what = f"{file.file}: {missing[0]} is missing"
        return CorruptCheckpoint(what, "fetch the file again: it is incomplete"), len(missing)
    if _QKV in facts.model.whole and "attn.q" in facts.model.roles:
        what = f"{file.file}: blk.0.attn_qkv.weight: fused and interleaved"
        return UnsupportedModel(what, "split it in llama.cpp"), 0
    for name, record in expected.items():
        stored = file.tensors[name].shape
        # Dimensions of 1 are dropped by llama.cpp's converter.
        if [n for n in stored if n > 1] != [n for n in record.shape if n > 1]:
            raise CorruptCheckpoint(
                f"{file.file}: {name} is {list(stored)}, but the file's keys give {list(record.shape)}"
            )
    return Reading(facts.architecture.config, facts, tuple(expected.values()))


def _is_beyond(name: str, file: Metadata) -> bool:
    """Returns whether a tensor is of the multi-token-prediction layers, which come last and are left out."""
    match = _LAYER.match(name) if file.count("nextn_predict_layers") else None
    return match is not None and int(match[1]) >= file.layers


def _warnings(reading: Reading, file: Metadata) -> Iterator[str]:
    unread = check_keys(reading.facts, file)
    if unread:
        yield f"{file.file}: keys that have no counterpart in config.json are left out: {', '.join(unread)}"
    beyond = sum(_is_beyond(name, file) for name in file.tensors)
    if beyond:
        yield f"{file.file}: next-token prediction: {beyond} tensors are left out"
    left_out = [role for role, written in reading.facts.model.roles.items() if written == NOT_WRITTEN]
    if left_out:
        what = f"no GGUF file holds these parts of a {reading.facts.model.arch}"
        yield f"{file.file}: {what}: {', '.join(left_out)}"
    for record in reading.records:
        if record.step is not None and record.step.change in LOST:
            yield f"{file.file}: {record.name}: {LOST[record.step.change]}"
