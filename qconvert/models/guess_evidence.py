"""Decides from names and shapes which weights of an undeclared model are linears.

Three answers: a linear, kept as it is, or open. A weight is a linear when its name is one that modelling
files give to linears, or when its inputs are a width that the layer makes; it is kept when it is a vector, a
convolution, a bare parameter, or named like a norm, a router, an embedding. What is neither is left open:
nothing is quantized for want of evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from qconvert.core.config_json import MAX_LAYERS
from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor, Unquantized

LAYER = "{layer}"
Shape = tuple[int, ...]
Shapes = Mapping[int | None, Shape]
Answer = Literal["linear", "stack", "kept", "open"]

_NUMBER = re.compile(r"\.(\d{1,4})(?=\.)")
# Stacks of layers of other parts than the language model, which the declared families keep as well.
_OTHER_PARTS = re.compile(
    r"(^|[._])(visual|vision\w*|vit|audio\w*|speech\w*|image\w*|video\w*|sam|tower|\w*projector|perceiver"
    r"|resampler|connector|merger|mtp|nextn|talker|code2wav|codec\w*|vocoder|vq\w*|depth_decoder|qformer"
    r"|encodec|mimi|prompt_encoder|vqmodel|token2wav|flow|patch\w*)(?=[._]|$)"
)
# Words of a module that is no linear to quantize, wherever they stand, and those of its last word alone.
_KEPT_PARTS = re.compile(
    r"norm|embed|_emb(?=[._]|$)|position|router|gating|classifier|compressor"
    r"|(^|[._])(bias|ln\d*|ln_\w+|altup|lora\w*)(?=[._]|$)"
)
_KEPT_LAST = re.compile(
    r"(w?gate|gate_?\d|wg|head|score|scores|\w*conv\w*|pool\w*|dt_?proj\w*|\w*_gate|time_\w+|w[gb]_proj|"
    r"weights_proj|[ab]_proj|in_proj_(a|b|ba|dt)|rel_\w+|alpha|beta)"
)
# Gates that are halves of a gated block.
_GATED_BLOCK = re.compile(r"(mlp_|ffn_|ff_)gate|gate_proj")
# The last words that modelling files give to linears.
_LINEAR_LAST = re.compile(
    r"w?[qkvo]|w_?[qkvo]+|w_pack|w?qkv\w*|query\w*|key\w*|value\w*|to_[qkv]\w*|[qkvo]_(a|b|lin|proj)(_proj\w*)?"
    r"|kv_(a|b)_proj\w*|kv_proj|q?kvz?_proj|[qkvo]\w{0,3}_proj\w*|qkv_\w+|c_(attn|proj|fc\d?)|attn_?(out|proj)\w*"
    r"|att_proj|(gate|up|down|out|in|gate_up|ff|fused|input|output|mlp|ffn|x|z)_proj\w*|proj(_\d|_out|_in|)"
    r"|fc\w*|lin\d|linear\w*|\w+_linear|dense\w*|w\d|v\d|wi(_\d)?|wo|wq_\w|wk\w*|wkv\w*|wo_\w"
    r"|receptance|output|ff_out|mlp(1|2)|intermediate|out|in_proj_(qkv|qkvz|z|x)|up|down|gate_up|[fg]_[ab]_proj"
)
_LAYER_COUNTS = re.compile(r"(num|n)_?\w*layers?|\w*_layers|layers|num_blocks|n_blocks|depth")
_WIDTH_KEYS = re.compile(r"\w*(size|dim|rank|width|inner|embd|model|channels)\w*")
_COUNT_KEYS = re.compile(r"\w*heads|n_head|\w*experts")
# A weight with fewer rows than this is no matrix that a group of columns would be saved in.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Found:
    """The role that a pattern of names is assumed to have, and why; `turned` weights are stored [in, out]."""

    answer: Answer
    why: str
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the names, shapes and config of one model say together.

    `patterns` are names with the number of their layer replaced, with the shapes by layer. `layers` is the
    number of layers of the longest stack of the language model, `hidden` its width, None where nothing says.
    """

    patterns: Mapping[str, Shapes]
    encoded: frozenset[str]
    numbers: Mapping[str, int]
    layers: int
    stacks: tuple[str, ...]
    hidden: int | None
    counted: bool
    turned: bool | None = None
    makers: Mapping[int, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Json, tensors: Mapping[str, ModelTensor]) -> Evidence:
        """Gathers it; nothing here is wrong for a hostile file, only open."""
        patterns: Mapping[str, Shapes] = gathered(tensors)
        numbers = dict(_numbers(config))
        counts = {value for key, value in numbers.items() if _LAYER_COUNTS.fullmatch(key)}
        depths = dict(_stacks(patterns, counts))
        counted = bool(depths)
        depths = depths or dict(_stacks(patterns, None))
        patterns = _without_further(patterns, depths)
        encoded = {pattern_of(n)[0] for n, t in tensors.items() if not isinstance(t.encoding, Unquantized)}
        stacks = tuple(depths)
        inside = {p: s for p, s in patterns.items() if LAYER in p and stack_of(p) in stacks}
        hidden = _hidden(numbers, patterns, inside)
        deepest = max(depths.values(), default=0)
        made = cls(patterns, frozenset(encoded), numbers, deepest, stacks, hidden, counted)
        made = replace(made, turned=_turned(inside))
        return replace(made, makers=_makers(inside))

    def found(self, pattern: str) -> Found:
        """The role that this pattern is assumed to have."""
        shapes = self.patterns[pattern]
        dims = {len(shape) for shape in shapes.values()}
        if LAYER not in pattern or stack_of(pattern) not in self.stacks:
            return Found("kept", "outside the layers")
        if pattern in self.encoded:
            return Found("linear", "is quantized")
        if dims == {3}:
            return self._stack(pattern, shapes)
        if dims != {2}:
            return Found("kept", "no matrix")
        return self._matrix(pattern, shapes)

    def _matrix(self, pattern: str, shapes: Shapes) -> Found:
        module, _, leaf = pattern.rpartition(".")
        if leaf != "weight":
            return Found("kept", "a parameter of its own")
        last, inner = _last_word(module), module.split(LAYER)[1].lower()
        few = any(min(shape) < _FEW for shape in shapes.values())
        if _KEPT_PARTS.search(inner) or _KEPT_LAST.fullmatch(last.lower()):
            gated = last.lower() == "gate" and not self._has_experts(pattern) and not few
            wide = self.hidden and all(4 * shape[0] >= self.hidden for shape in shapes.values())
            if not (gated and wide) and not _GATED_BLOCK.fullmatch(last.lower()):
                return Found("kept", "named like a norm, a gate or an embedding")
        if _LINEAR_LAST.fullmatch(last.lower()):
            return Found("linear", "named like a linear", turned=self.turned is True)
        if few or {shape[0] for shape in shapes.values()} & self._counts:
            return Found("kept", "as many rows as there are heads or experts")
        if all(self._fits(pattern, shape) for shape in shapes.values()):
            return Found("linear", "reads and makes widths of the layer", turned=self.turned is True)
        return Found("open", "neither its name nor its shape says what it is")

    def _stack(self, pattern: str, shapes: Shapes) -> Found:
        """Experts of a layer in one array: [experts, out, in], or [experts, in, out]."""
        counts = {value for key, value in self.numbers.items() if "expert" in key}
        inner = pattern.split(LAYER)[1]
        if any(min(shape) < 2 for shape in shapes.values()) or "conv" in inner.lower():
            return Found("kept", "a convolution, or a parameter of its own")
        if len(set(shapes.values())) > 1 or "bias" in inner or first_of(shapes)[0] not in counts:
            return Found("kept", "a parameter of its own")
        if any(f"{pattern}{bias}" in self.patterns for bias in ("_bias", "_biases")):
            return Found("open", "a stack of experts with biases of their own")
        turned = self._stack_turned(pattern)
        if turned is None:
            return Found("open", "a stack of experts, whose shape does not say which axis is the input")
        return Found("stack", "a stack of experts", turned)

    def _stack_turned(self, pattern: str) -> bool | None:
        """Whether a stack is [experts, in, out], by what reads and what writes beside it; None if open.

        What one makes (twice as much, where a gate is stacked on it) the other reads.
        """
        module = pattern.removesuffix(".weight").rpartition(".")[0] + "."
        beside = [p for p in self.patterns if p.startswith(module) and len(first_of(self.patterns[p])) == 3]
        shapes = {p: first_of(self.patterns[p]) for p in beside if "bias" not in p[len(module) :]}
        shapes = {p: shape for p, shape in shapes.items() if shape[0] == first_of(self.patterns[pattern])[0]}
        reading = [shape for p, shape in shapes.items() if not _writes(p)]
        writing = [shape for p, shape in shapes.items() if _writes(p)]
        pairs = [(made, read) for made in reading for read in writing]
        straight = all(b == c and a in (d, 2 * d) for (_, a, b), (_, c, d) in pairs)
        turned = all(a == d and b in (c, 2 * c) for (_, a, b), (_, c, d) in pairs)
        if straight != turned:
            return turned
        _, first, second = shapes[pattern]
        if not straight or (first == self.hidden) == (second == self.hidden):
            return None
        return (second == self.hidden) == _writes(pattern)

    def _fits(self, pattern: str, shape: Shape) -> bool:
        """Whether each axis is the residual's, or a width that something else in the layers has, too."""
        named = {value for key, value in self.numbers.items() if _WIDTH_KEYS.fullmatch(key)}
        return all(
            size == self.hidden or size in named or self.makers.get(size, frozenset()) - {pattern}
            for size in shape
        )

    @property
    def _counts(self) -> set[int]:
        return {value for key, value in self.numbers.items() if _COUNT_KEYS.fullmatch(key)}

    def _has_experts(self, pattern: str) -> bool:
        """Whether a module beside this one holds experts."""
        beside = pattern.rsplit(".", 2)[0] + "."
        return any("expert" in other[len(beside) :] for other in self.patterns if other.startswith(beside))


def gathered(tensors: Mapping[str, ModelTensor]) -> dict[str, dict[int | None, Shape]]:
    """The shapes of all tensors by pattern and layer."""
    found: dict[str, dict[int | None, Shape]] = {}
    for name, tensor in tensors.items():
        pattern, layer = pattern_of(name)
        found.setdefault(pattern, {})[layer] = tensor.shape
    return found


def first_of(shapes: Shapes) -> Shape:
    """The shape in the first layer that has the tensor."""
    return next(iter(shapes.values()))


def stack_of(pattern: str) -> str:
    """What stands before the number of a layer."""
    return pattern.split(LAYER, maxsplit=1)[0]


def pattern_of(name: str) -> tuple[str, int | None]:
    """Returns the name with its first number replaced by `{layer}`, and that number."""
    text = escaped(name)
    match = _NUMBER.search(text)
    if match is None or int(match[1]) >= MAX_LAYERS:
        return text, None
    return f"{text[: match.start()]}.{LAYER}{text[match.end() :]}", int(match[1])


def escaped(name: str) -> str:
    """The name as a format string that makes it."""
    return name.replace("{", "{{").replace("}", "}}")


def _writes(pattern: str) -> bool:
    """Whether the name is that of what ends a block, not of what begins it."""
    return bool(re.search(r"down|out|w2|(^|_)wo|linear_1", _last_word(pattern.removesuffix(".weight"))))


def _last_word(module: str) -> str:
    """The last word of a module that is no number."""
    return next((w for w in reversed(module.split(".")) if not w.isdecimal() and w != LAYER), "")


def _numbers(config: Json) -> Iterator[tuple[str, int]]:
    """The whole numbers of the language model's config, and how long its lists of layers are.

    Those of other parts are not its.
    """
    text = config.get("text_config") or config.get("llm_config") or config.get("language_config")
    for each in (config, text if isinstance(text, dict) else {}):
        for key, value in each.items():
            if isinstance(value, list) and re.match("layers?_", str(key)):
                yield f"num_{key}_layers", len(value)
            elif isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32:
                yield str(key), value


def _stacks(patterns: Mapping[str, Shapes], counts: set[int] | None) -> Iterator[tuple[str, int]]:
    """What stands before the numbers of the language model's layers, and how many there are.

    As many as one of `counts`; some files hold one or two more, which predict further tokens.
    """
    found: dict[str, set[int]] = {}
    matrices: dict[str, int] = {}
    for pattern, shapes in patterns.items():
        if LAYER in pattern:
            before = stack_of(pattern)
            found.setdefault(before, set()).update(n for n in shapes if n is not None)
            matrices[before] = matrices.get(before, 0) + (len(first_of(shapes)) > 1)
    for before, numbers in found.items():
        those = {len(numbers)} if counts is None else counts
        depth = max((count for count in those if count <= len(numbers)), default=0)
        whole = numbers == set(range(len(numbers))) and not _OTHER_PARTS.search(before)
        layers = matrices[before] > 1  # one matrix alone is an item of a list
        if whole and layers and depth and len(numbers) <= depth + 2:
            yield before, depth


def _without_further(patterns: Mapping[str, Shapes], depths: Mapping[str, int]) -> dict[str, Shapes]:
    """The patterns, with layers behind those that config.json counts by names of their own."""
    made: dict[str, Shapes] = {}
    for pattern, shapes in patterns.items():
        depth = depths.get(stack_of(pattern)) if LAYER in pattern else None
        ours = {n: s for n, s in shapes.items() if depth is None or n is None or n < depth}
        made |= {pattern.replace(LAYER, str(n), 1): {None: s} for n, s in shapes.items() if n not in ours}
        made |= {pattern: ours} if ours else {}
    return made


def _hidden(
    numbers: Mapping[str, int], patterns: Mapping[str, Shapes], inside: Mapping[str, Shapes]
) -> int | None:
    """The width of the residual: of most vectors in the layers, or the config's, whichever matrices have."""
    matrices = [s for shapes in inside.values() for s in shapes.values() if len(s) == 2]
    candidates = [numbers[key] for key in ("hidden_size", "n_embd", "d_model", "model_dim") if key in numbers]
    sizes = [s[0] for shapes in inside.values() for s in shapes.values() if len(s) == 1]
    candidates += sorted(set(sizes), key=sizes.count, reverse=True)[:1]
    return next((c for c in candidates if sum(c in s for s in matrices) * 2 >= len(matrices) > 0), None)


def _makers(inside: Mapping[str, Shapes]) -> dict[int, frozenset[str]]:
    """The patterns that have each size on an axis, or twice: a gate is stacked on what it multiplies."""
    found: dict[int, set[str]] = {}
    for pattern, shapes in inside.items():
        for size in {size for shape in shapes.values() for size in shape}:
            found.setdefault(size, set()).add(pattern)
            found.setdefault(size // 2, set()).add(pattern)
    return {size: frozenset(makers) for size, makers in found.items()}


def _turned(inside: Mapping[str, Shapes]) -> bool | None:
    """Whether matrices are stored [in, out]: what the biases beside those that are not square say."""
    votes: list[bool] = []
    for pattern, shapes in inside.items():
        bias = inside.get(f"{pattern.removesuffix('.weight')}.bias", {})
        for layer, shape in shapes.items():
            if len(shape) == 2 and shape[0] != shape[1] and len(bias.get(layer, ())) == 1:
                votes.append(bias[layer][0] == shape[1])
    if not votes:
        return False
    return None if any(votes) and not all(votes) else votes[0]
