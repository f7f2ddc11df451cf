"""From a checkpoint and a file type to the plan of a GGUF file: names, row order, types.

Data flow: copy every tensor; take fused linears apart; drop a head equal to its embedding; stack
experts; give GGUF names; put llama's query and key rows in llama.cpp's rotary order; choose a type
for every tensor; encode. Pure, except for comparing a stored head with the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from qconvert import plan as passes
from qconvert.architecture import Architecture, Binding, Place
from qconvert.architecture.gguf_keys import gguf_model, head_size, rope_factors
from qconvert.architecture.gguf_names import INTERLEAVED, ROPE_FREQS, gguf_name
from qconvert.draft import Compare, check_plain_weights
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.gguf_forms import give_types
from qconvert.gguf_mix import Choice, FileType, MixFacts, choose_types, find_file_type, visit_order
from qconvert.gguf_types import GGMLType
from qconvert.ops import InterleaveHalves
from qconvert.plan import Plan, Unit
from qconvert.tensors import DType, Logical, Plain


@dataclass(frozen=True, slots=True)
class GGUFWish:
    """What `to-gguf` asks for; the fields are llama-quantize's options.

    `importance` holds mean squared activations of the input columns by GGUF name. Without
    `fallback` a row that the chosen type's blocks do not divide is an error; only with
    `allow_requantize` is a weight quantized that already was.
    """

    file_type: str
    tensor_types: tuple[tuple[str, GGMLType], ...] = ()
    token_embedding_type: GGMLType | None = None
    output_tensor_type: GGMLType | None = None
    pure: bool = False
    fallback: bool = True
    importance: Mapping[str, tuple[float, ...]] | None = None
    allow_requantize: bool = False
    allow_nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class GGUFDraft:
    """The plan of a GGUF file, the reason for each type, and tensors that come from no weight."""

    plan: Plan
    architecture: Architecture
    file_type: FileType
    choices: Mapping[str, Choice]
    constants: Mapping[str, np.ndarray]
    warnings: tuple[str, ...]

    @property
    def tensors(self) -> list[Logical]:
        """All tensors of the file, in the order of the tool that would have written it last.

        The converter keeps the source's order, llama-quantize sorts.
        """
        constants = {n: Logical(n, values.shape, Plain(DType.F32)) for n, values in self.constants.items()}
        found = constants | self.plan.outputs
        return [found[n] for n in (visit_order(found) if self.file_type.base.is_quantized else found)]

    @property
    def substituted(self) -> list[str]:
        """Names of the tensors that got a bigger type because blocks do not divide their rows."""
        return [name for name, choice in self.choices.items() if "divide" in choice.reason]


def draft_gguf(binding: Binding, wish: GGUFWish, compare: Compare) -> GGUFDraft:
    """The plan that writes a checkpoint as GGUF. Raises BadRecipe or UnsupportedModel for a model or
    a wish that llama.cpp could not load.
    """
    architecture = binding.architecture
    arch = gguf_model(architecture.config).arch
    check_plain_weights(binding)
    if binding.unknown:
        raise UnsupportedModel(f"{binding.unknown[0]}: GGUF has no name for it", "remove the tensor")
    head, warnings = _head(binding, compare)
    plan = passes.run_passes(passes.copy_of(binding), [*head, passes.unfuse(architecture)])
    plan = _stack_experts(plan, architecture)
    places = {unit.output.name: _place(unit, architecture) for unit in plan.units}
    plan = passes.rename({n: gguf_name(p.group, p.layer, p.part) for n, p in places.items()})(plan)
    rotated = _rotated(places.values(), arch)
    plan = passes.apply_to(rotated, InterleaveHalves(head_size(architecture.config)))(plan)
    choices = _choose(plan, architecture, wish)
    types = {name: choice.type for name, choice in choices.items()}
    importance = _importance(plan, wish)
    plan = _as_stored(plan, binding)
    plan = give_types(types, importance, allow_requantize=wish.allow_requantize)(plan)
    if not wish.allow_nonfinite:
        plan = passes.check_finite(plan)
    file_type = find_file_type(wish.file_type)
    factors = rope_factors(architecture.config)
    constants = {} if factors is None else {ROPE_FREQS: factors}
    return GGUFDraft(plan, architecture, file_type, choices, constants, warnings)


def _head(binding: Binding, compare: Compare) -> tuple[list[passes.Pass], tuple[str, ...]]:
    """What to do about the head of a tied model: llama.cpp reads an `output.weight` if there is one."""
    architecture = binding.architecture
    embed, head = architecture.table("embed"), architecture.table("lm_head")
    if not architecture.tied or embed is None or head is None:
        return [], ()
    if head.name not in binding.tensors:
        needs_head = gguf_model(architecture.config).needs_head
        return ([passes.untie(embed.name, head.name)] if needs_head else []), ()
    found = compare(binding.tensors[embed.name], binding.tensors[head.name])
    if found.equal_count == found.count:
        return [passes.drop(head.name)], (f"{head.name}: equals {embed.name}; written once",)
    differing = f"{head.name}: stored, and differs from {embed.name} although config.json ties them"
    return [], (f"{differing}; kept, as llama.cpp uses it",)


def _place(unit: Unit, architecture: Architecture) -> Place:
    """The place of a unit's output; of a stack of experts, that of its first expert."""
    place = architecture.place(unit.output.name)
    assert place is not None, unit.output.name
    return place


def _rotated(places: Iterable[Place], arch: str) -> list[str]:
    roles = INTERLEAVED.get(arch, frozenset())
    return [gguf_name(p.role, p.layer, p.part) for p in places if p.role in roles]


def _stack_experts(plan: Plan, architecture: Architecture) -> Plan:
    """One 3-D tensor [experts, rows, columns] for each projection of a layer's experts."""
    made: dict[tuple[str, int | None], Unit] = {}
    for unit in plan.units:
        place = _place(unit, architecture)
        key = (place.group, place.layer) if place.group != place.role else (unit.output.name, None)
        first = made.get(key)
        if first is None:
            made[key] = unit
            continue
        if first.output.form != unit.output.form:
            raise BadRecipe(f"{unit.output.name}: not stored as {first.output.form.label} like its siblings")
        made[key] = replace(first, inputs=(*first.inputs, *unit.inputs))
    units = tuple(
        unit if len(unit.inputs) == 1 else replace(unit, output=_stacked(unit)) for unit in made.values()
    )
    return replace(plan, units=units)


def _stacked(unit: Unit) -> Logical:
    return replace(unit.output, shape=(len(unit.inputs), *unit.output.shape))


def _choose(plan: Plan, architecture: Architecture, wish: GGUFWish) -> dict[str, Choice]:
    config = architecture.config
    heads = int(config["num_attention_heads"])
    facts = MixFacts(
        arch=gguf_model(config).arch,
        n_layer=architecture.layers,
        n_head=heads,
        n_head_kv=int(config.get("num_key_value_heads") or heads),
        n_expert=int(config.get("num_experts") or config.get("num_local_experts") or 0),
    )
    return choose_types(
        wish.file_type,
        [(name, tensor.shape) for name, tensor in plan.outputs.items()],
        facts,
        imatrix=wish.importance is not None,
        pure=wish.pure,
        overrides=wish.tensor_types,
        token_embedding_type=wish.token_embedding_type,
        output_tensor_type=wish.output_tensor_type,
        fallback=wish.fallback,
    )


def _importance(plan: Plan, wish: GGUFWish) -> dict[str, tuple[float, ...]]:
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
                "it was measured on another model",
            )
    return found


def _as_stored(plan: Plan, binding: Binding) -> Plan:
    """Units in the order of the source; a stack of experts where the last of them lies."""
    position = {name: i for i, name in enumerate(binding.tensors)}
    return replace(
        plan, units=tuple(sorted(plan.units, key=lambda u: max(position[s.tensor.name] for s in u.inputs)))
    )
