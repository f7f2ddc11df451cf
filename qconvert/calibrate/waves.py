"""Provides the statistics of the inputs of linears for choosing codes together, wave after wave.

A wave is what reads one kind of input in one layer: q, k and v; the output projection; gate and up; down. Its
statistics are measured when everything before it is quantized already, so that its codes compensate errors
made before (the target shift: GPTAQ, arXiv 2504.02692; Qronos, arXiv 2505.11695). The activations of all
tokens before a layer lie on disk, as the original layers make them and as the quantized ones do, and so does
what the last linear of a step read, until the step goes on from there with its codes; in memory
are one layer, one batch and the sums of one wave.

Legend: B windows, T tokens of a window, D hidden width, N rows, I columns of a linear.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.activation_file import ActivationFile, activation_file
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.freed import give_back
from qconvert.calibrate.input_sums import InputSums, pooled, row_basis
from qconvert.calibrate.wave import Wave
from qconvert.core.statistics import Rounding, StatisticsKey
from qconvert.errors import CheckFailed
from qconvert.quant.hessian import NotPositiveDefinite
from qconvert.runtime.layer_step import LayerStep, SplitStep
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey
from qconvert.runtime.precision import fast_products
from qconvert.runtime.rope import Rotation

# One window of this many is held out of the Hessians, to decide what is written.
HELD_OUT_OF = 16
# Tokens for every column from which the least damping is best (measured: of 768 columns, 16,384 tokens); with
# fewer, more damping may be: 3 % less error at 8,192 tokens, 20 % at 4,096.
AMPLE_TOKENS = 32
STRONGER_DAMPING = (10.0, 30.0)
_ORIGINAL, _CURRENT = 0, 1
"""Slots of the activations' file."""

LoadDecoder = Callable[[], Decoder]
Loss = Callable[[StatisticsKey, Rounding], float]
"""The error of a linear's output on tokens held out, where its codes are chosen with this Hessian."""


def waves(
    original: LoadDecoder,
    current: LoadDecoder,
    calibration: Calibration,
    wanted: Collection[StatisticsKey],
    scratch: Path,
    loss: Loss,
    finished: Collection[StatisticsKey] = (),
    dampings: MutableMapping[tuple[str, ...], float] | None = None,
) -> Iterator[Wave]:
    """The waves of a model in their order.

    `original` and `current` load one model, its layers on demand. While the waves are walked, the caller
    makes `current` read the weights that were quantized in their place: what the linears of a
    wave became must be there before the next wave is asked for. `wanted` are the inputs of the linears to
    be quantized; activations lie in a file without a name in the folder `scratch`. `loss` says how well a
    Hessian serves a linear.

    Linears whose inputs are `finished` are quantized already: a layer, and a tied head, of which nothing else
    is wanted comes as one wave without statistics, if something after it is wanted; then, too, `current`
    must read what they became.
    `dampings` takes those that are chosen, by the roles that read an input, and may know some. Raises
    CheckFailed for inputs that are no numbers, QConvertError where the disk
    has not enough room.
    """
    held_last_BT, used = _held_out_last(calibration.tokens_BT)
    windows, tokens = held_last_BT.shape
    decoder = original()
    slots = 2 if calibration.shift else 1
    with (
        activation_file(scratch, slots, windows, tokens, decoder.config.stream) as file,
        torch.no_grad(),
        fast_products(),
    ):
        dampings = {} if dampings is None else dampings
        walk = _Walk(calibration, file, scratch, used, decoder.rotations(0, file.tokens), loss, dampings)
        walk.start(_ORIGINAL, decoder, held_last_BT)
        decoder = decoder.without_tables()
        embedding = frozenset(key for key in wanted if key.role == "embed")
        if embedding and embedding.issubset(finished):
            yield Wave(None, embedding)
        elif embedding:
            yield walk.tied_head(decoder, embedding)
            walk.start(_ORIGINAL, original(), held_last_BT)
        changed = decoder
        if calibration.shift:
            changed = current()
            walk.start(_CURRENT, changed, held_last_BT)
            changed = changed.without_tables()
        head = frozenset(key for key in wanted if key.role == "lm_head").difference(finished)
        layers = [key.layer for key in wanted if key.layer is not None and key not in finished]
        for i in range(len(decoder.layers) if head else 1 + max(layers, default=-1)):
            own = frozenset(key for key in wanted if key.layer == i)
            if own and own.issubset(finished):
                yield Wave(i, own)
                walk.past(i, decoder, changed)
            else:
                yield from walk.layer(i, decoder, changed, own)
        if head:
            yield walk.head(head, decoder, changed if calibration.shift else None)


@dataclass(frozen=True, slots=True)
class _Walk:
    """What all waves share. The first `used` windows of the file make Hessians, the others are held out."""

    calibration: Calibration
    file: ActivationFile
    scratch: Path
    used: int
    rotations: Sequence[Rotation]
    loss: Loss
    dampings: MutableMapping[tuple[str, ...], float]

    def start(self, slot: int, decoder: Decoder, tokens_BT: np.ndarray) -> None:
        """Store what the first layer reads."""
        for batch in self._batches():
            rows = slice(batch.first, batch.first + batch.count)
            tokens = torch.from_numpy(tokens_BT[rows]).to(decoder.device)
            self.file.write(slot, batch.first, decoder.embedded(tokens))

    def layer(
        self, i: int, original: Decoder, current: Decoder, wanted: Collection[StatisticsKey]
    ) -> Iterator[Wave]:
        """The waves of a layer; afterwards the file holds what the next layer reads."""
        whole_layer = original.layers[i]
        of_first = whole_layer.steps([(cos_TR[:1], sin_TR[:1]) for cos_TR, sin_TR in self.rotations])
        for number, step in enumerate(whole_layer.steps(self.rotations)):
            stages = self._stages(original, of_first[number], wanted)
            token_wise = number > 0  # the MLP, but where it is one step with the attention
            with contextlib.ExitStack() as opened:
                kept = None
                for stage in stages:
                    keys = frozenset(key for key in wanted if key.role in stage)
                    whole = stage is stages[-1]
                    splits = isinstance(step, SplitStep) and step.ends_with(stage)
                    if self.calibration.shift and whole and splits:
                        kept = opened.enter_context(self._last_inputs(step))
                    reading = _Reading(original, step, current, i, number, whole, kept)
                    sums = self._summed(reading, {InputKey(stage, i, key.expert) for key in keys}, token_wise)
                    yield self._finished(keys, sums)
                if not stages:
                    self._advance(original, step, _ORIGINAL, token_wise)
                if self.calibration.shift:
                    changed = current.layers[i].steps(self.rotations)[number]
                    self._advance(current, changed, _CURRENT, token_wise, kept)

    def _last_inputs(self, step: LayerStep) -> contextlib.AbstractContextManager[ActivationFile]:
        """A file for what the last linear of a step reads in the quantized model."""
        assert isinstance(step, SplitStep)
        return activation_file(self.scratch, 1, self.file.windows, self.file.tokens, step.width)

    def past(self, i: int, original: Decoder, current: Decoder) -> None:
        """Bring the file to what the next layer reads, without measuring anything."""
        for number, step in enumerate(original.layers[i].steps(self.rotations)):
            self._advance(original, step, _ORIGINAL, number > 0)
            if self.calibration.shift:
                self._advance(current, current.layers[i].steps(self.rotations)[number], _CURRENT, number > 0)

    def tied_head(self, original: Decoder, keys: frozenset[StatisticsKey]) -> Wave:
        """The wave of a head that is the embedding, which is quantized before any layer.

        So its input is the original model's; afterwards the file holds what the last layer gives.
        """
        for layer in original.layers:
            for number, step in enumerate(layer.steps(self.rotations)):
                self._advance(original, step, _ORIGINAL, token_wise=number > 0)
        return self.head(keys, original, None)

    def head(self, keys: frozenset[StatisticsKey], original: Decoder, current: Decoder | None) -> Wave:
        """The wave of a head, after the last layer; of the original model's input alone without `current`."""
        sums = self._sums(original.config.hidden, original.device, pairs=current is not None)
        for batch in self._batches(token_wise=True):
            read = origin = original.normalised(self._read(original, _ORIGINAL, batch)).flatten(0, 1).float()
            if current is not None:
                read = current.normalised(self._read(current, _CURRENT, batch)).flatten(0, 1).float()
            (sums.hold if batch.held else sums.add)(read, origin)
        return self._finished(keys, {InputKey(tuple(key.role for key in keys)): sums})

    def _stages(
        self, decoder: Decoder, step: LayerStep, wanted: Collection[StatisticsKey]
    ) -> list[tuple[str, ...]]:
        """The roles that read one input each, in the order in which a step computes them for one token."""
        seen: dict[tuple[str, ...], None] = {}
        with decoder.observing(lambda key, rows: seen.setdefault(key.roles)):
            step(self.file.read_part(_ORIGINAL, 0, 0, 1).to(decoder.device, decoder.dtype))
        return [roles for roles in seen if any(key.role in roles for key in wanted)]

    def _summed(
        self, reading: _Reading, inputs: Collection[InputKey], token_wise: bool
    ) -> dict[InputKey, InputSums]:
        """The sums of some inputs of a step over all tokens."""
        # Experts are routed again for changed inputs, so that their rows would not pair up.
        pairs = self.calibration.shift and all(key.expert is None for key in inputs)
        sums: dict[InputKey, InputSums] = {}
        changed = reading.changed(self.rotations) if self.calibration.shift else None
        basis_IB = None
        if reading.kept is not None and isinstance(reading.step, SplitStep):
            basis_IB = row_basis(reading.step.last.weight)
        for batch in self._batches(token_wise):
            x_BTD = self._read(reading.original, _ORIGINAL, batch)
            origin, y_BTD = _shown(reading.original, reading.step, x_BTD, inputs, whole=reading.whole)
            read = origin
            if changed is not None:
                x_BTD = self._read(reading.current, _CURRENT, batch)
                if reading.kept is None or not isinstance(changed, SplitStep):
                    read, _ = _shown(reading.current, changed, x_BTD, inputs, whole=False)
                else:
                    last_BTI = changed.inner(x_BTD)
                    reading.kept.write(0, batch.first, last_BTI, batch.start)
                    read = dict.fromkeys(inputs, last_BTI.flatten(0, -2).float())
            for key, rows_NI in read.items():
                if key not in sums:
                    sums[key] = self._sums(rows_NI.shape[1], rows_NI.device, pairs=pairs, basis_IB=basis_IB)
                (sums[key].hold if batch.held else sums[key].add)(rows_NI, origin[key] if pairs else None)
            if y_BTD is not None:
                self.file.write(_ORIGINAL, batch.first, y_BTD, batch.start)
        return sums

    def _sums(
        self, width: int, device: torch.device, *, pairs: bool, basis_IB: Tensor | None = None
    ) -> InputSums:
        form = self.calibration.savings.form(width)
        return InputSums(width, device, pairs=pairs, form=form, basis_IB=basis_IB)

    def _finished(self, keys: frozenset[StatisticsKey], sums: dict[InputKey, InputSums]) -> Wave:
        """The wave of these sums, which are used up."""
        give_back()
        layer = next(iter(keys)).layer
        wave = Wave(layer, keys)
        shared = pooled(sums.values()) if any(key.expert is not None for key in keys) else None
        roles = next(iter(sums)).roles
        # In an order that is the same in every process, as that of a set is not.
        ordered = sorted(keys, key=lambda key: (-1 if key.expert is None else key.expert, key.role))
        for expert, group in groupby(ordered, key=lambda key: key.expert):
            own = list(group)
            summed = sums.pop(InputKey(roles, layer, expert), None)
            if shared is not None:
                summed = shared.shrunk(summed)
            assert summed is not None
            if not np.isfinite(summed.moments_I).all():
                raise CheckFailed(
                    f"layer {layer}, {own[0].role}: its input holds NaN or infinity on the calibration text",
                    "the weights are damaged: `qconvert check MODEL` looks for what is not finite",
                )
            wave.moments |= dict.fromkeys(own, summed.moments_I)
            with contextlib.suppress(NotPositiveDefinite):
                wave.hessians |= dict.fromkeys(own, self._hessian(own[0], roles, summed))
        return wave

    def _hessian(self, key: StatisticsKey, roles: tuple[str, ...], sums: InputSums) -> Rounding:
        """The Hessian of an input with its damping: of few tokens, the one of least error on those held out.

        It is chosen in the first layer that has such an input, and kept for the others.
        """
        least = self.calibration.damping
        if sums.count >= AMPLE_TOKENS * sums.width:
            return sums.hessian(least)
        if roles not in self.dampings:
            choices, lost, made = (least, *(least * factor for factor in STRONGER_DAMPING)), {}, None
            for damping in reversed(choices):
                made = None  # one at a time
                made = sums.hessian(damping, last=False)
                lost[damping] = self.loss(key, made)
            self.dampings[roles] = min(choices, key=lost.__getitem__)
            if made is not None and self.dampings[roles] == least:
                return made
            made = None
        return sums.hessian(self.dampings[roles])

    def _advance(
        self,
        decoder: Decoder,
        step: LayerStep,
        slot: int,
        token_wise: bool,
        kept: ActivationFile | None = None,
    ) -> None:
        """Bring a slot past a step, of which `kept` has what its last linear reads."""
        for batch in self._batches(token_wise):
            x_BTD = self._read(decoder, slot, batch)
            if kept is not None and isinstance(step, SplitStep):
                y_BTD = step.outer(x_BTD, batch.of(kept, 0).to(decoder.device, decoder.dtype))
            else:
                y_BTD = step(x_BTD)
            self.file.write(slot, batch.first, y_BTD, batch.start)

    def _read(self, decoder: Decoder, slot: int, batch: _Batch) -> Tensor:
        return batch.of(self.file, slot).to(decoder.device, decoder.dtype)

    def _batches(self, token_wise: bool = False) -> Iterator[_Batch]:
        """Windows that are computed together; where tokens are independent (`token_wise`), parts of one."""
        most, window = self.calibration.savings.batch_tokens, self.file.tokens
        per = max(1, most // window)
        for begin, end, held in ((0, self.used, False), (self.used, self.file.windows, True)):
            for first in range(begin, end, per):
                if most >= window or not token_wise:
                    yield _Batch(first, min(per, end - first), held)
                    continue
                for start in range(0, window, most):
                    yield _Batch(first, 1, held, start, min(most, window - start))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Windows [first, first + count), held out or not; or `tokens` tokens of one from `start` on."""

    first: int
    count: int
    held: bool
    start: int = 0
    tokens: int | None = None

    def of(self, file: ActivationFile, slot: int) -> Tensor:
        """These windows, or these tokens of one, of a slot: float32 [B, T, D]."""
        if self.tokens is None:
            return file.read(slot, self.first, self.count)
        return file.read_part(slot, self.first, self.start, self.start + self.tokens)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A step of a layer of the original model, and where the current one has it; `whole` goes to its end.

    `kept` takes what the last linear reads in the current model.
    """

    original: Decoder
    step: LayerStep
    current: Decoder
    layer: int
    number: int
    whole: bool
    kept: ActivationFile | None = None

    def changed(self, rotations: Sequence[Rotation]) -> LayerStep:
        """The step of the current model, its weights read again."""
        return self.current.layers[self.layer].steps(rotations)[self.number]


class _AllSeen(Exception):
    """Leaves a step once all inputs that are wanted of it were seen."""


def _shown(
    decoder: Decoder, step: LayerStep, x_BTD: Tensor, wanted: Collection[InputKey], *, whole: bool
) -> tuple[dict[InputKey, Tensor], Tensor | None]:
    """The inputs that a step shows of those wanted, float32 [N, I]; if it is `whole`, what it gives."""
    found: dict[InputKey, Tensor] = {}

    def see(key: InputKey, rows_NI: Tensor) -> None:
        if key in wanted:
            found[key] = rows_NI.float()
            if len(found) == len(wanted) and not whole:
                raise _AllSeen

    y_BTD = None
    with decoder.observing(see), contextlib.suppress(_AllSeen):
        y_BTD = step(x_BTD)
    return found, y_BTD if whole else None


def _held_out_last(tokens_BT: np.ndarray) -> tuple[np.ndarray, int]:
    """The windows with those that are held out at the end, and the number of the others.

    Of a single window nothing is held out: it serves for both.
    """
    held_B = np.arange(len(tokens_BT)) % HELD_OUT_OF == HELD_OUT_OF // 2
    if not held_B.any():
        held_B[-1] = True
    if held_B.all():
        return np.concatenate((tokens_BT, tokens_BT)), len(tokens_BT)
    return np.concatenate((tokens_BT[~held_B], tokens_BT[held_B])), int((~held_B).sum())
