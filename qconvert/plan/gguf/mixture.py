"""Chooses the element type of each tensor of a GGUF: llama-quantize's mixtures, choice by choice.

A file type such as Q4_K_M names a base type and a list of exceptions. Several exceptions count the
tensors seen so far, so the order of the visits is part of the rule. Pure: names and shapes in, types and
reasons out. Source: llama_tensor_get_type, llama_tensor_get_type_impl, tensor_allows_quantization and
tensor_type_fallback of llama.cpp's src/llama-quant.cpp (commit 0c1e57098).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from qconvert.core.ggml_types import KV, WEIGHED, GGMLType
from qconvert.errors import BadRecipe
from qconvert.plan.gguf import mixture_rules
from qconvert.plan.gguf.file_types import FileType, find_file_type

T = GGMLType


# What stands in for a type whose blocks do not divide the rows.
FALLBACK = {
    **dict.fromkeys((T.Q2_0, T.Q2_K, T.Q3_K, T.TQ1_0, T.TQ2_0), T.Q4_0),
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
}

# Layers of the models llama.cpp calls "70B": their attn_v is 8 times smaller than attn_q.
_SEVENTY_B_LAYERS = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}

_NEEDS_IMATRIX = frozenset({T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S})
_MEASURED = "`qconvert calibrate MODEL --imatrix FILE` measures one; give it as --imatrix FILE"
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")

# What stays as it is: norms, routers, and what is small or looked up by position.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_(inp|tid2eid)\.weight|position_embd|token_types\.weight|attn_rel_b\.weight"
    r"|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|[wva][012]|g[12]|decay_w[12]|lerp_fused)\.weight|sam\.(pos_embd|neck\.|net_)"
    r"|\.(rel_pos|patch_embd|patch_merger)|a\.rvq\.codebook|mm\.a\.code_embd"
)


@dataclass(frozen=True, slots=True)
class MixFacts:
    """What the mixtures ask about a model: `arch` is GGUF's name of it, `n_expert` 0 for dense ones."""

    arch: str
    n_layer: int
    n_head: int
    n_head_kv: int
    n_expert: int = 0

    @classmethod
    def of(cls, arch: str, keys: Iterable[KV]) -> MixFacts:
        """The facts as llama-quantize reads them from a file; of heads that differ, the first layer's."""
        found = {entry.key.removeprefix(f"{arch}."): entry.value for entry in keys}

        def number(key: str, default: int) -> int:
            value = found.get(key, default)
            first = value[0] if isinstance(value, tuple) else value
            return first if isinstance(first, int) else default

        heads = number("attention.head_count", 1)
        return cls(
            arch,
            n_layer=number("block_count", 0),
            n_head=heads,
            n_head_kv=number("attention.head_count_kv", heads),
            n_expert=number("expert_count", 0),
        )

    @property
    def shared_heads(self) -> int:
        """Query heads that share one key and value head (n_gqa)."""
        return self.n_head // self.n_head_kv if self.n_head_kv else 0

    @property
    def is_70b(self) -> bool:
        if self.arch == "llama" and (self.n_expert == 8 or self.n_head == self.n_head_kv):
            return False
        return _SEVENTY_B_LAYERS.get(self.arch) == self.n_layer


@dataclass(frozen=True, slots=True)
class Choice:
    """The type a tensor gets, and why, in words for a table; `substituted` where its blocks did not fit."""

    type: GGMLType
    reason: str
    substituted: bool = False


class _Kind(Enum):
    """The kinds of tensors the mixtures tell apart, in words for a table."""

    EMBEDDING = "embedding"
    HEAD = "output head"
    VALUES = "attention values"
    KEYS = "attention keys"
    QUERIES = "attention queries"
    ATTENTION_OUTPUT = "attention output"
    UP = "up projection"
    GATE = "gate projection"
    DOWN = "down projection"
    OTHER = "other"


# The first that occurs in a name decides; a fused qkv counts as values, which are the most sensitive.
_KIND_BY_PART = (
    ("attn_qkv.weight", _Kind.VALUES),
    ("attn_kv_b.weight", _Kind.VALUES),
    ("attn_v.weight", _Kind.VALUES),
    ("attn_k.weight", _Kind.KEYS),
    ("attn_q.weight", _Kind.QUERIES),
    ("attn_output.weight", _Kind.ATTENTION_OUTPUT),
    ("ffn_up", _Kind.UP),
    ("ffn_gate", _Kind.GATE),
    ("ffn_down", _Kind.DOWN),
)
_BY_LAYER = (_Kind.UP, _Kind.GATE, _Kind.DOWN)
_RULES: Mapping[_Kind, mixture_rules.Rules] = {
    _Kind.EMBEDDING: mixture_rules.EMBEDDING,
    _Kind.VALUES: mixture_rules.ATTENTION_VALUES,
    _Kind.KEYS: mixture_rules.ATTENTION_QUERIES,
    _Kind.QUERIES: mixture_rules.ATTENTION_QUERIES,
    _Kind.ATTENTION_OUTPUT: mixture_rules.ATTENTION_OUTPUT,
    _Kind.UP: mixture_rules.UP_AND_GATE,
    _Kind.GATE: mixture_rules.UP_AND_GATE,
    _Kind.DOWN: mixture_rules.DOWN,
}


def visit_order(names: Iterable[str]) -> list[str]:
    """The names as llama-quantize visits and writes them: by layer, those outside layers first."""
    return sorted(names, key=lambda name: (_layer(name), name.encode()))


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def choose_types(
    file_type: str,
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    facts: MixFacts,
    *,
    imatrix: bool = False,
    pure: bool = False,
    overrides: Sequence[tuple[str, GGMLType]] = (),
    stored: Mapping[str, GGMLType] | None = None,
    token_embedding_type: GGMLType | None = None,
    output_tensor_type: GGMLType | None = None,
    fallback: bool = True,
) -> dict[str, Choice]:
    """The type of every tensor (GGUF names, shapes in numpy order) of a file of this type.

    `pure` takes the base type throughout; `overrides` are regular expressions searched in the names,
    the first that matches winning over the mixture; `stored` are the types of weights whose codes GGUF
    holds as they are, which stay unless another is asked for. The result is in `visit_order`. Raises
    BadRecipe for a type that needs an importance matrix when there is none, and, unless `fallback`, for
    a row that the chosen type's blocks do not divide.
    """
    shapes = dict(tensors)
    mix = _Mix(find_file_type(file_type), facts, shapes, imatrix=imatrix)
    patterns = [(pattern_of(pattern), pattern, kind) for pattern, kind in overrides]
    chosen: dict[str, Choice] = {}
    for name in visit_order(shapes):
        kept = _why_kept(name, shapes[name])
        if kept is not None:
            chosen[name] = Choice(T.F32, kept)
            continue
        choice = _by_hand(name, token_embedding_type, output_tensor_type)
        if choice is None and mix.file_type.base.is_quantized:
            choice = next((Choice(k, f"asked for by {p!r}") for r, p, k in patterns if r.search(name)), None)
            if choice is None and stored and name in stored:
                choice = Choice(stored[name], "stored so")
            choice = choice or (None if pure else mix.choose(name, output_tensor_type))
        elif choice is None and stored and name in stored:
            choice = Choice(stored[name], "stored so")
        choice = choice or Choice(mix.file_type.base, "base type")
        choice = _fitting(name, shapes[name], choice, fallback=fallback)
        if not imatrix and needs_imatrix(name, choice.type, mix.file_type):
            fact = f"{name}: {choice.type.label} needs an importance matrix (--type {file_type.lower()})"
            raise BadRecipe(fact, _MEASURED)
        chosen[name] = choice
    return chosen


def pattern_of(pattern: str) -> re.Pattern[str]:
    """The regular expression that picks tensors by name. Raises BadRecipe where it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadRecipe(
            f"pattern {pattern!r}: not a regular expression ({error})",
            "a pattern is part of a GGUF name, such as ffn_down, or a regular expression as in Python's re",
        ) from error


def _why_kept(name: str, shape: tuple[int, ...]) -> str | None:
    """Why a tensor is not quantized, None when it may be; trailing dimensions of 1 do not count."""
    lead = next((i for i, size in enumerate(shape) if size > 1), len(shape))
    if len(shape) - lead < 2:
        return "kept: one row"
    if not name.endswith("weight"):
        return "kept: not a weight"
    match = _KEPT.search(name)
    return None if match is None else f"kept: {match[0].removesuffix('.weight').strip('._')}"


def _by_hand(name: str, embedding: GGMLType | None, head: GGMLType | None) -> Choice | None:
    if embedding is not None and name in _EMBEDDINGS:
        return Choice(embedding, "asked for: token embedding type")
    if head is not None and name == "output.weight":
        return Choice(head, "asked for: output tensor type")
    return None


def needs_imatrix(name: str, kind: GGMLType, file_type: FileType) -> bool:
    """Whether llama-quantize refuses to write a tensor in this type when nothing is known of its inputs.

    Embeddings and heads are exempt (tensor_requires_imatrix), except from the types whose kernels insist.
    """
    if name in _EMBEDDINGS or name == "output.weight":
        return kind.name in WEIGHED
    return kind in _NEEDS_IMATRIX or (kind is T.Q2_K and file_type.name == "Q2_K_S")


def _fitting(name: str, shape: tuple[int, ...], choice: Choice, *, fallback: bool) -> Choice:
    """The choice, or what stands in for it when its blocks do not divide the rows."""
    width, kind = shape[-1], choice.type
    if width % kind.block == 0:
        return choice
    instead = FALLBACK.get(kind, kind)
    if width % instead.block:
        instead = T.F16
    why = f"rows of {width} are not a multiple of {kind.label}'s {kind.block}"
    if not fallback:
        raise BadRecipe(
            f"{name}: {why}",
            f"leave out --no-fallback, for {instead.label} in its place, or name a type with --tensor-type",
        )
    return Choice(instead, f"{choice.reason}; {why}", substituted=True)


class _Mix:
    """The exceptions of one mixture, with the counters some of them go by."""

    def __init__(
        self, file_type: FileType, facts: MixFacts, shapes: Mapping[str, tuple[int, ...]], *, imatrix: bool
    ) -> None:
        self.file_type = file_type
        self.facts = facts
        self.shapes = shapes
        self.imatrix = imatrix
        self.tied = "output.weight" not in shapes
        self.values = sum(_kind(name) is _Kind.VALUES for name in shapes)
        self.seen = dict.fromkeys(_Kind, 0)

    def choose(self, name: str, output_tensor_type: GGMLType | None) -> Choice:
        """The type the mixture gives a tensor that may be quantized, before its shape is looked at."""
        kind = _kind(name)
        if kind is _Kind.HEAD or (self.tied and kind is _Kind.EMBEDDING):
            found = output_tensor_type or self._head(self.shapes[name][-1])
            return Choice(found, "output head" if kind is _Kind.HEAD else "embedding that is the head too")
        if self.file_type.name == "MXFP4_MOE":
            expert = len(self.shapes[name]) > 2 and self.shapes[name][-3] > 1
            return Choice(T.MXFP4, "experts") if expert else Choice(T.Q8_0, "not an expert")
        exception = self._exception(name, kind)
        if exception is None:
            return Choice(self.file_type.base, "base type")
        return Choice(exception, f"{self.file_type.name}: {kind.value}")

    def _head(self, width: int) -> GGMLType:
        base = self.file_type.base
        if self.file_type.name == "MXFP4_MOE" or self.facts.arch == "falcon" or width % base.block:
            return T.Q8_0
        if self.file_type.name in (*mixture_rules.LOWEST, "IQ3_XXS"):
            return T.Q5_K
        return base if base is T.Q8_0 else T.Q6_K

    def _exception(self, name: str, kind: _Kind) -> GGMLType | None:
        rule = self._rules(kind).get(self.file_type.name)
        look = self._look(name, kind)
        found = rule(look) if rule else None
        if kind is _Kind.VALUES and self.file_type.name not in mixture_rules.LOWEST:
            if self.facts.n_expert == 8:
                return T.Q8_0
            if self.facts.is_70b and (found or self.file_type.base) in (T.Q3_K, T.Q4_K):
                return T.Q5_K
        if kind is _Kind.KEYS and self.facts.n_expert == 8:
            return found or T.Q8_0
        return found

    def _rules(self, kind: _Kind) -> mixture_rules.Rules:
        if self.facts.n_expert == 8 and kind is _Kind.KEYS:
            return mixture_rules.EIGHT_EXPERTS_KEYS
        if kind is _Kind.ATTENTION_OUTPUT and self.facts.arch == "falcon":
            return (
                mixture_rules.FALCON_OUTPUT
                if self.file_type.name not in mixture_rules.LOWEST
                else mixture_rules.ATTENTION_OUTPUT
            )
        if kind is _Kind.ATTENTION_OUTPUT and self.facts.n_expert == 8:
            return mixture_rules.EIGHT_EXPERTS_OUTPUT
        return _RULES.get(kind, {})

    def _look(self, name: str, kind: _Kind) -> mixture_rules.Look:
        parameter = self.seen[kind]
        self.seen[kind] += 1
        # Experts are not visited in the order of their layers; the files below 3 bits count them anyway.
        if kind in _BY_LAYER and self.facts.n_expert > 1 and self.file_type.name not in mixture_rules.LOWEST:
            parameter = _layer(name)
        return mixture_rules.Look(
            parameter=parameter,
            count=self.values if kind is _Kind.VALUES else self.facts.n_layer,
            shared=self.facts.shared_heads >= 4,
            imatrix=self.imatrix,
            falcon=self.facts.arch == "falcon",
            experts=self.facts.n_expert,
        )


def _kind(name: str) -> _Kind:
    if name == "output.weight":
        return _Kind.HEAD
    if name in _EMBEDDINGS:
        return _Kind.EMBEDDING
    return next((kind for part, kind in _KIND_BY_PART if part in name), _Kind.OTHER)
