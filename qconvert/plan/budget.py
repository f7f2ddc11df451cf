"""Chooses the encoding of every weight for a size, or for a divergence: pure functions on numbers.

Weights that must be encoded alike are one group. Every option of a group has its exact bytes and its cost,
the nats per token by which the model's output would diverge; costs of groups add up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.sizes import parse_size
from qconvert.errors import BadRecipe
from qconvert.models import Architecture
from qconvert.plan.knapsack import solve

_BITS = re.compile(r"(?P<bits>\d{1,3}(?:\.\d{1,15})?)\s*bpw", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Option:
    """What a group may be encoded as: bytes of all its weights, nats per token of the text."""

    label: str
    nbytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that get one encoding, by the names of the output, and their options."""

    name: str
    members: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """The option chosen for every group, in their order; bytes and nats of all of them together."""

    chosen: tuple[tuple[Group, Option], ...]

    @property
    def nbytes(self) -> int:
        return sum(option.nbytes for _, option in self.chosen)

    @property
    def cost(self) -> float:
        return sum(option.cost for _, option in self.chosen)

    @property
    def labels(self) -> dict[str, str]:
        """The label of every weight's option, by name."""
        return {member: option.label for group, option in self.chosen for member in group.members}


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """How large an output may be: bytes of its files, or bits for each of its weights."""

    text: str
    nbytes: int | None = None
    bits_per_weight: float | None = None

    def most_bytes(self, weights: int) -> int:
        """The bytes of an output of that many weights."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.bits_per_weight is not None
        return int(self.bits_per_weight * weights / 8)


@dataclass(frozen=True, slots=True)
class Target:
    """What is aimed at, either a size or nats per token, and the encodings to choose among."""

    labels: tuple[str, ...]
    size: SizeTarget | None = None
    divergence: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be aimed at."""
        if (self.size is None) == (self.divergence is None):
            raise BadRecipe("--target-size, --target-kl: both, or none", "choose one of the two")
        if len(set(self.labels)) < 2:
            raise BadRecipe(
                f"target: one encoding to choose among ({', '.join(self.labels) or 'none'})",
                "name two or more",
            )


def parse_target_size(text: str) -> SizeTarget:
    """Read `4.5bpw`, `3.2GB` or `900MB`; bpw counts all weights, the embedding too. Raises BadRecipe."""
    match = _BITS.fullmatch(text.strip())
    if match is not None:
        bits = float(match["bits"])
        if not 1 <= bits <= 32:
            raise BadRecipe(
                f"--target-size {text}: {bits:g} bits per weight",
                "give a number from 1 to 32, such as 4.5bpw",
            )
        return SizeTarget(text, bits_per_weight=bits)
    wanted = "write bits per weight or bytes: 4.5bpw, 3.2GB, 900MB"
    if re.fullmatch(r"[\d.]*", text.strip()):
        raise BadRecipe(f"--target-size {text!r}: has no unit", wanted)
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise BadRecipe(f"--target-size {text!r}: is not a size", wanted) from error
    if nbytes == 0:
        raise BadRecipe(f"--target-size {text}: is 0 bytes", wanted)
    return SizeTarget(text, nbytes=nbytes)


def parse_target_kl(text: str) -> float:
    """Read a divergence in nats per token, such as 0.01. Raises BadRecipe."""
    try:
        nats = float(text)
    except ValueError:
        nats = 0.0
    if not 0 < nats < 10:
        raise BadRecipe(f"--target-kl {text}: is not a divergence", "write nats per token, such as 0.01")
    return nats


def smallest_cost(groups: Sequence[Group], most_bytes: int) -> Mix:
    """The mix of least cost that takes at most that many bytes.

    Raises BadRecipe saying the least bytes where that is not enough for any.
    """
    found = solve([[(o.nbytes, o.cost) for o in group.options] for group in groups], most_bytes)
    if found is None:
        least = sum(min(option.nbytes for option in group.options) for group in groups)
        raise BadRecipe(
            f"target size: the weights to choose for have {most_bytes:,} bytes, and take {least:,} at least",
            "ask for a larger size, or add an encoding of fewer bits",
        )
    return _mix(groups, found)


def fewest_bytes(groups: Sequence[Group], most_cost: float) -> Mix:
    """The smallest mix of at most that cost, in nats per token.

    Raises BadRecipe saying the least cost where no mix comes down to it.
    """
    found = solve([[(o.cost, o.nbytes) for o in group.options] for group in groups], most_cost)
    if found is None:
        least = sum(min(option.cost for option in group.options) for group in groups)
        raise BadRecipe(
            f"target KL: every mix is expected to lose more than {most_cost:g} nats, the best {least:.2g}",
            "allow a larger divergence, or add an encoding of more bits",
        )
    return _mix(groups, found)


def uniform(groups: Sequence[Group], label: str) -> Mix | None:
    """The mix in which every group has this option; None where one has not."""
    found = [next((o for o in group.options if o.label == label), None) for group in groups]
    if not all(found):
        return None
    return Mix(tuple((g, o) for g, o in zip(groups, found, strict=True) if o is not None))


def _mix(groups: Sequence[Group], numbers: Sequence[int]) -> Mix:
    return Mix(tuple((group, group.options[i]) for group, i in zip(groups, numbers, strict=True)))


def alike(names: Sequence[str], architecture: Architecture) -> list[tuple[str, ...]]:
    """The weights of these names that loaders want encoded alike, each group in the order of the names.

    The members of everything that a loader may stack (q, k and v; gate and up), and all experts of a layer,
    those before their activation and those after it apart.
    """
    leader = {name: name for name in names}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    def join(members: Sequence[str]) -> None:
        present = [find(member) for member in members if member in leader]
        for other in present[1:]:
            leader[find(other)] = find(present[0])

    for entry in architecture.fused.values():
        join([entry.whole.name, *(member.name for member in entry.members)])
    experts: dict[tuple[int | None, bool], list[str]] = {}
    for name in names:
        parameter = architecture.parameter(name)
        if parameter is not None and ".experts." in parameter.group:
            after = parameter.group.endswith("down")
            experts.setdefault((parameter.layer, after), []).append(name)
    for members in experts.values():
        join(members)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(find(name), []).append(name)
    return [tuple(members) for members in groups.values()]


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, first and last of each."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def selectors(labels: Mapping[str, str], architecture: Architecture) -> list[tuple[str, str]]:
    """Selectors and labels that say the same of a model's weights, by role and runs of layers.

    The names are those of weights as they are stored, fused or not.
    """
    by_role: dict[str, dict[str, list[int]]] = {}
    found: list[tuple[str, str]] = []
    for name, label in labels.items():
        parameter = architecture.parameter(name)
        assert parameter is not None, name
        if parameter.layer is None:
            found.append((parameter.role, label))
            continue
        layers = by_role.setdefault(parameter.group, {}).setdefault(label, [])
        if parameter.layer not in layers:
            layers.append(parameter.layer)
    for role, labelled in by_role.items():
        for label, layers in labelled.items():
            for first, last in ranges(layers):
                span = f"{first}" if first == last else f"{first}-{last}"
                found.append((f"layers.{span}.{role}", label))
    return found
