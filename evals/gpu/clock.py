"""Timing on a device: calls captured in a CUDA graph, timed by events; elsewhere the wall clock.

A kernel of a few microseconds is shorter than its launch from Python, so calls are captured once and
replayed: what is timed is what a captured decode step would see.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

LEAST_CALLS = 16
"""Calls in a graph, at least: between two replays lie microseconds that are no kernel's."""
ROUND_SECONDS = 1e-3
"""How long a round of replays lasts, at least."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call, the median over rounds; `graphed` if the calls were replayed as a graph."""

    seconds: float
    rounds: tuple[float, ...]
    graphed: bool


def synchronize(device: torch.device) -> None:
    """Wait for the device; raises what a kernel has done wrong."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(calls: Sequence[Call], device: torch.device) -> torch.cuda.CUDAGraph:
    """The calls as one graph. Runs them once before, on a side stream, so that kernels get compiled."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_calls(
    calls: Sequence[Call], device: torch.device, *, rounds: int = 7, graphed: bool = True
) -> Timing:
    """Seconds per call of calls that follow one another, in turns.

    With `graphed` unset, or off CUDA, they are launched one by one.
    """
    if device.type != "cuda":
        return _by_wall_clock(calls)
    if not graphed:
        return _by_events(lambda: _run(calls), len(calls), rounds, graphed=False)
    repeats = math.ceil(LEAST_CALLS / len(calls))
    graph = capture([*calls] * repeats, device)
    return _by_events(graph.replay, repeats * len(calls), rounds, graphed=True)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _by_events(replay: Call, calls: int, rounds: int, *, graphed: bool) -> Timing:
    replay()
    repeats = max(1, math.ceil(ROUND_SECONDS / max(_event_seconds(replay, 3) / 3, 1e-7)))
    seconds = tuple(_event_seconds(replay, repeats) / (repeats * calls) for _ in range(rounds))
    return Timing(statistics.median(seconds), seconds, graphed)


def _event_seconds(replay: Call, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _by_wall_clock(calls: Sequence[Call]) -> Timing:
    """One round: only dry runs come here, whose figures mean nothing."""
    begin = time.perf_counter()
    _run(calls)
    seconds = (time.perf_counter() - begin) / len(calls)
    return Timing(seconds, (seconds,), graphed=False)


def wall_seconds(call: Call, device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin
