"""Solves the multiple-choice knapsack: one option of every group, least cost within a capacity.

Exact: states are kept only where the relaxed problem (fractions of steps between neighbouring options on
each group's lower convex hull) could still bring them below the best solution known, which is the relaxed
one rounded down (Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Item = tuple[float, float]
"""Weight and cost of an option."""

# Beyond these the answer is the best one found, not proven to be the best there is.
MOST_GROUPS = 1000
MOST_STATES = 4000


@dataclass(frozen=True, slots=True)
class _Step:
    """From one option of a group's hull to the next heavier one."""

    group: int
    weight: float
    gain: float
    option: int

    @property
    def order(self) -> tuple[float, int]:
        return -self.gain / self.weight, self.group


def solve(groups: Sequence[Sequence[Item]], capacity: float) -> list[int] | None:
    """The number of the option taken in every group: least total cost of a total weight <= `capacity`.

    None where even the lightest options weigh more.
    """
    kept = [_undominated(options) for options in groups]
    lightest = sum(options[kept[i][0]][0] for i, options in enumerate(groups))
    if lightest > capacity:
        return None
    steps = [step for i, options in enumerate(groups) for step in _steps(i, options, kept[i])]
    steps.sort(key=lambda step: step.order)
    rounded = _fill(groups, kept, steps, capacity - lightest)
    if len(groups) > MOST_GROUPS:
        return rounded
    return _search(groups, kept, steps, capacity, rounded)


def lower_hull(options: Sequence[Item]) -> list[int]:
    """The numbers of the options on the lower convex hull of cost over weight, the lightest first."""
    hull: list[int] = []
    for number in _undominated(options):
        while len(hull) > 1 and _turns_up(options[hull[-2]], options[hull[-1]], options[number]):
            hull.pop()
        hull.append(number)
    return hull


def _turns_up(a: Item, b: Item, c: Item) -> bool:
    """Whether b lies on or above the line from a to c, whose weights rise."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _undominated(options: Sequence[Item]) -> list[int]:
    """Options that no other one beats in weight and cost, the lightest first."""
    kept: list[int] = []
    for number in sorted(range(len(options)), key=lambda i: (*options[i], i)):
        if not kept or options[number][1] < options[kept[-1]][1]:
            kept.append(number)
    return kept


def _steps(group: int, options: Sequence[Item], kept: Sequence[int]) -> list[_Step]:
    hull = [kept[i] for i in lower_hull([options[number] for number in kept])]
    pairs = ((options[a], options[b], b) for a, b in pairwise(hull))
    return [_Step(group, b[0] - a[0], a[1] - b[1], number) for a, b, number in pairs]


def _fill(
    groups: Sequence[Sequence[Item]], kept: Sequence[Sequence[int]], steps: Sequence[_Step], room: float
) -> list[int]:
    """The lightest options with all steps that fit, the best gain per weight first; then what still fits."""
    taken, stopped = [options[0] for options in kept], set[int]()
    for step in steps:
        if step.weight > room or step.group in stopped:
            stopped.add(step.group)
            continue
        taken[step.group], room = step.option, room - step.weight
    while True:
        best, most = None, 0.0
        for i, options in enumerate(groups):
            weight, cost = options[taken[i]]
            for number in kept[i]:
                gain = cost - options[number][1]
                if gain > most and options[number][0] - weight <= room:
                    best, most = (i, number), gain
        if best is None:
            return taken
        i, number = best
        room -= groups[i][number][0] - groups[i][taken[i]][0]
        taken[i] = number


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The least cost of the groups from some number on, as a function of the weight they may have.

    `weights` and `gains` are sums over their steps, the best gain per weight first, from no step on.
    """

    weight: float
    cost: float
    weights: array[float]
    gains: array[float]

    def bound(self, room: float) -> float:
        """The least cost within that weight; infinite where the lightest options weigh more."""
        room -= self.weight
        if room < 0:
            return float("inf")
        full = bisect_right(self.weights, room) - 1
        gain = self.gains[full]
        if full + 1 < len(self.weights):
            share = (room - self.weights[full]) / (self.weights[full + 1] - self.weights[full])
            gain += share * (self.gains[full + 1] - gain)
        return self.cost - gain


def _relaxed(
    groups: Sequence[Sequence[Item]], kept: Sequence[Sequence[int]], steps: Sequence[_Step]
) -> list[_Relaxed]:
    """The relaxed problems of groups [i, ...) for every i, that of none at the end."""
    found, weight, cost = [], 0.0, 0.0
    for i in reversed(range(len(groups) + 1)):
        if i < len(groups):
            lightest = groups[i][kept[i][0]]
            weight, cost = weight + lightest[0], cost + lightest[1]
        own = [step for step in steps if step.group >= i]
        weights = accumulate((step.weight for step in own), initial=0.0)
        gains = accumulate((step.gain for step in own), initial=0.0)
        found.append(_Relaxed(weight, cost, array("d", weights), array("d", gains)))
    return found[::-1]


_State = tuple[float, float, int, "_State | None"]
"""Weight and cost so far, the option taken last, and the state before it."""


def _search(
    groups: Sequence[Sequence[Item]],
    kept: Sequence[Sequence[int]],
    steps: Sequence[_Step],
    capacity: float,
    known: list[int],
) -> list[int]:
    """The best solution, at least as good as the known one."""
    relaxed = _relaxed(groups, kept, steps)
    best = sum(options[number][1] for options, number in zip(groups, known, strict=True))
    best -= 1e-12 * abs(best)  # what rounding alone would call better is not worth a state
    states: list[_State] = [(0.0, 0.0, -1, None)]
    for i, options in enumerate(groups):
        after, grown = relaxed[i + 1], []
        for state in states:
            for number in kept[i]:
                weight, cost = state[0] + options[number][0], state[1] + options[number][1]
                bound = cost + after.bound(capacity - weight)
                if bound < best:
                    grown.append((bound, (weight, cost, number, state)))
        if len(grown) > MOST_STATES:
            grown = sorted(grown, key=lambda each: each[0])[:MOST_STATES]
        states = _frontier([state for _, state in grown])
    if not states:
        return known
    last: _State | None = min(states, key=lambda state: state[1])
    taken: list[int] = []
    while last is not None and last[3] is not None:
        taken.append(last[2])
        last = last[3]
    return taken[::-1]


def _frontier(states: list[_State]) -> list[_State]:
    """The states that no other one beats in weight and cost."""
    found: list[_State] = []
    for state in sorted(states, key=lambda each: each[:2]):
        if not found or state[1] < found[-1][1]:
            found.append(state)
    return found
