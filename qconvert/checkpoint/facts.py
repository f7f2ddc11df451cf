"""Gathers what a plan has to know of a source's bytes, before planning."""

from __future__ import annotations

from dataclasses import replace
from math import frexp
from typing import TYPE_CHECKING

from qconvert.core.activations import StoredScale
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Unquantized
from qconvert.core.values import AffineIntRows, CodebookRows, DenseRows, Value
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.config_checks import settings_of
from qconvert.formats.layouts.scales_beside import cache_format
from qconvert.plan.facts import HeadDifference, SourceFacts
from qconvert.plan.passes.tie import compares_head

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.models import Binding
    from qconvert.plan.request import Request

# Weights that are looked at together.
_BLOCK_WEIGHTS = 1 << 21


def gather_facts(checkpoint: Checkpoint, binding: Binding, request: Request) -> SourceFacts:
    """The facts that this request depends on; most requests depend on none, and then nothing is read."""
    scales = scales_beside(checkpoint)
    cached = any(scale.of != "inputs" for scale, _ in scales)
    cache = cache_format(settings_of(checkpoint.config), has_scales=cached)
    facts = SourceFacts(scales=scales, cache_format=cache)
    target = request.layout_target
    if compares_head(request, binding):
        facts = replace(facts, head=compare_head(checkpoint))
    if request.undo_act_order:
        facts = replace(facts, column_groups=column_groups(checkpoint))
    if target is not None and target.traits.absorbs_divisor:
        absorbable = {t.name for t in checkpoint.tensors.values() if can_absorb_divisor(checkpoint, t)}
        facts = replace(facts, absorbable_divisors=frozenset(absorbable))
    return facts


def scales_beside(checkpoint: Checkpoint) -> tuple[tuple[StoredScale, ModelTensor], ...]:
    """The arrays beside the weights of a quantized model that scale the inputs of linears, or caches."""
    if registry.claimed_by(checkpoint.config) is None:
        return ()
    named = (
        (checkpoint.layout.scale_stored_as(name), spec)
        for name, spec in checkpoint.files.specs.items()
        if spec.count == 1 and spec.dtype.is_float
    )
    return tuple(
        (scale, ModelTensor(spec.name, spec.shape, Unquantized(spec.dtype)))
        for scale, spec in named
        if scale is not None
    )


def compare_head(checkpoint: Checkpoint) -> HeadDifference:
    """How the stored head differs from the embedding, in the numbers that both stand for."""
    from qconvert.quant.casts import compare

    architecture, reader = checkpoint.architecture, checkpoint.reader
    embed, head = architecture.table("embed"), architecture.table("lm_head")
    assert embed is not None and head is not None
    a, b = checkpoint.tensors[embed.name], checkpoint.tensors[head.name]
    found = [
        compare(numbers_of(reader.read(a, start, stop)), numbers_of(reader.read(b, start, stop)))
        for start, stop in _blocks(a)
    ]
    differing = sum(part.count - part.equal_count for part in found)
    return HeadDifference(
        sum(part.count for part in found), differing, max((part.max_abs for part in found), default=0.0)
    )


def numbers_of(value: Value) -> DenseRows:
    """The numbers a value stands for: quantized ones in the dtype they are computed to."""
    from qconvert.quant.dequantize import numbers

    if isinstance(value, DenseRows):
        return value
    return numbers(value, getattr(value.encoding, "decoded", DType.F32))


def column_groups(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The group of every column, by name, of all weights in activation order."""
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor.encoding, AffineInt) and tensor.encoding.act_order:
            value = checkpoint.reader.read(tensor, 0, 1)
            assert isinstance(value, AffineIntRows) and value.groups_I is not None
            found[name] = tuple(int(group) for group in value.groups_I)
    return found


def can_absorb_divisor(checkpoint: Checkpoint, tensor: ModelTensor) -> bool:
    """Whether every block scale of an NVFP4 weight is still an E4M3 number when it is divided.

    No other divisor than a power of two does that to all scales; with one, they are looked at.
    """
    from qconvert.quant.transcode import fold_divisor

    encoding = tensor.encoding
    if not (isinstance(encoding, Codebook) and encoding.is_nvfp4 and encoding.has_tensor_number):
        return False
    first = checkpoint.reader.read(tensor, 0, 1)
    assert isinstance(first, CodebookRows)
    number = first.divisor if first.factor is None else first.factor
    if not number or frexp(number)[0] != 0.5:
        return False
    blocks = (checkpoint.reader.read(tensor, start, stop) for start, stop in _blocks(tensor))
    return all(isinstance(block, CodebookRows) and fold_divisor(block) is not None for block in blocks)


def _blocks(tensor: ModelTensor) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_WEIGHTS // max(1, tensor.width))
    return [(start, min(start + step, tensor.rows)) for start in range(0, tensor.rows, step)]
