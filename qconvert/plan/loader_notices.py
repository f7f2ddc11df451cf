"""What the field's loaders make of an output: facts that a user must know before the work starts.

Sources: transformers 5.23 with compressed-tensors 0.20, tried (tests/test_compressed_tensors.py); vLLM
0.33 (`model_executor/models`) and SGLang 0.5.23 (`srt/models`), read in source; sglang issue 13214.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.models import Architecture


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
        Verdict("vLLM 0.33", True, "16-bit and compressed-tensors (stacks the same rows itself)"),
        Verdict(
            "transformers 5",
            False,
            "re-initialises q, k, v at random after a warning (quantized: fails, or reads unset memory)",
        ),
        Verdict("SGLang 0.5", False, "fails with KeyError on fused Qwen names (sglang issue 13214)"),
        Verdict("llama.cpp", False, "its converter expects separate q, k, v; unfuse first"),
    ),
)

QUANTIZED_EMBEDDING = Notice(
    "quantized embedding",
    "the embedding is quantized, which not every loader reads:",
    (
        Verdict("qconvert", True, "decodes it"),
        Verdict(
            "vLLM 0.33", True, "symmetric group or channel integers whose bits divide 32; not for a tied head"
        ),
        Verdict(
            "transformers 5", False, "fails: AttributeError, 'Embedding' object has no attribute 'weight'"
        ),
        Verdict("SGLang 0.5", False, "reads plain embeddings only"),
    ),
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
        Verdict("transformers 5", False, "packs nn.Linear alone; these linears come up uninitialised"),
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

# Families whose classes in transformers look at `module.weight` while they load or run.
_LOOK_AT_WEIGHTS = frozenset({"falcon", "rwkv", "t5"})
UNPACKED = Notice(
    "class that looks at weights",
    "this family's class in transformers looks at the weights of linears, which packed ones have not:",
    (
        Verdict("qconvert", True, "decodes it"),
        Verdict(
            "transformers 5",
            True,
            "only with quantization_config=CompressedTensorsConfig(run_compressed=False)",
        ),
    ),
)


def notices(
    outputs: Mapping[str, ModelTensor], architecture: Architecture, layout: str = "compressed-tensors"
) -> list[Notice]:
    """What to say about a planned output in this layout, before the work starts."""
    found = []
    fused = architecture.fused
    if any(n in fused and not (e := fused[n].fusion).native and not e.per_expert for n in outputs):
        found.append(FUSED)
    packed = any(isinstance(t.encoding, AffineInt) for t in outputs.values())
    if packed and _LOOK_AT_WEIGHTS & set(architecture.family.model_types):
        found.append(UNPACKED)
    quantized = [t for t in outputs.values() if isinstance(t.encoding, Quantized)]
    if any(t.name in architecture.stored_shapes for t in quantized if len(t.shape) == 2):
        found.append(INPUT_MAJOR)
    stacks = [fused[n].fusion for n in outputs if n in fused and fused[n].fusion.per_expert]
    if any(not fusion.native and not fusion.layout for fusion in stacks):
        found.append(STACKED)
    native = {p.name for e in fused.values() if e.fusion.native and e.fusion.per_expert for p in e.members}
    if any(t.name in native for t in quantized):
        found.append(APART)
    if any(
        _is_embedding(name, architecture) for name, t in outputs.items() if isinstance(t.encoding, AffineInt)
    ):
        found.append(QUANTIZED_EMBEDDING)
    zeros = any(isinstance(t.encoding, AffineInt) and not t.encoding.symmetric for t in outputs.values())
    if zeros and layout == "compressed-tensors":
        found.append(ASYMMETRIC)
    return found


def _is_embedding(name: str, architecture: Architecture) -> bool:
    parameter = architecture.parameter(name)
    return parameter is not None and parameter.kind == "embedding"


def notice_lines(found: Iterable[Notice]) -> list[str]:
    """All notices as text lines."""
    return [line for notice in found for line in notice.lines]
