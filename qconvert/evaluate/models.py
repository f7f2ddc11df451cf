"""Opens checkpoints as models to measure: decoder, label, size on disk, bits per weight."""

from __future__ import annotations

from pathlib import Path

import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.evaluate.lockstep import EvalModel
from qconvert.formats.io.output_folder import MANIFEST_FILE
from qconvert.formats.io.strict_json import read_json_object
from qconvert.models.parameter_table import table_of_tensors
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import evaluation_layout, find_device
from qconvert.runtime.load import load_decoder


def open_model(path: Path, label: str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> EvalModel:
    """The checkpoint in `path`, ready to be measured, in the layout that its device reads fastest.

    No dtype stands for float32 on the CPU and bfloat16 on a GPU; `evaluation_layout` is the rule for
    what lies packed.
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
    return EvalModel(label, decoder, size_bytes, parameter_table.bits_per_weight, path)


def calibrated_on(path: Path | None) -> frozenset[str]:
    """The SHA-256 of the texts whose statistics weighed a checkpoint's codes, as far as its manifest says."""
    manifest = path / MANIFEST_FILE if path is not None else None
    if manifest is None or not manifest.is_file():
        return frozenset()
    statistics = read_json_object(manifest).get("statistics") or {}
    return frozenset(file["sha256"] for text in statistics.get("texts", ()) for file in text["files"])
