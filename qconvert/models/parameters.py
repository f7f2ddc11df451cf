"""Defines what an architecture is declared with: parameter templates, dimensions, fusions, families.

A template is one kind of tensor in the model's printed structure; its shape is given in named dimensions,
which the family computes from config.json for every layer. A template with a dimension of zero does not exist
in that layer: so layer-wise scaled models, mixtures of dense and sparse layers and hybrids need no special
case. Encodings and bytes never appear here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from qconvert.core.dtypes import Json

ParameterKind = Literal["linear", "embedding", "norm", "router", "bias", "other"]
Dimensions = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ParameterTemplate:
    """One row of a family's table: a module that owns a weight and perhaps a bias.

    `module` is the HF module name; `{layer}` and `{expert}` in it are numbered. `shape` names the dimensions
    of the weight as stored. `bias` is True, False or the config flag that decides. Only `linear` templates
    are quantized unless a rule selects more. `only_if` names a dimension that must be non-zero (per layer)
    for the tensor to exist there, besides those of the shape. `suffix` follows the module in the weight's
    name, "" for a parameter that is no module of its own. `transposed` marks linears stored input-major, [in,
    out], as GPT-2's Conv1D does: the shape of a 2-D one is declared [out, in] all the same, that of a stack
    of experts as it is stored.
    """

    role: str
    module: str
    shape: tuple[str, ...]
    kind: ParameterKind = "linear"
    bias: bool | str = False
    only_if: str | None = None
    suffix: str = ".weight"
    transposed: bool = False

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.module

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.module


@dataclass(frozen=True, slots=True)
class Fusion:
    """Linears that read the same input and may be stored as one: rows concatenated in this order.

    With `groups`, the name of a dimension, the members are interleaved: the fused tensor is that many groups,
    each with its share of every member in turn (q of one group, its k, its v, then the next group). With
    `{expert}` in `members`, it is a 3-D stack [experts, rows, columns], and a stack of biases one vector.
    `interleaved` members are two, whose rows alternate in each expert's rows. `native` is True if the
    family's own class stores and computes with the fused tensor. `suffix` and `transposed` are as in a
    template; `bias_suffix` follows the module in the name of a bias. `layout` names the one layout whose
    files hold the fused tensor, "" where any may.
    """

    role: str
    module: str
    members: tuple[str, ...]
    groups: str | None = None
    native: bool = False
    suffix: str = ".weight"
    interleaved: bool = False
    transposed: bool = False
    bias_suffix: str = ".bias"
    layout: str = ""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.members[0]

    @property
    def part_groups(self) -> tuple[str, ...]:
        """The roles of the members as selectors and tables know them, all experts together."""
        return tuple(part.replace("{expert}.", "") for part in self.members)


@dataclass(frozen=True, slots=True)
class ScalePair:
    """What makes an input channel by channel, and every weight that reads it.

    Channels of `source` may be divided by positive numbers and the columns of `readers` multiplied by them:
    the model computes the same. `source` is the role of a norm, or of a linear whose outputs reach the
    readers as they are or times something else. A pair has those of the readers that the layer has and no
    earlier pair of the family does. Where the config sets one of the keys in `unless`, something else comes
    between, and there is no pair.
    """

    source: str
    readers: tuple[str, ...]
    unless: tuple[str, ...] = ()

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.source


@dataclass(frozen=True, slots=True)
class Family:
    """The declaration of models built alike.

    `model_types` are the config.json `model_type` values; `classes` the class names in `architectures`.
    `slots` are the templates in the order of the printed structure: each run of per-layer templates is a
    stack of layers, counted by the config keys in `layers`. `dimensions(config, layer)` returns every
    dimension named in `slots`, and `named_by` gives the config keys a dimension comes from, for error
    messages. `keys` maps config keys of the shared code to this family's (`{"hidden_size": "n_embd"}`);
    `defaults` are the class's values for keys that a config may leave out.

    `spellings` are naming variants in checkpoints, each a table of replacements. `ignored` are regular
    expressions of stored tensors that carry no information (they are dropped), `carried` those of tensors
    outside the language model (they are copied) with what they belong to; `{layers}` in them is the
    number of layers, `{later}` any of the next few. `layer_list` is the config key of a list with an
    entry for each layer, which counts them where no number does. `tied_by` is the config key that ties
    the head to the embedding. `note` is a remark for the table of supported models. `guess` states what
    was assumed of an undeclared family, and `open` what its structure leaves open. `mlx_experts` is the
    module in which mlx-lm's class holds the experts of a layer. `scale_pairs` are the inputs whose
    channels may be scaled, each channel in one pair at most; `norm_offset` is added to the weights of
    norms (Gemma's 1). `tower` declares what stands beside the language model and is carried, for
    counting.
    """

    name: str
    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    slots: tuple[ParameterTemplate, ...]
    dimensions: Callable[[Json, int], Dimensions]
    named_by: Mapping[str, str]
    fusions: tuple[Fusion, ...] = ()
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    layer_list: str = ""
    spellings: tuple[Mapping[str, str], ...] = ()
    carried: Mapping[str, str] = field(default_factory=dict)
    tied_by: str = "tie_word_embeddings"
    note: str = ""
    guess: str = ""
    open: tuple[str, ...] = ()
    mlx_experts: str = "switch_mlp"
    scale_pairs: tuple[ScalePair, ...] = ()
    norm_offset: float = 0.0
    tower: Family | None = None

    @property
    def mlx_stacks(self) -> tuple[Fusion, ...]:
        """The experts of a layer in mlx-lm's files: a stack for each projection (`SwitchGLU`)."""
        stacks = []
        for slot in filter(lambda slot: slot.per_expert, self.slots):
            before, role = slot.module.split("experts.{expert}")[0], slot.role.replace("{expert}.", "")
            module = f"{before}{self.mlx_experts}.{role.rsplit('.', 1)[1]}_proj"
            stacks.append(Fusion(role, module, (slot.role,), layout="mlx"))
        return tuple(stacks)

    def slot(self, role: str) -> ParameterTemplate:
        """Returns the template of this role, which must be declared."""
        return next(slot for slot in self.slots if slot.role == role)
