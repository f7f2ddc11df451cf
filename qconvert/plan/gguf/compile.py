"""From a checkpoint and a file type to the plan of a GGUF file: names, row order, types.

Data flow: copy every tensor; drop a head equal to its embedding; write every role as its model's
declaration says (`plan.gguf.tensors`); choose a type for every tensor; encode. Pure, except for comparing a
stored head with the embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook, GgmlBlocks, ModelTensor, Unquantized
from qconvert.core.ggml_types import GGMLType
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.models import Architecture, Binding
from qconvert.models.gguf.declaration import Facts, Head
from qconvert.models.gguf.families import facts_of, remarks_on
from qconvert.models.gguf.keys import model_keys
from qconvert.models.gguf.names import FACTOR
from qconvert.ops.transcode import TakeFactor
from qconvert.plan import plan as passes
from qconvert.plan.compile import Compare, check_plain_weights
from qconvert.plan.gguf.encodings import give_types, is_mxfp4, own_types
from qconvert.plan.gguf.mixture import Choice, FileType, MixFacts, choose_types, find_file_type, visit_order
from qconvert.plan.gguf.tensors import constants_of, write_roles
from qconvert.plan.passes import activation_order
from qconvert.plan.passes.activation_order import ColumnGroups
from qconvert.plan.plan import Plan, Unit

# The wish that every tensor keeps its codes, or its numbers, and the reason for the type it then has.
KEEP, KEPT = "keep", "kept"
# Architectures whose graphs multiply by the factors of weights, by llama.cpp's logits; qwen2's are NaN.
_WITH_FACTORS = frozenset({"llama", "qwen3"})


@dataclass(frozen=True, slots=True)
class GGUFWish:
    """What `to-gguf` asks for; the fields are llama-quantize's options, but for the file type KEEP.

    `importance` holds mean squared activations of the input columns by GGUF name. Without
    `fallback` a row that the chosen type's blocks do not divide is an error; only with
    `allow_requantize` is a weight quantized that already was. `undo_act_order` folds columns in activation
    order into the weights before them (see `plan.passes.activation_order`).
    """

    file_type: str
    tensor_types: tuple[tuple[str, GGMLType], ...] = ()
    token_embedding_type: GGMLType | None = None
    output_tensor_type: GGMLType | None = None
    pure: bool = False
    fallback: bool = True
    importance: Mapping[str, Sequence[float]] | None = None
    allow_requantize: bool = False
    allow_nonfinite: bool = False
    undo_act_order: bool = False


@dataclass(frozen=True, slots=True)
class GGUFDraft:
    """The plan of a GGUF file, the reason for each type, and tensors that come from no weight."""

    plan: Plan
    facts: Facts
    file_type: FileType
    choices: Mapping[str, Choice]
    constants: Mapping[str, np.ndarray]
    warnings: tuple[str, ...]

    @property
    def tensors(self) -> list[ModelTensor]:
        """All tensors of the file, in the order of the tool that would have written it last.

        The converter keeps the source's order, llama-quantize sorts.
        """
        constants = {
            n: ModelTensor(n, values.shape, Unquantized(DType.F32)) for n, values in self.constants.items()
        }
        found = constants | self.plan.outputs
        return [found[n] for n in (visit_order(found) if self.file_type.base.is_quantized else found)]

    @property
    def reordered(self) -> list[str]:
        """Names in the source of the tensors whose rows or columns are in another order than there."""
        return [unit.inputs[0].tensor.name for unit in self.plan.units if activation_order.reordered(unit)]

    @property
    def substituted(self) -> list[str]:
        """Names of the tensors that got a bigger type because blocks do not divide their rows."""
        return [name for name, choice in self.choices.items() if "divide" in choice.reason]


def draft_gguf(
    binding: Binding, wish: GGUFWish, compare: Compare, groups_of: ColumnGroups | None = None
) -> GGUFDraft:
    """The plan that writes a checkpoint as GGUF. Raises BadRecipe or UnsupportedModel for a model or
    a wish that llama.cpp could not load.
    """
    facts = facts_of(binding.architecture)
    check_plain_weights(binding)
    beside, left_out = _beside(binding)
    head, warnings = _head(binding, facts, compare)
    plan = passes.run_passes(passes.copy_of(binding), [*beside, *head])
    if wish.undo_act_order and groups_of:
        plan = _in_sequence(plan, binding.architecture, wish, groups_of)
    plan = write_roles(plan, facts)
    wish, choices = _kept(plan, facts, wish) if wish.file_type == KEEP else (wish, _choose(plan, facts, wish))
    types = {name: choice.type for name, choice in choices.items()}
    importance = _importance(plan, wish)
    plan = _as_stored(plan, binding)
    plan = give_types(types, importance, allow_requantize=wish.allow_requantize)(plan)
    plan = _with_factors(plan, facts)
    if not wish.allow_nonfinite:
        plan = passes.check_finite(plan)
    file_type = find_file_type(wish.file_type)
    told = (*left_out, *warnings, *remarks_on(facts))
    return GGUFDraft(plan, facts, file_type, choices, constants_of(facts), told)


def _in_sequence(plan: Plan, architecture: Architecture, wish: GGUFWish, groups_of: ColumnGroups) -> Plan:
    plan, refused, folded = activation_order.undo(plan, architecture, groups_of)
    if not refused and not folded:
        raise activation_order.nothing_to_undo()
    if refused and not wish.allow_requantize:
        raise activation_order.complain(refused, folded, "gguf")
    moved = (unit.output.name for unit in plan.units if activation_order.reordered(unit))
    parameters = (architecture.parameter(name) for name in moved)
    expert = next(
        (parameter.name for parameter in parameters if parameter and ".experts." in parameter.role), None
    )
    if expert is not None:
        raise BadRecipe(
            f"{expert}: each expert has an activation order of its own, and GGUF has one tensor for all",
            "--scheme TYPE --allow-requantize, without --undo-act-order",
        )
    return plan


def _beside(binding: Binding) -> tuple[list[passes.Pass], list[str]]:
    """Leaves out what is not of the language model: a vision tower has a file of its own in llama.cpp."""
    parts = {name: binding.architecture.carries(name) for name in binding.unknown}
    strange = next((name for name, what in parts.items() if what is None), None)
    if strange is not None:
        raise UnsupportedModel(f"{strange}: GGUF has no name for it", "remove the tensor")
    counts = Counter(what for what in parts.values() if what is not None)
    why = "left out; the GGUF holds the language model"
    said = [f"{what}: {n} tensor{'s are' if n > 1 else ' is'} {why}" for what, n in counts.items()]
    return [passes.drop(name) for name in parts], said


def _head(binding: Binding, facts: Facts, compare: Compare) -> tuple[list[passes.Pass], tuple[str, ...]]:
    """What to do about the head of a tied model: llama.cpp reads an `output.weight` if there is one."""
    architecture, want = binding.architecture, facts.model.head
    embed, head = architecture.table("embed"), architecture.table("lm_head")
    if embed is None or head is None:
        return [], ()
    if not architecture.tied and want == "tied":
        raise UnsupportedModel(
            f"{head.name}: a head of its own, which llama.cpp's {facts.model.arch} never reads",
            "the GGUF would not load; keep this model in safetensors",
        )
    if head.name not in binding.tensors:
        return ([passes.untie(embed.name, head.name)] if want == "required" else []), ()
    if not architecture.tied:
        return [], ()
    difference = compare(binding.tensors[embed.name], binding.tensors[head.name])
    return _stored_head(embed.name, head.name, want, equal=difference.equal_count == difference.count)


def _stored_head(
    embed: str, head: str, want: Head, *, equal: bool
) -> tuple[list[passes.Pass], tuple[str, ...]]:
    """What to do about a stored head that config.json ties to the embedding."""
    if not equal:
        differing = f"{head}: stored, and differs from {embed} although config.json ties them"
        if want == "tied":
            return [passes.drop(head)], (f"{differing}; left out, as llama.cpp uses the embedding",)
        return [], (f"{differing}; kept, as llama.cpp uses it",)
    if want == "required":
        return [], ()
    return [passes.drop(head)], (f"{head}: equals {embed}; written once",)


def _choose(plan: Plan, facts: Facts, wish: GGUFWish) -> dict[str, Choice]:
    kept = [] if wish.allow_requantize else [n for n, t in plan.outputs.items() if is_mxfp4(t.encoding)]
    return choose_types(
        wish.file_type,
        [(name, tensor.shape) for name, tensor in plan.outputs.items()],
        MixFacts.of(facts.model.arch, model_keys(facts)),
        imatrix=wish.importance is not None,
        pure=wish.pure,
        overrides=wish.tensor_types,
        stored={name: GGMLType["MXFP4"] for name in kept},
        token_embedding_type=wish.token_embedding_type,
        output_tensor_type=wish.output_tensor_type,
        fallback=wish.fallback,
    )


def _kept(plan: Plan, facts: Facts, wish: GGUFWish) -> tuple[GGUFWish, dict[str, Choice]]:
    """The types that keep every tensor as it is, and the wish with the file type that they make."""
    plain = _choose(plan, facts, replace(wish, file_type="F32"))
    f32 = GGMLType.F32
    always = {n: f32 for n, c in plain.items() if c.type is f32 and c.reason != "base type"}
    file_type, types = own_types(plan, always, allow_requantize=wish.allow_requantize)
    choices = {name: Choice(types[name], plain[name].reason if name in always else KEPT) for name in plain}
    return replace(wish, file_type=file_type), choices


def _with_factors(plan: Plan, facts: Facts) -> Plan:
    """The plan with a tensor more for every NVFP4 weight whose scales have one divisor: its inverse."""
    units: list[Unit] = []
    for unit in plan.units:
        units.append(unit)
        source = unit.inputs[0].tensor.encoding
        carried = isinstance(unit.output.encoding, GgmlBlocks) and unit.output.encoding.type == "NVFP4"
        if not (carried and isinstance(source, Codebook) and source.second == "divided"):
            continue
        if facts.model.arch not in _WITH_FACTORS:
            raise BadRecipe(
                f"{unit.inputs[0].tensor.name}: {source.label}, and llama.cpp's {facts.model.arch} is not "
                "known to multiply by the number that its scales are divided by",
                "--scheme TYPE --allow-requantize computes the numbers and quantizes them again",
            )
        name = f"{unit.output.name.rsplit('.', 1)[0]}.{FACTOR}"
        first = (unit.inputs[0].within(0, 1),)
        units.append(Unit(first, (TakeFactor(),), ModelTensor(name, (1,), Unquantized(DType.F32))))
    return replace(plan, units=tuple(units))


def _importance(plan: Plan, wish: GGUFWish) -> dict[str, Sequence[float]]:
    """The importance of every output's columns, where there is one, held against their number."""
    found = {}
    for name, tensor in plan.outputs.items():
        values = (wish.importance or {}).get(name)
        columns = tensor.width * (tensor.shape[0] if len(tensor.shape) > 2 else 1)
        if values is not None and len(values) == columns:
            found[name] = values
        elif values is not None and name != "token_embd.weight":  # which llama-quantize lets pass
            raise BadRecipe(
                f"{name}: the importance matrix has {len(values)} columns for it, the model {columns}",
                "give one that llama-imatrix measured on this model",
            )
    return found


def _as_stored(plan: Plan, binding: Binding) -> Plan:
    """Units in the order of the source; a stack of experts where the last of them lies."""
    position = {name: i for i, name in enumerate(binding.tensors)}
    return replace(
        plan, units=tuple(sorted(plan.units, key=lambda u: max(position[s.tensor.name] for s in u.inputs)))
    )
