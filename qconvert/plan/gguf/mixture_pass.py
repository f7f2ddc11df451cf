"""Chooses the element type of every tensor of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from qconvert.core.encodings import ModelTensor
from qconvert.core.ggml_types import WRITTEN, GGMLType
from qconvert.errors import BadRecipe
from qconvert.models.gguf.declaration import Facts
from qconvert.models.gguf.families import facts_of, remarks_on
from qconvert.models.gguf.keys import model_keys
from qconvert.plan.gguf.encodings import is_mxfp4, own_types
from qconvert.plan.gguf.file_types import find_file_type
from qconvert.plan.gguf.mixture import Choice, MixFacts, choose_types, pattern_of
from qconvert.plan.request import KEEP, GGUFTarget
from qconvert.plan.state import Compiled, GGUFPlan

# The reason for the type of a tensor that keeps its codes, or its numbers.
KEPT = "kept"


def choose_block_types(state: Compiled) -> Compiled:
    """The type of every tensor: llama-quantize's choice, or the one that keeps its codes.

    Raises BadRecipe for a type that is not written here, or that the tensor does not fit.
    """
    target = state.request.target
    assert isinstance(target, GGUFTarget)
    facts, outputs = facts_of(state.architecture), state.outputs
    measured = state.request.statistics is not None
    _refuse_dropped(target, outputs, measured=measured)
    if target.file_type == KEEP:
        file_type, choices = _kept(outputs, facts, target, measured=measured)
    else:
        file_type, choices = target.file_type, _choose(outputs, facts, target, measured=measured)
        _refuse_unwritten(choices)
    choices |= _of_the_model(facts, file_type, choices)
    made = GGUFPlan(facts, find_file_type(file_type), choices)
    return replace(state, gguf=made).warn(*remarks_on(facts), *_not_the_head(target, outputs))


def _of_the_model(facts: Facts, file_type: str, choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """The types that the model's graph wants where they are not the mixture's."""
    wanted = ((name, kind) for name, (of, kind) in facts.model.types.items() if of in ("", file_type.upper()))
    return {name: Choice(GGMLType[kind], "as its graph reads it") for name, kind in wanted if name in choices}


def _choose(
    outputs: dict[str, ModelTensor], facts: Facts, target: GGUFTarget, *, measured: bool
) -> dict[str, Choice]:
    _refuse_idle(target, outputs)
    kept = [] if target.allow_requantize else [n for n, t in outputs.items() if is_mxfp4(t.encoding)]
    return choose_types(
        target.file_type,
        [(name, tensor.shape) for name, tensor in outputs.items()],
        MixFacts.of(facts.model.arch, model_keys(facts)),
        imatrix=measured,
        pure=target.pure,
        overrides=target.tensor_types,
        stored={name: GGMLType["MXFP4"] for name in kept},
        token_embedding_type=target.token_embedding_type,
        output_tensor_type=target.output_tensor_type,
        fallback=target.fallback,
    )


def _refuse_dropped(target: GGUFTarget, names: Collection[str], *, measured: bool) -> None:
    """Raise BadRecipe for an option that would say nothing about this file."""
    if target.file_type == KEEP:
        given = {
            "--tensor-type": target.tensor_types,
            "--token-embedding-type": target.token_embedding_type,
            "--output-tensor-type": target.output_tensor_type,
            "--pure": target.pure,
            "--imatrix, --calibration": measured,
        }
        idle = next((option for option, value in given.items() if value), None)
        if idle:
            raise BadRecipe(
                f"{idle}: given together with --type keep, which gives no tensor another type",
                "leave it out, or name a type in place of keep",
            )
        return
    file_type, tied = find_file_type(target.file_type), "output.weight" not in names
    plain = not file_type.base.is_quantized
    if target.tensor_types and plain:
        raise BadRecipe(
            f"--tensor-type: a file of type {file_type.name.lower()} mixes no other types in",
            "name a quantized --type; --token-embedding-type and --output-tensor-type go with any",
        )
    if target.output_tensor_type and not target.token_embedding_type and tied and (plain or target.pure):
        beside = "--pure" if target.pure else f"--type {file_type.name.lower()}"
        raise BadRecipe(
            f"--output-tensor-type: the head of this model is its embedding, which {beside} decides",
            "name the type with --token-embedding-type",
        )


def _not_the_head(target: GGUFTarget, names: Collection[str]) -> Iterator[str]:
    """What to tell of patterns that seem to mean the head, and are found only in attn_output."""
    for pattern, _ in target.tensor_types:
        found = [name for name in names if pattern_of(pattern).search(name)]
        if pattern.startswith("output") and all("attn_output" in name for name in found):
            yield f"--tensor-type {pattern!r}: found only in attn_output; the head's is --output-tensor-type"


def _refuse_idle(target: GGUFTarget, names: Collection[str]) -> None:
    """Raise BadRecipe for a pattern of --tensor-type that is found in no tensor's name."""
    for pattern, _ in target.tensor_types:
        if not any(pattern_of(pattern).search(name) for name in names):
            near = get_close_matches(
                pattern, sorted({name.split(".")[-2] for name in names if "." in name}), n=1
            )
            hint = f"did you mean {near[0]!r}?" if near else "`--dry-run --json` lists the names"
            raise BadRecipe(f"--tensor-type {pattern!r}: matches no tensor", hint)


def _kept(
    outputs: dict[str, ModelTensor], facts: Facts, target: GGUFTarget, *, measured: bool
) -> tuple[str, dict[str, Choice]]:
    """The types that keep every tensor as it is, and the name of the file type that they make."""
    plain = _choose(outputs, facts, replace(target, file_type="F32"), measured=measured)
    f32 = GGMLType.F32
    always = {n: f32 for n, c in plain.items() if c.type is f32 and c.reason != "base type"}
    file_type, types = own_types(outputs, always, allow_requantize=target.allow_requantize)
    reasons = {name: plain[name].reason if name in always else KEPT for name in plain}
    return file_type, {name: Choice(types[name], reasons[name]) for name in plain}


def _refuse_unwritten(choices: dict[str, Choice]) -> None:
    """Raise BadRecipe naming the first tensor that got a type which cannot be written here."""
    for name, choice in choices.items():
        if choice.type.is_quantized and choice.type.name not in WRITTEN:
            raise BadRecipe(
                f"{name}: {choice.type.label} ({choice.reason}) cannot be written, only read",
                "`qconvert to-gguf --type list` shows what is",
            )
