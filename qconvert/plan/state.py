"""Defines what the passes of the compiler pass on: the request, which stays, and the plan so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qconvert.core.activations import NO_SCALES, ScalesBeside
from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor
from qconvert.core.protocols import Layout
from qconvert.models import Architecture, Binding
from qconvert.models.scale_pairs import ScalableInput
from qconvert.plan.facts import SourceFacts
from qconvert.plan.loader_notices import Notice
from qconvert.plan.plan import Plan
from qconvert.plan.request import Request
from qconvert.plan.scales import ScaledInput

if TYPE_CHECKING:
    from qconvert.models.gguf.declaration import Facts
    from qconvert.plan.gguf.file_types import FileType
    from qconvert.plan.gguf.mixture import Choice


@dataclass(frozen=True, slots=True)
class GGUFPlan:
    """What a GGUF file holds besides the units' tensors.

    `facts` are the model as its declaration sees it, `choices` the type of every tensor and its reason.
    """

    facts: Facts
    file_type: FileType
    choices: Mapping[str, Choice]

    @property
    def substituted(self) -> list[str]:
        """Names of the tensors that got a bigger type because blocks do not divide their rows."""
        return [name for name, choice in self.choices.items() if choice.substituted]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan and everything that goes with it; the passes of `plan.compile` fill it in, one by one.

    `request`, `binding`, `facts` and `layout` are what was asked and what is known of the source;
    `architecture` is that of the output, `tied` whether its head is its embedding, `config` its
    config.json, `gguf` what a GGUF file has besides; `warnings` and `notices` are for the user. `scalable`
    are the inputs whose channels are to be scaled, `scaled` those that are, once the factors are chosen.
    `beside` are the scales that are stored beside the weights, `left_out` says which of the source's are not.
    """

    request: Request
    binding: Binding
    facts: SourceFacts
    layout: Layout
    plan: Plan
    architecture: Architecture
    tied: bool
    warnings: tuple[str, ...] = ()
    config: Json = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    gguf: GGUFPlan | None = None
    scalable: tuple[ScalableInput, ...] = ()
    scaled: tuple[ScaledInput, ...] = ()
    beside: ScalesBeside = NO_SCALES
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Compiled {self.request.command}: {self.plan!r}"

    @property
    def outputs(self) -> dict[str, ModelTensor]:
        return self.plan.outputs

    @property
    def is_gguf(self) -> bool:
        return self.request.is_gguf

    def with_plan(self, plan: Plan) -> Compiled:
        return replace(self, plan=plan)

    def warn(self, *warnings: str) -> Compiled:
        """This with more to tell the user before the work starts."""
        return replace(self, warnings=(*self.warnings, *warnings))


Pass = Callable[[Compiled], Compiled]
