"""Finds the family of a config.json by `model_type` and `architectures`.

A class without the head over the vocabulary (`Qwen3Model`, `Qwen3ForSequenceClassification`) is the decoder
of its family alone. What stands in the head's place, to score a text or to label tokens, is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.models.families import FAMILIES
from qconvert.models.parameters import Family

HOW_TO_DECLARE = (
    "if it is built like a model that is, `qconvert quantize --recipe FILE` takes it with these lines: "
    "`architecture: {like: llama, rename: {self_attn: attention}}` (all keys: docs/reference/models.md); "
    "--allow-unknown keeps what is open and quantizes the other linears"
)
# The endings of transformers' class names, behind the name of the family.
_WITH_HEAD = re.compile(r"For(CausalLM|ConditionalGeneration|MaskedLM)$|LMHeadModel$")
_WITHOUT = re.compile(r"(Text)?Model|For\w*(Classification|Reward|QuestionAnswering)\w*")
# What these classes have in the place of the head (transformers' `modeling_layers`; the classes that are
# published with reward models of InternLM2 and Qwen2.5).
_OTHER_HEADS = {
    r"(score|classifier|qa_outputs|v_head|value_head|reward_head|regression_layer)(\.\d+)?(\.[a-z_]+)*"
    r"\.(weight|bias)": "the head of another task"
}


def find_family(config: Json) -> Family:
    """Returns the family of a config by `model_type`, cross-checked with `architectures`."""
    model_type = config.get("model_type")
    classes = config.get("architectures") or []
    known = ", ".join(t for family in FAMILIES for t in family.model_types)
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CorruptCheckpoint(
            f"config.json: architectures is {classes!r}, not a list of names", "correct it"
        )
    if not isinstance(model_type, str):
        by_class = [f for f in FAMILIES if set(classes) & set(f.classes)]
        if len(by_class) == 1 and model_type is None:
            return by_class[0]
        fitting = [t for f in FAMILIES if set(classes) & set(f.classes) for t in f.model_types[:1]]
        types = ", ".join(fitting) or "llama or qwen3, for example (all: docs/reference/models.md)"
        raise CorruptCheckpoint("config.json: no model_type", f"add the model's: {types}")
    family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is None:
        raise UnsupportedModel(
            f"config.json: model_type {model_type!r} is not known here", f"{HOW_TO_DECLARE}; known: {known}"
        )
    if not classes or set(classes) & set(family.classes):
        return family
    if _has_no_head(family, classes):
        return _headless(family)
    raise CorruptCheckpoint(
        f"config.json: model_type is {model_type!r}, but architectures says {', '.join(classes)}",
        f"a {model_type} model is a {family.classes[0]}; correct the one that is wrong",
    )


def model_type_of(config: Json) -> object:
    """Returns the `model_type`, of a config without one that of its class, where only one family has it."""
    stated = config.get("model_type")
    if stated is not None:
        return stated
    classes = config.get("architectures")
    names = {c for c in classes if isinstance(c, str)} if isinstance(classes, list) else set()
    fitting = [f.model_types[0] for f in FAMILIES if names & set(f.classes)]
    return fitting[0] if len(fitting) == 1 else None


def _has_no_head(family: Family, classes: Iterable[str]) -> bool:
    """Whether a class is one of this family, by its name, that has no head over the vocabulary."""
    names = [_WITH_HEAD.sub("", name) for name in family.classes if _WITH_HEAD.search(name)]
    return any(
        name.startswith(own) and _WITHOUT.fullmatch(name.removeprefix(own)) is not None
        for name in classes
        for own in names
    )


def _headless(family: Family) -> Family:
    slots = tuple(slot for slot in family.slots if slot.role != "lm_head")
    return replace(family, slots=slots, carried={**family.carried, **_OTHER_HEADS})
