"""Divides the windows of an evaluation among processes, which share nothing but a folder beside the report.

A task is a run of whole batches: what else visits a layer with a window changes its last digits. Scores go
into receipts, and every process that finds all of them has what one process alone would have.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qconvert.core.ranks import Rank, order
from qconvert.evaluate.lockstep import Progress, Track
from qconvert.evaluate.protocols import Window
from qconvert.formats.io.journal import Record
from qconvert.formats.io.shared_folder import Published, SharedFolder, is_shared, shared_folder

_KINDS = ("nll", "top", "kl")
_REPORT = "report"


class Lockstep(Protocol):
    """Scores windows from number `done` on, into tracks that hold none (`lockstep.run_lockstep`)."""

    def __call__(self, tracks: Sequence[Track], *, windows: Sequence[Window], done: int) -> int: ...


@dataclass(slots=True)
class Share:
    """The part of one of several processes in the evaluation whose report is `out`."""

    out: Path
    rank: Rank
    _folder: SharedFolder | None = field(default=None, init=False)

    def run(
        self,
        tracks: Sequence[Track],
        windows: Sequence[Window],
        batches: Sequence[Sequence[Window]],
        lockstep: Lockstep,
        mark: str,
        *,
        in_turn: bool,
        progress: Progress | None,
    ) -> int:
        """Fill the tracks with the scores of all windows, whichever process computes them.

        `mark` tells evaluations apart; models whose layers are read `in_turn` are read once by each process.
        Returns the number of windows. Raises Published where the report is written, OtherJob where others
        have begun another evaluation.
        """
        at_once = -(-len(batches) // self.rank.world) if in_turn else 1
        job = {"evaluation": mark, "windows": len(windows), "batches at once": at_once}
        self._folder = folder = SharedFolder(shared_folder(self.out), job, {})
        spans: dict[str, tuple[int, int]] = {}
        stop = 0
        for first in range(0, len(batches), at_once):
            start, stop = stop, stop + sum(map(len, batches[first : first + at_once]))
            spans[f"windows-{start}-{stop}"] = start, stop

        def score(task: str) -> list[Record]:
            start, stop = spans[task]
            own = [Track(track.model, track.echo) for track in tracks]
            if lockstep(own, windows=windows[:stop], done=start) < stop:
                raise KeyboardInterrupt
            return list(map(_packed, own))

        def hear(task: str, own: bool) -> None:
            if progress is not None:
                progress(sum(spans[each][1] - spans[each][0] for each in folder.receipts), len(windows))

        costs = {name: stop - start for name, (start, stop) in spans.items()}
        self._work(order(costs, self.rank), score, hear)
        for task in spans:
            for track, record in zip(tracks, folder.receipts[task].records, strict=True):
                _unpack(record, track)
        return len(windows)

    def finish(self, write: Callable[[], None]) -> bool:
        """Let one of the processes write the report, and wait for it; whether it was this one."""
        assert self._folder is not None
        written = False

        def report(task: str) -> list[Record]:
            nonlocal written
            write()
            written = True
            return []

        try:
            self._work([_REPORT], report, lambda task, own: None)
        except Published:
            return written
        self._folder.remove()
        return written

    def close(self) -> None:
        """Leave what is done to the other processes."""
        if self._folder is not None:
            self._folder.close()

    def _work(
        self,
        tasks: Sequence[str],
        do: Callable[[str], Sequence[Record]],
        heard: Callable[[str, bool], None],
    ) -> None:
        assert self._folder is not None
        # The folder goes when the report is written.
        self._folder.work(tasks, do, heard, lambda: not is_shared(self.out))


def _packed(track: Track) -> Record:
    """The scores of a track, to the bit."""
    arrays: list[Any] = []
    for kind in _KINDS:
        found = getattr(track, kind)
        whole = np.concatenate(found) if found else np.empty(0)
        arrays.append([whole.dtype.str, base64.b64encode(whole.tobytes()).decode(), bool(found)])
    return [track.seconds, track.tokens, *arrays]


def _unpack(record: Record, track: Track) -> None:
    """Add packed scores to a track."""
    seconds, tokens, *arrays = record
    track.seconds += seconds
    track.tokens += tokens
    for kind, (dtype, text, given) in zip(_KINDS, arrays, strict=True):
        if given:
            getattr(track, kind).append(np.frombuffer(base64.b64decode(text), np.dtype(dtype)))
