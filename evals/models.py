"""Opens checkpoints as models to measure: decoder, label, size on disk, bits per weight."""

from __future__ import annotations

from pathlib import Path

import torch

from qconvert.census import census_of_tensors
from qconvert.decoder.config import DecoderConfig
from qconvert.decoder.load import load_decoder
from qconvert.decoder.place import Layout, find_device
from qconvert.evals.lockstep import EvalModel
from qconvert.formats.checkpoint import open_checkpoint
from qconvert.formats.weights import CheckpointWeights


def open_model(
    path: Path, label: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> EvalModel:
    """The checkpoint in `path`, ready to be measured; quantized weights stay packed in memory.

    In bfloat16 they lie in the layout of the CPU's kernels, which decode to the same numbers as the
    reference layout, faster.
    """
    checkpoint = open_checkpoint(path)
    weights = CheckpointWeights(checkpoint)
    fast = dtype == torch.bfloat16 and find_device(device).type == "cpu"
    decoder = load_decoder(
        DecoderConfig.from_hf(checkpoint.config),
        weights,
        device=device,
        dtype=dtype,
        layout=Layout.AUTO if fast else Layout.REFERENCE,
    )
    census = census_of_tensors(checkpoint.tensors, checkpoint.bind(), checkpoint.layout.name)
    size_bytes = sum(file.size for file in checkpoint.files.files)
    return EvalModel(label, decoder, size_bytes, census.bits_per_weight, path)
