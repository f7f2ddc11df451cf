"""Plans an undeclared model by its structure: a family of one model, made of its tensors.

Numbered layers, matrices and stacks of experts in them, linears that share an input, the table of tokens and
the head are told from names, shapes and config.json (`guess_evidence`). `Family.guess` is the account of what
was assumed, printed wherever the guess is used; `Family.open` what the structure leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor
from qconvert.errors import UnsupportedModel, shown
from qconvert.models.architecture import Architecture
from qconvert.models.family_of import HOW_TO_DECLARE
from qconvert.models.guess_evidence import (
    LAYER,
    Evidence,
    Found,
    Shapes,
    escaped,
    first_of,
    pattern_of,
    stack_of,
)
from qconvert.models.parameters import Dimensions, Family, Fusion, ParameterKind, ParameterTemplate

# Patterns times layers, per tensor: a larger ratio is no stack of layers, and expanding it costs time.
_SPARSE = 8
_LAYERS = "number of layers found"
_TIED_BY = "tie_word_embeddings"
_HEAD_WORDS = re.compile(r"\w*head|output|output_layer|embed_out|decoder|logits\w*|unembed\w*")
_TABLE_WORDS = re.compile(r"embed|wte|tok|word|shared")
# The names of linears that read one input, in the order in which they are stacked.
_TOGETHER = (
    ("attn.qkv", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("attn.qkv", "qkv_proj", ("wq", "wk", "wv")),
    ("attn.qkv", "qkv_proj", ("query", "key", "value")),
    ("mlp.gate_up", "gate_up_proj", ("gate_proj", "up_proj")),
    ("mlp.gate_up", "gate_up_proj", ("w1", "w3")),
    ("mlp.gate_up", "gate_up_proj", ("wi_0", "wi_1")),
)
_OTHER_INPUTS = re.compile(r"cross|encdec|encoder_attn|expert", re.IGNORECASE)
_DIGITS = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST_NAMED = 20
# A stack of gates and, behind them, of what they multiply.
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}


def guessed_family(config: Json, tensors: Mapping[str, ModelTensor]) -> Family:
    """Returns a family of one model, whose templates are its tensors."""
    model_type = config.get("model_type")
    evidence = Evidence.of(config, tensors)
    told = guess = _Guess(evidence, {pattern: evidence.found(pattern) for pattern in evidence.patterns})
    layers = 1 + max((n for s in evidence.patterns.values() for n in s if n is not None), default=0)
    if len(evidence.patterns) * layers > _SPARSE * (len(tensors) + layers):
        guess, layers = _one_by_one(evidence, tensors), 1
    return Family(
        name=f"not in the catalogue ({model_type})",
        model_types=(),
        classes=(),
        slots=tuple(guess.slots()),
        dimensions=guess.dimensions(),
        named_by={},
        fusions=(*guess.stacks(), *guess.shared_inputs()),
        layers=(_LAYERS,),
        defaults={_LAYERS: layers, _TIED_BY: guess.head is None and guess.table is not None},
        guess=f"model_type {model_type!r} is not in the catalogue, and is planned by its structure: "
        + told.account(),
        open=told.open,
    )


@dataclass(frozen=True)
class _Guess:
    """The role that every pattern of one model is assumed to have."""

    evidence: Evidence
    found: Mapping[str, Found]

    @property
    def table(self) -> str | None:
        """The pattern of the table of tokens, None where nothing looks like one."""
        return self._tables[0]

    @property
    def head(self) -> str | None:
        """The pattern of the head that is stored, if one is."""
        return self._tables[1]

    @cached_property
    def _tables(self) -> tuple[str | None, str | None]:
        sizes = [v for key, v in self.evidence.numbers.items() if key.endswith("vocab_size")]
        outer = {
            pattern: first_of(shapes)
            for pattern, shapes in self.evidence.patterns.items()
            if LAYER not in pattern and pattern.endswith(".weight")
        }
        tables = [
            p
            for p, shape in outer.items()
            if len(shape) == 2 and shape[1] == self.evidence.hidden and sizes and shape[0] >= max(sizes)
        ]
        heads = [p for p in tables if _HEAD_WORDS.fullmatch(p.split(".")[-2])]
        rest = [p for p in tables if p not in heads and "position" not in p]
        named = [p for p in rest if _TABLE_WORDS.search(p)]
        table = (named or rest)[0] if len(named or rest) == 1 else None
        return table, heads[0] if len(heads) == 1 and table else None

    @property
    def open(self) -> tuple[str, ...]:
        """What the structure does not say, in words; empty where it is unambiguous."""
        if not any(found.answer in ("linear", "stack") for found in self.found.values()):
            return ("no numbered layers with linears are in it",)
        uncounted = f"config.json does not say that there are {self.evidence.layers} layers"
        return (*(() if self.evidence.counted else (uncounted,)), *self._open_patterns)

    @property
    def _open_patterns(self) -> tuple[str, ...]:
        return tuple(
            f"{_plain(p)} {list(first_of(self.evidence.patterns[p]))}: {found.why}"
            for p, found in self.found.items()
            if found.answer == "open"
        )

    def slots(self) -> Iterator[ParameterTemplate]:
        """The templates: those outside the layers first, as `Architecture` walks one run of layers."""
        if self.table and not self.head:  # left out of the file, where config.json ties it
            shape = (f"{self.table} 0", f"{self.table} 1")
            yield ParameterTemplate("lm_head", "lm_head", shape, only_if=self.table)
        for inner in (False, True):
            for pattern, found in self.found.items():
                if (LAYER in pattern) != inner:
                    continue
                if found.answer == "stack":
                    yield from _templates(pattern, found)
                else:
                    yield self._slot(pattern, found)

    def _slot(self, pattern: str, found: Found) -> ParameterTemplate:
        module, suffix = _split(pattern)
        kind: ParameterKind = "linear" if found.answer == "linear" else "other"
        role = _role(module)
        if pattern in (self.table, self.head):
            kind, role = ("embedding", "embed") if pattern == self.table else ("linear", "lm_head")
        axes = range(len(first_of(self.evidence.patterns[pattern])))
        order = reversed(axes) if found.turned else axes
        return ParameterTemplate(
            role=role,
            module=module,
            shape=tuple(f"{pattern} {axis}" for axis in order),
            kind="bias" if pattern.endswith("bias") else kind,
            only_if=pattern,
            suffix=suffix,
            transposed=found.turned,
        )

    def stacks(self) -> Iterator[Fusion]:
        """The stacks of experts, as what each expert's linears are stacked to."""
        for pattern, found in self.found.items():
            if found.answer == "stack":
                module, suffix = _split(pattern)
                roles = tuple(slot.role for slot in _templates(pattern, found))
                yield Fusion(
                    _role(module), module, roles, native=True, suffix=suffix, transposed=found.turned
                )

    def shared_inputs(self) -> Iterator[Fusion]:
        """Linears beside one another whose names and widths say that they read the same."""
        for module in dict.fromkeys(p.removesuffix(".weight").rpartition(".")[0] for p in self.found):
            if LAYER not in module or _OTHER_INPUTS.search(module):
                continue
            for role, name, words in _TOGETHER:
                parts = [f"{module}.{word}.weight" for word in words]
                if all(self._is_linear(part) for part in parts) and self._one_input(parts):
                    roles = tuple(_role(f"{module}.{word}") for word in words)
                    if f"{module}.{name}.weight" not in self.found:
                        yield Fusion(role, f"{module}.{name}", roles)

    def _is_linear(self, pattern: str) -> bool:
        return pattern in self.found and self.found[pattern].answer == "linear"

    def _one_input(self, parts: Sequence[str]) -> bool:
        axis = 0 if self.found[parts[0]].turned else 1
        widths = [{n: s[axis] for n, s in self.evidence.patterns[part].items()} for part in parts]
        return all(each == widths[0] for each in widths)

    def dimensions(self) -> Callable[[Json, int], Dimensions]:
        """Every size by pattern, axis and layer; a pattern's own entry says whether it is in the layer."""
        patterns = self.evidence.patterns
        stacks = {p: found for p, found in self.found.items() if found.answer == "stack"}

        def dimensions(config: Json, layer: int) -> Dimensions:
            sizes: dict[str, int] = {"experts": 0}
            for pattern, shapes in patterns.items():
                shape = shapes.get(layer) if LAYER in pattern else shapes.get(None)
                sizes[pattern] = int(shape is not None)
                sizes |= {f"{pattern} {axis}": size for axis, size in enumerate(shape or ())}
                if pattern in stacks and shape is not None:
                    _, first, second = shape
                    rows, columns = (second, first) if stacks[pattern].turned else (first, second)
                    sizes["experts"] = shape[0]
                    sizes |= {f"{pattern} rows": rows, f"{pattern} half": rows // 2}
                    sizes[f"{pattern} columns"] = columns
            return sizes

        return dimensions

    def account(self) -> str:
        """What is quantized when linears are asked for, what is kept, and by which signs."""
        taken = [p for p, found in self.found.items() if found.answer in ("linear", "stack")]
        kept = [p for p, found in self.found.items() if found.answer == "kept"]
        matrices = [p for p in kept if len(first_of(self.evidence.patterns[p])) > 1]
        inside = [p for p in matrices if self._inside(p)]
        stacks = ", ".join(_plain(stack.rstrip(".")) for stack in self.evidence.stacks)
        layers = self.evidence.layers
        said = [f"{layers} layer{'s' if layers != 1 else ''} under {stacks}"]
        if not taken:
            said = ["no numbered layers were found"]
        said += [f"linears are {_listed(taken)}"] if taken else []
        said += [f"kept in the layers are vectors, {_listed(inside)}" if inside else "vectors are kept"]
        outside = [p for p in matrices if not self._inside(p) and p not in (self.table, self.head)]
        said += [f"kept outside them are {_listed(outside)}"] if outside else []
        if any(found.turned for found in self.found.values()):
            said.append("matrices are stored [in, out]")
        if self.table:
            head = f", {_plain(self.head)} is the head" if self.head else ", no head is stored"
            said.append(f"{_plain(self.table)} holds the tokens{head}")
        if self.open:
            said.append(f"open: {'; '.join(self.open)}")
        return "; ".join(said)

    def _inside(self, pattern: str) -> bool:
        return LAYER in pattern and stack_of(pattern) in self.evidence.stacks


def _one_by_one(evidence: Evidence, tensors: Mapping[str, ModelTensor]) -> _Guess:
    """The same answers where numbers count no layers: every tensor is a pattern of its own."""
    found = {escaped(name): evidence.found(pattern_of(name)[0]) for name in tensors}
    alone: dict[str, Shapes] = {escaped(name): {None: tensor.shape} for name, tensor in tensors.items()}
    stacked = Found("kept", "a stack of experts in a layer of its own")
    answers = {p: stacked if each.answer == "stack" else each for p, each in found.items()}
    return _Guess(replace(evidence, patterns=alone, stacks=()), answers)


def _templates(pattern: str, found: Found) -> list[ParameterTemplate]:
    """The linears of each expert that a stack holds: halves of its rows where gate and up are stacked."""
    module, _ = _split(pattern)
    parent, _, last = module.rpartition(".")
    parent = parent if parent.endswith(".experts") else f"{parent}.experts"
    names = (last,) if found.turned else _HALVES.get(last, (last,))  # whose halves may be interleaved
    rows = f"{pattern} half" if len(names) == 2 else f"{pattern} rows"
    modules = [f"{parent}.{{expert}}.{name}" for name in names]
    return [
        ParameterTemplate(_role(each), each, (rows, f"{pattern} columns"), only_if=pattern)
        for each in modules
    ]


def _split(pattern: str) -> tuple[str, str]:
    """The module of a tensor and what follows it; a parameter of its own is its module."""
    return (pattern.removesuffix(".weight"), ".weight") if pattern.endswith(".weight") else (pattern, "")


def _role(module: str) -> str:
    return module.replace(f".{LAYER}", "")


def _plain(pattern: str) -> str:
    """A pattern as people read it: numbers of layers and experts as N, without what all names end with."""
    short = pattern.split(f"{LAYER}.", 1)[-1] if LAYER in pattern else pattern
    return shown(_DIGITS.sub("N", short.removesuffix(".weight")).replace("{{", "{").replace("}}", "}"), 60)


def _listed(patterns: Iterable[str]) -> str:
    names = list(dict.fromkeys(map(_plain, patterns)))
    more = f" and {len(names) - _MOST_NAMED} more kinds" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def refuse_open(architecture: Architecture) -> NoReturn:
    """Raises UnsupportedModel that names what the structure of an undeclared model leaves open."""
    left = architecture.family.open
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    raise UnsupportedModel(
        f"config.json: model_type {architecture.config.get('model_type')!r} is not known here, and its "
        f"structure leaves something open: {shown(left[0])}{more}",
        HOW_TO_DECLARE,
    )
