"""Opens checkpoints as models to measure: decoder, label, size on disk, bits per weight."""

from __future__ import annotations

from pathlib import Path

import torch

from qconvert.checkpoint.by_role import AS_LOADED, INT8, Activations, CheckpointWeights
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.containers.gguf_file import CALIBRATION
from qconvert.core.dtypes import Json
from qconvert.evaluate.lockstep import EvalModel
from qconvert.evaluate.model_bytes import ModelBytes
from qconvert.evaluate.origins import origin_of
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.io.output_folder import MANIFEST_FILE
from qconvert.formats.io.strict_json import parse_json_object, read_json_object
from qconvert.models.parameter_table import table_of_tensors
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import evaluation_layout, find_device
from qconvert.runtime.load import Streaming, load_decoder


def open_model(
    checkpoint: Checkpoint,
    label: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    activations: Activations = AS_LOADED,
    name: str | None = None,
    commit: str | None = None,
    in_turn: bool = False,
) -> EvalModel:
    """An opened checkpoint, ready to be measured, in the layout that its device reads fastest.

    `name` is what it was asked for as, `commit` the Hub's; its weights are hashed (`origins`). No dtype
    stands for float32 on the CPU and bfloat16 on a GPU; `evaluation_layout` is the rule for what lies packed.
    `activations` is as in `CheckpointWeights`. Of a model that is run `in_turn`, layers are read when they
    are needed, embedding and head by rows.
    """
    place = find_device(device)
    parameter_table = table_of_tensors(checkpoint.tensors, checkpoint.bind(), checkpoint.layout.traits)
    dtype = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    weights = CheckpointWeights(checkpoint, activations=activations)
    config = DecoderConfig.of(checkpoint.architecture)
    layout = evaluation_layout(parameter_table.parameters, place, dtype, by_codes=activations == INT8)
    decoder = load_decoder(
        config,
        weights,
        device=place,
        dtype=dtype,
        layout=layout,
        inputs=weights.inputs,
        on_demand=in_turn,
        streaming=Streaming.TABLES if in_turn else Streaming.NOTHING,
    )
    nbytes = ModelBytes.of(config, weights, dtype, layout) if in_turn else None
    size_bytes = sum(file.size for file in checkpoint.files.files)
    said = weights.activations_in_words
    origin = origin_of(checkpoint, name or str(checkpoint.path), commit)
    return EvalModel(
        label, decoder, size_bytes, parameter_table.bits_per_weight, checkpoint.path, origin, said, nbytes
    )


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
