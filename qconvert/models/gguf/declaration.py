"""Defines what the declaration of a GGUF model consists of, and the facts about a model that it reads.

A declaration is data and small pure functions. It never computes with weights: a `TransformKind` names what
happens to a tensor's rows, and `plan.gguf.tensors` turns it into an operation of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, TypeVar

from qconvert.core.config_json import count, flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import positive_number
from qconvert.core.row_transforms import TransformKind
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.models.architecture import Architecture
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.parameters import Dimensions
from qconvert.models.rope import Llama3Scaling

Head = Literal["optional", "required", "tied"]
# What cannot be recovered of a changed tensor, and why the model computes the same without it.
LOST: Mapping[TransformKind, str] = {
    "unit_rows": "the lengths of its rows are not in a GGUF file; its model divides by them"
}


@dataclass(frozen=True)
class Facts:
    """One model as a declaration sees it: its config with the class's defaults, and its dimensions.

    `u32` and the methods after it return an entry under a key of this architecture.
    """

    model: GGUFModel
    architecture: Architecture

    @cached_property
    def settings(self) -> Json:
        """The language model's config, with the class's defaults for what is absent or null."""
        stated = {key: value for key, value in self.architecture.settings.items() if value is not None}
        return {**self.model.defaults, **stated}

    @property
    def layers(self) -> int:
        return self.architecture.layers

    @property
    def dimensions(self) -> tuple[Dimensions, ...]:
        return self.architecture.dimensions

    def size(self, key: str) -> int:
        """Returns the positive integer under a config key, which must be present."""
        return positive_int(self.settings, key)

    def optional(self, key: str) -> int | None:
        return optional_int(self.settings, key)

    def count(self, key: str) -> int:
        """Returns the integer under a config key, 0 when it is absent."""
        return count(self.settings, key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        return flag(self.settings, key, default=default)

    def number(self, key: str) -> float:
        return positive(self.settings, key)

    def u32(self, name: str, value: int) -> KV:
        return KV.u32(f"{self.model.arch}.{name}", value)

    def f32(self, name: str, value: float) -> KV:
        return KV.f32(f"{self.model.arch}.{name}", value)

    def text(self, name: str, value: str) -> KV:
        return KV.text(f"{self.model.arch}.{name}", value)

    def flagged(self, name: str, *, value: bool) -> KV:
        return KV.flag(f"{self.model.arch}.{name}", value)

    def by_layer(self, name: str, values: Iterable[int]) -> KV:
        return KV.i32s(f"{self.model.arch}.{name}", tuple(values))

    def flags_by_layer(self, name: str, values: Iterable[bool]) -> KV:
        return KV.flags(f"{self.model.arch}.{name}", tuple(values))


def positive(settings: Json, key: str) -> float:
    """Returns the positive float32 number under a key, which must be present."""
    value = settings.get(key)
    number = positive_number(value)
    if number is None:
        raise CorruptCheckpoint(f"config.json: {key} is {shown(repr(value))}, not a positive number")
    return number


T = TypeVar("T")
Read = Callable[[Metadata], Json]
Check = Callable[[Facts], str | None]


def nothing(file: Metadata) -> Json:
    """Returns no config entries: for keys that follow from others."""
    return {}


@dataclass(frozen=True)
class BothWays(Generic[T]):
    """Entries of the file, a check or tensors, in both directions.

    `write` makes them of a config; `read` returns the config.json entries they determine (of a check: those
    of every model that passes it), under the key names that declarations share (those of `Facts`), and
    includes what the class would assume otherwise.
    """

    write: Callable[[Facts], T]
    read: Read = nothing

    def __call__(self, facts: Facts) -> T:
        return self.write(facts)


Keys = BothWays[Iterator[KV]]


def read_by(read: Read) -> Callable[[Callable[[Facts], T]], BothWays[T]]:
    """Decorates the function that writes what `read` reads."""
    return lambda write: BothWays(write, read)


# Of checks, and of tensors that come from config.json.
implying = made_and_read = read_by


def derived(write: Callable[[Facts], Iterator[KV]]) -> Keys:
    """Declares keys that determine nothing in config.json: they follow from others, or never change."""
    return Keys(write)


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of the file that a role's weight (and bias) becomes.

    `base` is its name, in `blk.N.<base>.weight`; None is that of the shared table. A base with `{layer}` in
    it is the whole stem, and `suffix` replaces `.weight` and `.bias`. `change` is the transform of the rows;
    one that takes several rows at once is given `block` of them. `rows` gives the ranges of rows that are
    written, in their new order; None is all. `factor` is the number that rows are scaled by, `segments` those
    of so many rows each; `groups` the numbers of groups of columns, and of groups in each, whose order is
    swapped. `shape` is the shape of the tensor where it is not that of the weight.
    """

    base: str | None = None
    change: TransformKind | None = None
    block: Callable[[Facts], int] | None = None
    rows: Callable[[Facts], Iterable[range]] | None = None
    factor: Callable[[Facts], float] | None = None
    segments: Callable[[Facts], tuple[tuple[int, float], ...]] | None = None
    groups: Callable[[Facts], tuple[int, int]] | None = None
    shape: Callable[[Facts], tuple[int, ...]] | None = None
    suffix: str | None = None


NOT_WRITTEN: tuple[Written, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that the loader wants and the graph never reads: that of another layer stands for it."""

    role: str
    source: int
    layer: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A float32 vector of the file that comes from config.json: `values`, or the factors of `rope`."""

    name: str
    values: tuple[float, ...] = ()
    rope: RopeFactors | None = None


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """What `quant.llama3_rope` computes the factors of a rotary embedding from.

    `head_dim` are the dimensions that are rotated; the vector has room for a head of `room`, filled with 1.
    """

    head_dim: int
    theta: float
    scaling: Llama3Scaling
    room: int = 0


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """llama.cpp's declaration of a model type.

    `arch` is `general.architecture`. `keys` yield the architecture's metadata in the order of llama.cpp's
    converter, `late` what it adds after the file type. `defaults` are those of transformers' config class.
    `roles` declare how a role is written where it is not simply copied under the name of the shared table: as
    one tensor, as several, or not at all (`NOT_WRITTEN`). Fused linears are unfused, except the roles in
    `whole`, whose members are concatenated. `products` are pairs of roles, a vector and a row as long, that
    are multiplied, by the role that the product is written as. `stacks` are roles outside the layers whose
    weights make one 3-D tensor, by the role that it is written as. `constants` are tensors that no weight
    holds, `copies` those that nothing reads. `head` is what
    llama.cpp does about `output.weight`: uses the embedding when it is missing, refuses such a file, or never
    reads one. `checks` return the reason why llama.cpp's graph would not compute what config.json says,
    `remarks` what the user should know about a file that is written all the same. `special` gives special
    tokens of the vocabulary by their text ("eot": "<|user|>"). `types` gives tensors that are not of the
    usual type by name: the file type for which that holds ("" for all), and the type. `kind` is
    `general.type`. `variant` returns the declaration for one config, where it depends on more than the
    type; `variants` are those of other architectures that it may return.
    """

    arch: str
    keys: tuple[Keys, ...]
    late: tuple[Keys, ...] = ()
    defaults: Json = field(default_factory=dict)
    roles: Mapping[str, Written | tuple[Written, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    products: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copies: Callable[[Facts], Iterable[Copy]] | None = None
    constants: BothWays[Iterator[Constant]] | None = None
    head: Head = "optional"
    checks: tuple[Check, ...] = ()
    remarks: tuple[Check, ...] = ()
    special: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    kind: str = "model"
    variant: Callable[[Json], GGUFModel] | None = None
    variants: tuple[GGUFModel, ...] = ()

    def of_arch(self, arch: str) -> GGUFModel | None:
        """Returns the declaration of files of this architecture: this one, a variant, or None."""
        return next((model for model in (self, *self.variants) if model.arch == arch), None)

    def written(self, role: str) -> tuple[Written, ...]:
        """Returns the tensors that the weights of a role become."""
        found = self.roles.get(role, _AS_IT_IS)
        return (found,) if isinstance(found, Written) else found


_AS_IT_IS = Written()


class NoGraph(str):
    """Why a model type cannot be a GGUF file: the sentence that the user reads."""


def refuse_other_models(facts: Facts) -> None:
    """Raises UnsupportedModel if llama.cpp would load the model but compute something else."""
    for check in facts.model.checks:
        why = check(facts)
        if why is not None:
            raise UnsupportedModel(
                f"config.json: {why}",
                "the GGUF would load and compute another model; keep this one in safetensors",
            )
