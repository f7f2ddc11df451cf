"""Reports how loaders treat an output: facts that a user needs before the work starts.

Sources: transformers 5.23 with compressed-tensors 0.20, tried (tests/layouts/test_compressed_tensors.py);
vLLM 0.33 (`model_executor/models`) and SGLang 0.5.23 (`srt/models`), read in source; sglang issue 13214.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from qconvert.core.encodings import AffineInt, Encoding, ModelTensor, Quantized, by_identity, identity
from qconvert.core.layout_traits import LayoutTraits
from qconvert.formats.layouts import registry
from qconvert.models import Architecture
from qconvert.models.parameters import Fusion

_NAME, _ENCODING = attrgetter("name"), attrgetter("encoding")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one loader treats a property of the output."""

    loader: str
    loads: bool
    why: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A property of an output that some loader cannot handle, and the verdict of each."""

    subject: str
    sentence: str
    verdicts: tuple[Verdict, ...]

    @property
    def lines(self) -> list[str]:
        """The notice as text: a sentence, then one line per loader."""
        width = max((len(v.loader) for v in self.verdicts), default=0)
        return [self.sentence] + [
            f"  {v.loader:<{width}}  {'yes' if v.loads else 'no ':<3}  {v.why}" for v in self.verdicts
        ]


FUSED = Notice(
    "fused linears",
    "this family's classes have no fused qkv/gate_up linears, so not every loader reads this file:",
    (
        Verdict("qconvert", True, "decodes it, and `qconvert unfuse` restores the original bytes"),
        Verdict("vLLM 0.33", True, "16-bit, compressed-tensors, AWQ and FP8 (stacks the same rows itself)"),
        Verdict(
            "transformers 5",
            False,
            "re-initialises q, k, v at random after a warning (quantized: fails, or reads unset memory)",
        ),
        Verdict("SGLang 0.5", False, "fails with KeyError on fused Qwen names (sglang issue 13214)"),
        Verdict("llama.cpp", False, "its converter expects separate q, k, v; unfuse first"),
    ),
)


def _quantized_embedding(vllm: Verdict) -> Notice:
    return Notice(
        "quantized embedding",
        "the embedding is quantized, which not every loader reads:",
        (
            Verdict("qconvert", True, "decodes it"),
            vllm,
            Verdict(
                "transformers 5", False, "fails: AttributeError, 'Embedding' object has no attribute 'weight'"
            ),
            Verdict("SGLang 0.5", False, "reads plain embeddings only"),
        ),
    )


QUANTIZED_EMBEDDING = _quantized_embedding(
    Verdict("vLLM 0.33", True, "symmetric group or channel integers whose bits divide 32")
)
QUANTIZED_TIED_EMBEDDING = _quantized_embedding(
    Verdict("vLLM 0.33", False, "wants it plain where it is also the head; `--untie` writes a head beside it")
)

ASYMMETRIC = Notice(
    "asymmetric grid",
    "the grid has zero points, which not every loader reads:",
    (
        Verdict("qconvert", True, "decodes it"),
        Verdict("vLLM 0.33", True, "2 to 8 bits, group or channel"),
        Verdict(
            "transformers 5",
            False,
            "fails on packed zero points (compressed-tensors 0.19, 0.20); where all linears have one scheme,"
            " quantization_config=CompressedTensorsConfig(dequantize=True) loads it",
        ),
    ),
)

INPUT_MAJOR = Notice(
    "quantized Conv1D",
    "this family's class stores its linears as [in, out]; quantized they are [out, in], as everywhere:",
    (
        Verdict("qconvert", True, "reads it, and `qconvert dequantize` turns the weights back"),
        Verdict("transformers 5", False, "packs only nn.Linear; these linears are left uninitialised"),
    ),
)

STACKED = Notice(
    "stacks of experts",
    "the experts of a layer are stored as one 3-D tensor, which not every loader reads for this family:",
    (
        Verdict("qconvert", True, "decodes it, and `qconvert unfuse` restores the original bytes"),
        Verdict("transformers 5", True, "16-bit stacks are the parameters of its own classes"),
        Verdict("vLLM 0.33", False, "expects the linears of each expert"),
    ),
)

APART = Notice(
    "experts apart",
    "this family's class holds the experts of a layer as one 3-D parameter; quantized, each is a linear:",
    (
        Verdict(
            "qconvert", True, "reads it, and `qconvert dequantize` and `qconvert fuse` restore the stack"
        ),
        Verdict("vLLM 0.33", True, "where it knows these names, as llm-compressor writes them"),
        Verdict("transformers 5", False, "finds no packed stack, and leaves the experts uninitialised"),
    ),
)

MIXED = Notice(
    "stacked linears of several forms",
    "linears that loaders stack (q, k, v; gate, up; experts of a layer) have different forms, "
    "so not every loader reads this file:",
    (
        Verdict("qconvert", True, "decodes it"),
        Verdict(
            "vLLM 0.33",
            False,
            "one form for each stack: of a GGUF, --scheme int4-asym-g32 --allow-requantize",
        ),
        Verdict("SGLang 0.5", False, "the same"),
    ),
)

# Families whose classes in transformers look at `module.weight` while they load or run.
_LOOK_AT_WEIGHTS = frozenset({"falcon", "rwkv", "t5"})
UNPACKED = Notice(
    "class that looks at weights",
    "this family's class in transformers looks at the weights of linears, which packed linears do not have:",
    (
        Verdict("qconvert", True, "decodes it"),
        Verdict(
            "transformers 5",
            True,
            "only with quantization_config=CompressedTensorsConfig(run_compressed=False)",
        ),
    ),
)


@dataclass(frozen=True)
class _Output:
    """A planned output, its model, the traits of its layout, and whether its head is its embedding."""

    tensors: Mapping[str, ModelTensor]
    architecture: Architecture
    traits: LayoutTraits
    tied: bool

    @cached_property
    def fusions(self) -> list[Fusion]:
        fused = self.architecture.fused
        return [entry.fusion for name, entry in fused.items() if name in self.tensors]

    @cached_property
    def encodings(self) -> list[Encoding]:
        """Those of all tensors, each object once."""
        return list(_encodings(self.tensors.values()))

    @cached_property
    def quantized(self) -> list[ModelTensor]:
        codes = {identity(each) for each in self.encodings if isinstance(each, Quantized)}
        return [tensor for tensor in self.tensors.values() if identity(tensor.encoding) in codes]

    @property
    def matrices(self) -> list[ModelTensor]:
        return [tensor for tensor in self.quantized if len(tensor.shape) == 2]

    @property
    def experts_of_stacks(self) -> set[str]:
        """The linears that the family's class has as one stack."""
        entries = (e for e in self.architecture.fused.values() if e.fusion.native and e.fusion.per_expert)
        return {part.name for entry in entries for part in entry.members}

    @cached_property
    def has_integer_embedding(self) -> bool:
        if not self.integers:
            return False
        known = self.architecture.parameters.values()
        tables = (self.tensors.get(p.name) for p in known if p.kind == "embedding")
        return any(table is not None and isinstance(table.encoding, AffineInt) for table in tables)

    @cached_property
    def integers(self) -> set[AffineInt]:
        """The encodings that are integers."""
        return {encoding for encoding in self.encodings if isinstance(encoding, AffineInt)}


def _encodings(tensors: Iterable[ModelTensor]) -> Iterable[Encoding]:
    """Those of tensors, each object once."""
    return by_identity(map(_ENCODING, tensors)).values()


def mixed_stacks(
    tensors: Mapping[str, ModelTensor], architecture: Architecture
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The linears that vLLM and SGLang stack of parts with different encodings: name, and labels of these."""
    for fused in architecture.fused.values():
        found = filter(None, map(tensors.get, map(_NAME, fused.members)))
        encodings = set(_encodings(found))
        if len(encodings) > 1:
            yield fused.whole.name, tuple(sorted(encoding.label for encoding in encodings))


def mixed_experts(
    tensors: Mapping[str, ModelTensor], architecture: Architecture
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The layers whose experts, which are multiplied at once, have different encodings: a linear, labels."""
    if sum(isinstance(encoding, Quantized) for encoding in _encodings(tensors.values())) < 2:
        return
    layers: dict[int | None, dict[int, ModelTensor]] = {}
    for tensor, parameter in zip(tensors.values(), architecture.parameters_in(tensors), strict=True):
        if parameter is None or parameter.param != "weight":
            continue
        if parameter.role.startswith("mlp.experts."):
            layers.setdefault(parameter.layer, {}).setdefault(identity(tensor.encoding), tensor)
    for found in layers.values():
        coded = [tensor for tensor in found.values() if isinstance(tensor.encoding, Quantized)]
        encodings = {tensor.encoding for tensor in coded}
        if len(encodings) > 1:
            yield coded[0].name, tuple(sorted(encoding.label for encoding in encodings))


def _is_mixed(out: _Output) -> bool:
    if "vllm" not in out.traits.readers or not out.quantized:
        return False
    return any(True for find in (mixed_stacks, mixed_experts) for _ in find(out.tensors, out.architecture))


# Every notice, and when it is given; in the order they are printed.
_RULES: tuple[tuple[Notice, Callable[[_Output], bool]], ...] = (
    (FUSED, lambda out: any(not f.native and not f.per_expert for f in out.fusions)),
    (
        UNPACKED,
        lambda out: bool(out.integers and _LOOK_AT_WEIGHTS & set(out.architecture.family.model_types)),
    ),
    (
        INPUT_MAJOR,
        lambda out: bool(
            (turned := out.architecture.stored_shapes) and any(t.name in turned for t in out.matrices)
        ),
    ),
    (STACKED, lambda out: any(f.per_expert and not f.native and not f.layout for f in out.fusions)),
    (
        APART,
        lambda out: bool((s := out.experts_of_stacks) and not s.isdisjoint(t.name for t in out.quantized)),
    ),
    (QUANTIZED_EMBEDDING, lambda out: out.has_integer_embedding and not out.tied),
    (QUANTIZED_TIED_EMBEDDING, lambda out: out.has_integer_embedding and out.tied),
    (
        ASYMMETRIC,
        lambda out: out.traits.packed_zero_points and not all(e.symmetric for e in out.integers),
    ),
    (MIXED, _is_mixed),
)


def notices(
    outputs: Mapping[str, ModelTensor],
    architecture: Architecture,
    layout: str = registry.DEFAULT,
    *,
    tied: bool,
) -> list[Notice]:
    """What to say about a planned output in this layout, before the work starts.

    `tied` says whether its head is its embedding.
    """
    out = _Output(outputs, architecture, registry.traits_of(layout), tied)
    found = [notice for notice, applies in _RULES if applies(out)]
    return (
        [notice if notice is MIXED else _without_refusals(notice) for notice in found]
        if MIXED in found
        else found
    )


def _without_refusals(notice: Notice) -> Notice:
    """A notice about an output of mixed stacks: no loader is said to read it that refuses those."""
    refuse = {verdict.loader for verdict in MIXED.verdicts if not verdict.loads}
    verdicts = tuple(
        replace(v, loads=False, why="not with stacked linears of several forms") if v.loader in refuse else v
        for v in notice.verdicts
    )
    return replace(notice, verdicts=verdicts)


def notice_lines(found: Iterable[Notice]) -> list[str]:
    """All notices as text lines."""
    return [line for notice in found for line in notice.lines]
