"""Opens checkpoints as models to measure: decoder, label, size on disk, bits per weight."""

from __future__ import annotations

from pathlib import Path

import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.convert.containers.gguf_file import CALIBRATION
from qconvert.core.dtypes import Json
from qconvert.evaluate.lockstep import EvalModel
from qconvert.evaluate.origins import origin_of
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.io.output_folder import MANIFEST_FILE
from qconvert.formats.io.strict_json import parse_json_object, read_json_object
from qconvert.models.parameter_table import table_of_tensors
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import evaluation_layout, find_device
from qconvert.runtime.load import load_decoder


def open_model(
    path: Path,
    label: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    name: str | None = None,
    commit: str | None = None,
) -> EvalModel:
    """The checkpoint in `path`, ready to be measured, in the layout that its device reads fastest.

    `name` is what it was asked for as, `commit` the Hub's; its weights are hashed (`origins`). No dtype
    stands for float32 on the CPU and bfloat16 on a GPU; `evaluation_layout` is the rule for what lies packed.
    """
    checkpoint, place = open_checkpoint(path), find_device(device)
    parameter_table = table_of_tensors(checkpoint.tensors, checkpoint.bind(), checkpoint.layout.traits)
    dtype = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    decoder = load_decoder(
        DecoderConfig.of(checkpoint.architecture),
        CheckpointWeights(checkpoint),
        device=place,
        dtype=dtype,
        layout=evaluation_layout(parameter_table.parameters, place, dtype),
    )
    size_bytes = sum(file.size for file in checkpoint.files.files)
    origin = origin_of(checkpoint, name or str(path), commit)
    return EvalModel(label, decoder, size_bytes, parameter_table.bits_per_weight, path, origin)


def calibrated_on(path: Path | None) -> frozenset[str]:
    """The SHA-256 of the texts that a checkpoint's codes were chosen on, as far as it says so."""
    weighed, chosen = _records(path) if path is not None else ({}, {})
    texts = [*weighed.get("texts", ()), chosen.get("text") or {}]
    return frozenset(file["sha256"] for text in texts for file in text.get("files", ()))


def _records(path: Path) -> tuple[Json, Json]:
    """The manifest's `statistics` and `calibration`; a GGUF file has the latter among its keys."""
    if path.is_file() and is_gguf(path):
        with GGUFFile(path) as file:
            entry = file.kv.get(CALIBRATION)
        return {}, parse_json_object(str(entry.value).encode(), CALIBRATION) if entry else {}
    manifest = path / MANIFEST_FILE
    said = read_json_object(manifest) if manifest.is_file() else {}
    return said.get("statistics") or {}, said.get("calibration") or {}
