"""From a checkpoint and a wish to a plan and the config.json that goes with it.

This is the one place where the writing commands differ: each is a wish, and `plan.compile` turns it into
passes over the plan. Nothing is read but names and shapes, except to compare a stored head with
the embedding it is said to equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import GgmlBlocks, ModelTensor, Quantized, Unquantized
from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel
from qconvert.models import Architecture, Binding, FusedParameter
from qconvert.plan import plan as passes
from qconvert.plan.loader_notices import Notice, notices
from qconvert.plan.passes import activation_order, tensor_parallel_padding
from qconvert.plan.passes.activation_order import ColumnGroups
from qconvert.plan.passes.expert_stacks import Folds, as_the_class_stores, parameters_of, relaid
from qconvert.plan.passes.transcode import Target
from qconvert.plan.plan import Plan
from qconvert.plan.recipe import FUSIONS, Recipe
from qconvert.plan.selectors import choose, decide

if TYPE_CHECKING:
    from qconvert.quant.casts import Difference

# Compares two tensors of the source by name; given by the caller, who can read.
Compare = Callable[[ModelTensor, ModelTensor], "Difference"]
# What config.json says about modules of these forms and about the linears left out.
ConfigWriter = Callable[[Mapping[str, Quantized], list[str]], Json]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a writing command asks for.

    `plan.recipe` says what to quantize, fuse and tie; `unfuse` (the roles of fused tensors to be taken apart)
    and `dequantize` undo; `dtype` casts
    plain float tensors and gives dequantized ones and new scales their type; `target` is a layout
    that quantized weights are brought into.
    """

    command: str
    recipe: Recipe
    dtype: DType | None = None
    target: Target | None = None
    unfuse: tuple[str, ...] = ()
    dequantize: bool = False
    allow_unknown: bool = False
    allow_nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan, its config.json, and what the user should hear before the work starts."""

    plan: Plan
    architecture: Architecture
    config: Json
    warnings: tuple[str, ...]
    notices: tuple[Notice, ...]


def draft(
    binding: Binding,
    wish: Wish,
    compare: Compare,
    write_config: ConfigWriter,
    groups_of: ColumnGroups | None = None,
    folds: Folds | None = None,
) -> Draft:
    """The plan that fulfils a wish, with the config of its output. Raises BadRecipe for a wish that
    contradicts the model, and CorruptCheckpoint for tensors that contradict its config.
    """
    architecture, recipe = binding.architecture, wish.recipe
    check_plain_weights(binding)
    tie = Ties(binding, recipe.tie, compare)
    plan = passes.run_passes(passes.copy_of(binding), [*tie.passes, passes.resolve_scales])
    if wish.dequantize:
        plan = as_the_class_stores(plan, architecture)
    if wish.unfuse:
        plan = _unfused(plan, architecture, wish.unfuse)
    if wish.dequantize:
        plan = _dequantized(plan, wish)
    orders_kept: list[str] = []
    if wish.target and wish.target.undo_act_order and groups_of:
        plan, orders_kept = _in_sequence(plan, architecture, wish.target, groups_of)
    grown: tuple[tensor_parallel_padding.Growth, ...] = ()
    if recipe.pad_to_tp is not None:
        grown = _growths(binding, wish, plan, tied=tie.tied)
        architecture = tensor_parallel_padding.grown(before := architecture, grown)
        plan = tensor_parallel_padding.pad(before, architecture)(plan)
    if recipe.fuse:
        plan = _fused(plan, architecture, recipe)
    if wish.dtype is not None:
        plan = passes.cast(wish.dtype)(plan)
    if recipe.scheme is not None or recipe.rules:
        scale_dtype = wish.target.traits.scale_dtype if wish.target else None
        plan = _quantized(plan, architecture, recipe, tied=tie.tied, scale_dtype=scale_dtype)
    if wish.target:
        plan = relaid(plan, architecture, wish.target, folds)
    _refuse_blocks(plan)
    if not wish.allow_nonfinite:
        plan = passes.check_finite(plan)
    config = _config(binding, architecture, wish, plan, tied=tie.tied, write_config=write_config)
    warnings = [
        *([architecture.family.guess] if architecture.family.guess else []),
        *tie.warnings,
        *orders_kept,
        *(growth.sentence for growth in grown),
        *(f"{name}: a buffer the model recomputes; left out" for name in binding.dropped),
        *(_activations(architecture.config, config) if wish.target else []),
    ]
    return Draft(
        plan, architecture, config, tuple(warnings), tuple(notices(plan.outputs, architecture, recipe.layout))
    )


def _activations(before: Json, after: Json) -> list[str]:
    """What changes about activations when quantized weights go to another layout; weights are not all."""
    if not before.get("quantization_config") or _eight_bit_inputs(before) == _eight_bit_inputs(after):
        return []
    if _eight_bit_inputs(after):
        return ["config.json: loaders of this layout quantize activations to 8 bits, the source's do not"]
    return ["config.json: the source's loaders quantize activations to 8 bits, those of this layout do not"]


def _eight_bit_inputs(config: Json) -> bool:
    """Whether a config makes loaders multiply 8-bit activations, scaled as they come."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return False
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    inputs = any(isinstance(group, dict) and group.get("input_activations") for group in listed)
    return bool(inputs or settings.get("activation_scheme") or settings.get("load_in_8bit"))


def check_plain_weights(binding: Binding) -> None:
    """Raise UnsupportedModel for a weight of integers or 8-bit floats that nothing scales."""
    for name in binding.parameters:
        encoding = binding.tensors[name].encoding
        if isinstance(encoding, Unquantized) and not encoding.dtype.is_float:
            raise UnsupportedModel(
                f"{name}: stored as {encoding.dtype.label} without scales or a quantization_config",
                "qconvert reads 16-, 32- and 64-bit float weights and compressed-tensors integers",
            )


class Ties:
    """Whether the output's head is its embedding, and the passes that make it so."""

    def __init__(self, binding: Binding, tie: bool | None, compare: Compare) -> None:
        architecture = binding.architecture
        self.tied = architecture.tied if tie is None else tie
        self.passes: list[passes.Pass] = []
        self.warnings: list[str] = []
        embed, head = _table_names(architecture)
        stored = head in binding.tensors
        if architecture.tied and tie is None and not stored:
            return
        if self.tied and stored:
            self._drop_equal_head(binding, embed, head, compare)
        elif self.tied and not architecture.tied:
            raise BadRecipe(
                f"{head}: not stored, so there is nothing to tie", "fetch the shard that holds it"
            )
        elif self.tied and tie:
            raise BadRecipe(
                "config.json: the head is already tied to the embedding", "use the model as it is"
            )
        elif tie is False and not architecture.tied:
            raise BadRecipe("config.json: the head is already a table of its own", "use the model as it is")
        elif tie is False and not stored:
            self.passes.append(passes.untie(embed, head))

    def _drop_equal_head(self, binding: Binding, embed: str, head: str, compare: Compare) -> None:
        difference = compare(binding.tensors[embed], binding.tensors[head])
        if difference.equal_count != difference.count:
            raise CorruptCheckpoint(
                f"{head}: differs from {embed} in {difference.count - difference.equal_count} of "
                f"{difference.count} numbers (largest difference {difference.max_abs:.4g})",
                "keep both: `qconvert untie`, or --untie"
                if binding.architecture.tied
                else "leave them untied",
            )
        self.passes.append(passes.drop(head))
        if binding.architecture.tied:
            self.warnings.append(f"{head}: equals {embed}, to which config.json ties it; written once")


def _table_names(architecture: Architecture) -> tuple[str, str]:
    embed, head = architecture.table("embed"), architecture.table("lm_head")
    return embed.name if embed else "", head.name if head else ""


def _unfused(plan: Plan, architecture: Architecture, roles: Container[str]) -> Plan:
    def chosen(entry: FusedParameter) -> bool:
        return entry.fusion.role in roles and not entry.fusion.layout

    entries = [architecture.fused[name] for name in plan.outputs if name in architecture.fused]
    if not any(chosen(entry) for entry in entries):
        if entries and all(entry.fusion.layout for entry in entries):
            raise BadRecipe(
                f"{entries[0].whole.name}: {entries[0].fusion.layout} holds experts in such stacks alone",
                "convert --to another layout, or to bf16, takes them apart",
            )
        raise BadRecipe("no fused linears in this checkpoint", "`qconvert inspect` shows what it holds")
    return passes.cut_where(architecture, chosen)(plan)


def _in_sequence(
    plan: Plan, architecture: Architecture, target: Target, groups_of: ColumnGroups
) -> tuple[Plan, list[str]]:
    """The plan with every activation order undone that can be, and what to say about the others."""
    plan, refused, folded = activation_order.undo(plan, architecture, groups_of)
    if not refused and not folded:
        raise activation_order.nothing_to_undo()
    if not refused:
        return plan, []
    if target.traits.act_order:
        total = len(refused) + folded
        return plan, [
            f"{len(refused)} of {total} weights keep their g_idx:\n{activation_order.by_reason(refused)}"
        ]
    if not target.allow_requantize:
        raise activation_order.complain(refused, folded, target.layout)
    return plan, []


def _growths(
    binding: Binding, wish: Wish, plan: Plan, *, tied: bool
) -> tuple[tensor_parallel_padding.Growth, ...]:
    """How far the inner sizes grow for the forms that the output's weights will have."""
    architecture, target, ranks = binding.architecture, wish.target, wish.recipe.pad_to_tp
    assert ranks is not None
    encodings = tensor_parallel_padding.encodings_of_members(plan.outputs, architecture)
    parameters = {
        name: parameter for name in encodings if (parameter := architecture.parameters.get(name)) is not None
    }
    for name, scheme in choose(wish.recipe, architecture, parameters, tied=tied).items():
        encodings[name] = scheme.encoding(DType.F16)
    table = target.codebook.encoding(DType.BF16) if target and target.codebook else None
    for name, parameter in parameters.items():
        if table and parameter.kind == "linear" and isinstance(encodings[name], Unquantized):
            encodings[name] = table
    layout = target.layout if target else wish.recipe.layout
    return tensor_parallel_padding.growths(encodings, architecture, ranks, layout)


def _dequantized(plan: Plan, wish: Wish) -> Plan:
    """The plan in plain numbers, which `dequantize` finds some of that are not."""
    plain = all(isinstance(t.encoding, Unquantized) for t in plan.outputs.values())
    if plain and wish.command != "convert":
        raise BadRecipe("no quantized tensors in this checkpoint", "`qconvert inspect` shows what it holds")
    return passes.dequantize(wish.dtype)(plan)


def _refuse_blocks(plan: Plan) -> None:
    """GGML blocks are GGUF's; nothing else holds them."""
    kept = next((t for t in plan.outputs.values() if isinstance(t.encoding, GgmlBlocks)), None)
    if kept is not None:
        raise BadRecipe(
            f"{kept.name}: {kept.encoding.label} blocks, which safetensors files do not hold",
            "`qconvert from-gguf` computes the numbers they stand for",
        )


def _fused(plan: Plan, architecture: Architecture, recipe: Recipe) -> Plan:
    wanted = {role for name in recipe.fuse for role in FUSIONS[name]}
    fused = passes.fuse(architecture, wanted)(plan)
    if len(fused.units) == len(plan.units) and recipe.scheme is None:
        if not any(entry.fusion.role in wanted for entry in architecture.fused.values()):
            raise BadRecipe(
                f"{architecture.family.name}: no linears that could be stacked ({' and '.join(recipe.fuse)})",
                "this family has none; `qconvert inspect` lists its linears",
            )
        raise BadRecipe(
            f"nothing left to fuse ({' and '.join(recipe.fuse)})",
            "this checkpoint is already fused; `qconvert unfuse` takes it apart",
        )
    return fused


def _quantized(
    plan: Plan, architecture: Architecture, recipe: Recipe, *, tied: bool, scale_dtype: DType | None
) -> Plan:
    quantized = next((t for t in plan.outputs.values() if not isinstance(t.encoding, Unquantized)), None)
    if quantized is not None:
        raise BadRecipe(
            f"{quantized.name}: already quantized ({quantized.encoding.label}); doing it again would "
            "lose twice",
            "start from the 16-bit model, or run `qconvert dequantize` first and accept the second loss",
        )
    plan = passes.unstack(architecture)(plan)
    schemes = decide(recipe, architecture, parameters_of(plan, architecture), tied=tied)
    return passes.quantize(schemes, search=recipe.search, scale_dtype=scale_dtype)(plan)


def _config(
    binding: Binding,
    architecture: Architecture,
    wish: Wish,
    plan: Plan,
    *,
    tied: bool,
    write_config: ConfigWriter,
) -> Json:
    """The source's config.json with the keys that the output changes; no other key is touched.

    `models` is that of the output.
    """
    config: dict[str, Any] = copy.deepcopy(dict(architecture.config))
    if tied != binding.architecture.tied:
        config[binding.architecture.family.tied_by] = tied
    if wish.dtype is not None:
        for key in {"torch_dtype", "dtype"} & set(config) or {"torch_dtype"}:
            config[key] = TORCH_NAMES[wish.dtype]
    for key in ("quantization_config", "quantization"):
        config.pop(key, None)
    outputs = plan.outputs
    quantized = {_module(n): t.encoding for n, t in outputs.items() if isinstance(t.encoding, Quantized)}
    if quantized:
        linears = [
            p
            for p in parameters_of(plan, architecture).values()
            if p.kind != "embedding" and p.param == "weight" and len(p.shape) == 2
        ]
        kept = [p.module for p in linears if p.module not in quantized]
        kept += [_module(name) for name in binding.unknown if len(outputs[name].shape) == 2]
        head = architecture.table("lm_head")
        if tied and head is not None:
            kept.append(head.module)
        config |= write_config(quantized, kept)
    return config


TORCH_NAMES = {DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}


def _module(name: str) -> str:
    return name.removesuffix(".weight")
