"""Loads a decoder: its tables and layers, all at once or on demand, and its fastest step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch

from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cpu.decode_step import cpu_step
from qconvert.runtime.cpu.weight_memory import WeightMemory, one_by_one
from qconvert.runtime.cuda.triton_language import available
from qconvert.runtime.device_layout import Layout, find_device, place_table, preferred_dtype
from qconvert.runtime.head import rounded_head
from qconvert.runtime.layer import Layer
from qconvert.runtime.layer_builder import LayerBuilder
from qconvert.runtime.model import Decoder, Step
from qconvert.runtime.placed_weights import Streaming, missing_weight
from qconvert.runtime.rope import frequencies
from qconvert.runtime.weight_source import Inputs, Weights, exact_inputs

__all__ = ["LayersOnDemand", "Streaming", "load_decoder"]


def load_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    layout: Layout = Layout.REFERENCE,
    head_bits: int | None = None,
    on_demand: bool = False,
    inputs: Inputs = exact_inputs,
    streaming: Streaming = Streaming.NOTHING,
) -> Decoder:
    """A decoder with the given weights, computing in `dtype` (float32 or bfloat16) on `device`.

    No dtype stands for the device's fastest. Quantized weights stay packed, each in one `layout`;
    `head_bits` rounds the head to 8 or 4 bits (beside the embedding, where the two are tied). Layers that
    are loaded `on_demand` are read whenever they are asked for, and not kept; what `streaming` names is never
    held, but read by blocks of rows when it is multiplied by (`weights` are `StreamedWeights`).
    `inputs` says what linears round their inputs to. Raises CorruptCheckpoint for a weight that is missing or
    has another shape than the config implies, and BadRecipe for a device that is not here.
    """
    device = find_device(device)
    dtype = dtype or preferred_dtype(device)
    # Layers that are not kept give their memory back one by one.
    allocate = one_by_one if on_demand else WeightMemory()
    loader = LayerBuilder(config, weights, device, dtype, layout, inputs, streaming, allocate)
    embed = loader.table("embed")
    if embed is None:
        raise missing_weight("embed", None, "weight")
    stored = loader.table("lm_head")
    if stored is None and not config.tied:
        raise missing_weight("lm_head", None, "weight")
    head = embed if stored is None else stored
    if head_bits is not None:
        head = place_table(rounded_head(head, head_bits), device, torch.float32, layout, allocate)
    local = config.local_rope
    norm = loader.norm("final_norm", None, scale=config.logit_scale)
    assert norm is not None
    decoder = Decoder(
        config=config,
        dtype=loader.dtype,
        layout=layout,
        embed=embed,
        layers=LayersOnDemand(loader) if on_demand else tuple(loader.layer(i) for i in range(config.layers)),
        norm=norm,
        head=head,
        frequencies_F=frequencies(config.rope, loader.rotated_dim(0)).to(device),
        local_frequencies_F=None if local is None else frequencies(local, loader.rotated_dim(1)).to(device),
        embed_scale=config.hidden**0.5 if config.graph.scaled_embedding else 1.0,
        layer_inputs=loader.layer_inputs() if config.layer_input else None,
        observers=loader.observers,
        head_inputs=inputs("lm_head", None),
    )
    return replace(decoder, step=_step(decoder)) if layout is Layout.AUTO and not on_demand else decoder


class LayersOnDemand(Sequence[Layer]):
    """The layers of a model, each read from the checkpoint whenever it is asked for."""

    def __init__(self, loader: LayerBuilder) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.config.layers

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        numbers = range(len(self))[index]
        with torch.inference_mode(False):  # weights are packed in other threads, which are in no such mode
            if isinstance(numbers, range):
                return [self._loader.layer(i) for i in numbers]
            return self._loader.layer(numbers)


def _step(decoder: Decoder) -> Step | None:
    """A faster way to decode a single sequence, where there is one for the device and the model."""
    if available(decoder.device):
        from qconvert.runtime.cuda.decode_step import CudaStep, obstacle

        if obstacle(decoder, 1) is None:
            return CudaStep(decoder)
    return cpu_step(decoder)
