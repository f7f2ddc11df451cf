"""Runs models that are larger than memory: layers are read in turn, each for many windows.

One model after the other goes through its layers, the hidden states of all tokens in memory or in a file;
then the models are scored side by side. Batches are those of a run in memory, so figures are the same to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from qconvert.calibrate.activation_file import activation_file
from qconvert.calibrate.freed import give_back
from qconvert.calibrate.memory_limit import memory_limit, peak_resident
from qconvert.evaluate.lockstep import BATCH_TOKENS, Batch, Tell, Track
from qconvert.evaluate.memory import EvalMemory, EvalWork, fitted
from qconvert.evaluate.model_bytes import HeadForm
from qconvert.evaluate.protocols import Window
from qconvert.evaluate.records import MemoryUse
from qconvert.runtime.layer_passes import HeldStates, HiddenStates, pass_layers, states_of
from qconvert.runtime.linear import Table
from qconvert.runtime.model import Decoder
from qconvert.runtime.scoring import Outputs
from qconvert.runtime.storage import StreamedWeight


@dataclass(frozen=True, slots=True)
class Within:
    """A memory to keep within: its bytes, a folder for what lies on disk, whom to tell what will be taken."""

    nbytes: int
    scratch: Path
    tell: Callable[[str], None] = lambda line: None

    def use(self, memory: EvalMemory) -> MemoryUse:
        """What was asked for, what was expected, and what the process took until now."""
        return MemoryUse(memory.asked, memory.peak, peak_resident())


def fit(
    within: Within,
    tracks: Sequence[Track],
    windows: Sequence[Window],
    *,
    batch_tokens: int | None,
    saves: bool,
) -> LayersInTurn:
    """The way to run models that were opened `in_turn` on these windows within a memory.

    Tells what it will take. Raises BadRecipe where that is too little.
    """
    models = {id(track.model): track.model for track in tracks}.values()
    lengths = [window.stop - window.start for window in windows]
    work = EvalWork(
        [model.nbytes for model in models if model.nbytes is not None],
        len(tracks),
        max(lengths, default=1),
        sum(lengths),
        batch_tokens=batch_tokens or BATCH_TOKENS["cpu"],
        echoes=any(track.echo for track in tracks),
        rounds=any(model.activations != "exact" for model in models),
        saves=saves,
    )
    memory = fitted(work, memory_limit(within.nbytes))
    for line in memory.lines:
        within.tell(line)
    return LayersInTurn(memory, within.scratch)


@dataclass(frozen=True, slots=True)
class LayersInTurn:
    """A way to run models whose layers are loaded on demand (`lockstep.Run`), as `memory` has planned it.

    Hidden states that have no room in memory lie in a file without a name in the folder `scratch`.
    """

    memory: EvalMemory
    scratch: Path

    def __call__(
        self, tracks: Sequence[Track], batches: Sequence[Batch], tell: Tell
    ) -> Iterator[list[Outputs]]:
        """What every track says of one batch after the other; QConvertError where the disk is too small."""
        done = 0
        for part in self.memory.parts(batches):
            windows = sum(len(batch.windows) for batch in part)
            progress = _Part(tell, done, windows, len(tracks) + 1)
            with ExitStack() as stack:
                states = self._states(stack, tracks, sum(batch.tokens_BT.numel() for batch in part))
                for number, track in enumerate(tracks):
                    _pass(track, part, states[number], progress.step(number))
                yield from self._scored(tracks, part, states, progress.step(len(tracks)))
            done += windows
            tell(done)

    def _states(self, stack: ExitStack, tracks: Sequence[Track], tokens: int) -> list[HiddenStates]:
        """Room for the hidden states of every track, until the stack is left."""
        decoders = [track.model.decoder for track in tracks]
        if self.memory.holds_states:
            return [HeldStates.empty(tokens, each.config.stream, each.dtype) for each in decoders]
        files = (
            activation_file(self.scratch, 1, 1, tokens, each.config.stream, each.dtype) for each in decoders
        )
        return [stack.enter_context(file).slot(0) for file in files]

    def _scored(
        self, tracks: Sequence[Track], part: Sequence[Batch], states: Sequence[HiddenStates], tell: Tell
    ) -> Iterator[list[Outputs]]:
        """What the heads are given, which are read once for all batches where there is room."""
        decoders = {id(track.model): track.model.decoder for track in tracks}
        heads = {key: self._head(decoder) for key, decoder in decoders.items()}
        tokens = [batch.tokens_BT for batch in part]
        rows = [
            states_of(track.model.decoder, tokens, own) for track, own in zip(tracks, states, strict=True)
        ]

        def outputs(track: Track, x_BTD: torch.Tensor, batch: Batch) -> Outputs:
            decoder = track.model.decoder
            h_ND = decoder.normalised(x_BTD)[:, batch.scored].flatten(0, 1)
            return decoder.outputs(h_ND)._replace(head=heads[id(track.model)])

        for number, batch in enumerate(part):
            yield [outputs(track, next(own), batch) for track, own in zip(tracks, rows, strict=True)]
            tell((number + 1) / len(part))
        heads.clear()
        give_back()

    def _head(self, decoder: Decoder) -> Table:
        head = decoder.head
        assert isinstance(head, StreamedWeight)
        match self.memory.heads:
            case HeadForm.PLACED:
                return cast(Table, head.placed(0, head.shape[0]))
            case HeadForm.STORED:
                return head.as_stored()
            case HeadForm.STREAMED:
                return head


def _pass(track: Track, part: Sequence[Batch], states: HiddenStates, tell: Tell) -> None:
    """Bring one model's hidden states of all batches through its layers."""

    def passed(done: int, total: int) -> None:
        tell(done / total)

    tokens = [batch.tokens_BT for batch in part]
    with track.timed(sum(each.numel() for each in tokens)):
        pass_layers(track.model.decoder, tokens, states, passed=passed, through=track.through)
    give_back()


@dataclass(frozen=True, slots=True)
class _Part:
    """How far some windows are, which come after `done` others: all models' layers, then the heads."""

    tell: Tell
    done: int
    windows: int
    steps: int

    def step(self, number: int) -> Tell:
        """What is told the share of a step that is done."""

        def told(share: float) -> None:
            self.tell(round(self.done + self.windows * (number + share) / self.steps, 1))

        return told
