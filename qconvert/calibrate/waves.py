"""Gives what choosing codes together needs of the inputs of linears, wave after wave.

A wave is what reads one kind of input in one layer: q, k and v; the output projection; gate and up; down. Its
statistics are measured when everything before it is quantized already, so that its codes make up for errors
made before (the target shift of section 2.5, arXiv 2504.02692, 2505.11695). The activations of all tokens
before a layer lie on disk, once as the original layers make them and once as the quantized ones do; in memory
are one layer, one batch and the sums of one wave.

Legend: B windows, T tokens of a window, D hidden width, N rows, I columns of a linear.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.input_sums import InputSums
from qconvert.core.dtypes import Json
from qconvert.core.statistics import InputHessian, StatisticsKey
from qconvert.errors import QConvertError
from qconvert.quant.hessian import NotPositiveDefinite
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey

# Rows of activations in a batch: enough to amortise reading a layer's weights from memory.
BATCH_TOKENS = 4096
# One window of this many is held out of the Hessians, to decide what is written.
HELD_OUT_OF = 16

_Step = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Wave:
    """The linears that read one kind of input in a layer, and the statistics of these inputs.

    Of an input whose Hessian could not be factored there are second moments only.
    """

    layer: int | None
    keys: frozenset[StatisticsKey]
    hessians: dict[StatisticsKey, InputHessian] = field(default_factory=dict)
    moments: dict[StatisticsKey, np.ndarray] = field(default_factory=dict)
    shares: dict[StatisticsKey, float] = field(default_factory=dict)
    record: Json = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        return key in self.moments

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]."""
        return self.moments[key]

    def rounding(self, key: StatisticsKey) -> InputHessian | None:
        """The Hessian of an input."""
        return self.hessians.get(key)


class Waves:
    """The waves of a model in their order.

    `original` and `current` are one model, its layers loaded on demand; while the waves are walked,
    whoever walks them lets `current` read the weights that were quantized in their place. `wanted` are the
    inputs of the linears to be quantized.
    """

    def __init__(
        self,
        original: Decoder,
        current: Decoder,
        calibration: Calibration,
        wanted: Collection[StatisticsKey],
        scratch: Path,
    ) -> None:
        self._original, self._current, self._calibration = original, current, calibration
        self._tokens_BT = tokens_BT = calibration.tokens_BT
        self._wanted, self._scratch = frozenset(wanted), scratch
        windows = range(len(tokens_BT))
        held = {i for i in windows if i % HELD_OUT_OF == HELD_OUT_OF // 2} or {windows[-1]}
        per = max(1, BATCH_TOKENS // tokens_BT.shape[1])
        self._batches = [
            (batch, kept)
            for kept in (False, True)
            for batch in _cut([i for i in windows if (i in held) == kept], per)
        ]

    def __iter__(self) -> Iterator[Wave]:
        """The waves; what a wave's linears became must be in place before the next one is asked for."""
        rotations = self._original.rotations(0, self._tokens_BT.shape[1])
        streams = self._streams()
        layers = {key.layer for key in self._wanted if key.layer is not None}
        head = frozenset(key for key in self._wanted if key.layer is None)
        for i in range(len(self._original.layers) if head else max(layers, default=-1) + 1):
            wanted = {key for key in self._wanted if key.layer == i}
            for number, original in enumerate(self._original.layers[i].steps(rotations)):
                for stage in self._stages(original, streams.original, wanted):
                    current = self._current.layers[i].steps(rotations)[number]
                    yield self._wave(original, current, streams, stage, wanted)
                current = self._current.layers[i].steps(rotations)[number]
                streams.advance(original, current, self._batches, self._placed)
        if head:
            yield self._head_wave(streams, head)

    def _streams(self) -> _Streams:
        with torch.inference_mode():
            shape = (*self._tokens_BT.shape, self._original.config.hidden)
            streams = _Streams(self._scratch, shape, shifts=self._calibration.shift)
            for batch, _ in self._batches:
                tokens = torch.from_numpy(self._tokens_BT[batch])
                streams.original[batch] = self._original.embedded(tokens).float().cpu()
                if streams.shifts:
                    streams.current[batch] = self._current.embedded(tokens).float().cpu()
        return streams

    def _stages(self, step: _Step, x_BTD: Tensor, wanted: Collection[StatisticsKey]) -> list[tuple[str, ...]]:
        """The roles that read one input each, in the order in which a step computes them."""
        seen: dict[tuple[str, ...], None] = {}
        with self._original.observing(lambda key, rows: seen.setdefault(key.roles)), torch.inference_mode():
            step(self._placed(x_BTD[:1]))
        return [roles for roles in seen if any(key.role in roles for key in wanted)]

    def _wave(
        self,
        original: _Step,
        current: _Step,
        streams: _Streams,
        roles: tuple[str, ...],
        wanted: Collection[StatisticsKey],
    ) -> Wave:
        keys = frozenset(key for key in wanted if key.role in roles)
        layer = next(iter(keys)).layer
        inputs = {InputKey(roles, layer, key.expert) for key in keys}
        sums: dict[InputKey, InputSums] = {}
        for batch, held in self._batches:
            read = self._shown(self._current, current, streams.current[batch], inputs)
            # Experts are chosen anew for changed inputs, so that rows would not pair up.
            pairs = streams.shifts and all(key.expert is None for key in inputs)
            origin = self._shown(self._original, original, streams.original[batch], inputs) if pairs else {}
            for key, rows_NI in read.items():
                if key not in sums:
                    sums[key] = InputSums(rows_NI.shape[1], rows_NI.device, pairs=pairs)
                (sums[key].hold if held else sums[key].add)(rows_NI, origin.get(key))
        return self._finished(layer, keys, {key: sums.pop(key) for key in list(sums)})

    def _finished(
        self, layer: int | None, keys: frozenset[StatisticsKey], sums: dict[InputKey, InputSums]
    ) -> Wave:
        wave = Wave(layer, keys)
        for shown, summed in sums.items():
            own = [key for key in keys if key.role in shown.roles and key.expert == shown.expert]
            moments_I = summed.moments_I
            if not np.isfinite(moments_I).all():
                raise QConvertError(
                    f"layer {layer}, {own[0].role}: its input holds NaN or infinity on the calibration text",
                    "the weights are damaged, or need --device cuda; try `qconvert eval perplexity` first",
                )
            wave.moments |= dict.fromkeys(own, moments_I)
            try:
                hessian, share = summed.hessian(self._calibration.damping)
            except NotPositiveDefinite:
                continue
            wave.hessians |= dict.fromkeys(own, hessian)
            wave.shares |= dict.fromkeys(own, share)
        return wave

    def _head_wave(self, streams: _Streams, keys: frozenset[StatisticsKey]) -> Wave:
        shown = InputKey(("lm_head",))
        sums = InputSums(self._original.config.hidden, self._original.device, pairs=streams.shifts)
        with torch.inference_mode():
            for batch, held in self._batches:
                read = self._current.norm(self._placed(streams.current[batch])).flatten(0, 1).float()
                origin = self._original.norm(self._placed(streams.original[batch])).flatten(0, 1).float()
                (sums.hold if held else sums.add)(read, origin if streams.shifts else None)
        return self._finished(None, keys, {shown: sums})

    def _shown(
        self, decoder: Decoder, step: _Step, x_BTD: Tensor, wanted: Collection[InputKey]
    ) -> dict[InputKey, Tensor]:
        """The inputs that a step shows of those wanted, float32 [N, I]; it ends when all were seen."""
        found: dict[InputKey, Tensor] = {}

        def see(key: InputKey, rows_NI: Tensor) -> None:
            if key in wanted:
                found[key] = rows_NI.float()
                if len(found) == len(wanted):
                    raise _AllSeen

        with decoder.observing(see), torch.inference_mode(), contextlib.suppress(_AllSeen):
            step(self._placed(x_BTD))
        return found

    def _placed(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.to(self._original.device, self._original.dtype)


class _AllSeen(Exception):
    """Ends a step whose remaining products nobody needs."""


class _Streams:
    """The activations before a layer, float32 [B, T, D] in files without a name.

    `current` is `original` where the layers before are not quantized.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...], *, shifts: bool) -> None:
        self.shifts = shifts
        self.original = on_disk(folder, shape)
        self.current = on_disk(folder, shape) if shifts else self.original

    def advance(
        self, original: _Step, current: _Step, batches: Sequence[tuple[list[int], bool]], place: _Step
    ) -> None:
        """Let both pass through a step."""
        with torch.inference_mode():
            for batch, _ in batches:
                for x_BTD, step in ((self.original, original), (self.current, current))[: 1 + self.shifts]:
                    x_BTD[batch] = step(place(x_BTD[batch])).float().cpu()


def on_disk(folder: Path, shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor of zeros in a file without a name, which is gone with the process."""
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the mapping keeps it)
    return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))


def _cut(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
