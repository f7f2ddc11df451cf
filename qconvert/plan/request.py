"""Defines the request of a writing command: one value for every command and container."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches

from qconvert.core.dtypes import DType, Json
from qconvert.core.ggml_types import GGMLType
from qconvert.core.statistics import StatisticsSource
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.plan.passes.transcode import Target
from qconvert.plan.recipe import Recipe

# Who may ask; manifests and events record the name.
COMMANDS = (
    "quantize", "convert", "dequantize", "to-gguf", "from-gguf",
    "fuse", "fuse-qkv", "unfuse", "tie", "untie", "merge",
)  # fmt: skip
# The file type that keeps the codes, or the numbers, of every tensor.
KEEP = "keep"


@dataclass(frozen=True, slots=True)
class GGUFTarget:
    """A GGUF file to be written; the fields are llama-quantize's options, but for the file type `keep`.

    Without `fallback` a row that the chosen type's blocks do not divide is an error; only with
    `allow_requantize` is a weight quantized that already was. `undo_act_order` permutes columns in
    activation order into the weights before them (see `plan.passes.activation_order`). With `tower` it holds
    the vision tower and its projector, not the language model.
    """

    file_type: str
    tensor_types: tuple[tuple[str, GGMLType], ...] = ()
    token_embedding_type: GGMLType | None = None
    output_tensor_type: GGMLType | None = None
    pure: bool = False
    fallback: bool = True
    allow_requantize: bool = False
    undo_act_order: bool = False
    tower: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a writing command, which is one of COMMANDS: BadRecipe names another one.

    `recipe` says what to quantize, fuse and tie; `unfuse` (the roles of fused tensors to be cut) and
    `dequantize` undo; `dtype` casts plain float tensors and gives dequantized ones and new scales their
    type. `target` is the layout, or the GGUF file, that the weights are brought into; without one it is the
    recipe's layout, and where that is the default the source's is kept. `statistics` weigh the errors of
    new codes; with `scale_inputs`, the channels of inputs are scaled by them, too (AWQ). `chosen` is the
    record of what a target made of every weight, and at what price; it goes into the output as it is.
    """

    command: str
    recipe: Recipe = field(default_factory=Recipe)
    dtype: DType | None = None
    target: Target | GGUFTarget | None = None
    unfuse: tuple[str, ...] = ()
    dequantize: bool = False
    statistics: StatisticsSource | None = None
    scale_inputs: bool = False
    allow_unknown: bool = False
    allow_nonfinite: bool = False
    chosen: Json | None = None

    def __post_init__(self) -> None:
        """Aim at the recipe's layout where no target is named: a layout is not asked for in vain."""
        if self.command not in COMMANDS:
            near = get_close_matches(self.command, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"commands that write: {', '.join(COMMANDS)}"
            raise BadRecipe(f"Request({self.command!r}): no command has this name", hint)
        if self.target is None and self.recipe.layout != registry.DEFAULT:
            object.__setattr__(self, "target", Target(self.recipe.layout))

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.target, GGUFTarget)

    @property
    def undo_act_order(self) -> bool:
        return self.target is not None and self.target.undo_act_order

    @property
    def allow_requantize(self) -> bool:
        return self.target is not None and self.target.allow_requantize

    @property
    def layout_target(self) -> Target | None:
        """The safetensors layout that is asked for, if any."""
        return self.target if isinstance(self.target, Target) else None
