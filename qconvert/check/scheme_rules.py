"""Checks schemes: which linears must have the same one, and what a loader makes of others.

Sources: vLLM 0.32 and GPTQModel 7.7, tried on outputs of every layout; transformers 5.23 with optimum 2.3 and
with compressed-tensors 0.20, tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from qconvert.check.subject import COMPUTED, ERROR, FUSING, NEEDS, NOTE, WARNING, Problem, Subject
from qconvert.core.dtypes import DType
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Codebook,
    Encoding,
    ModelTensor,
    Quantized,
    Unquantized,
)
from qconvert.plan.loader_notices import mixed_experts

_DEQUANTIZING = "CompressedTensorsConfig(dequantize=True)"


def _one_setting(s: Subject) -> Iterator[Problem]:
    """Loaders that know one setting for all linears of the layers, and no other linear."""
    if s.loader not in s.traits.one_setting or not s.quantized:
        return
    found = Counter(replace(e, scale_dtype=DType.F16) for _, _, e in s.quantized if isinstance(e, AffineInt))
    usual = next((encoding for encoding, _ in found.most_common(1)), None)
    for parameter, tensor in s.weights:
        encoding = tensor.encoding
        linear = parameter.kind == "linear" and parameter.role != "mlp.router"
        if linear and parameter.layer is None and isinstance(encoding, Quantized):
            fact = f"{s.loader} reads no quantized head in {s.layout}: it is left with random numbers"
            yield Problem(ERROR, tensor.name, fact, "--keep lm_head, or convert --to compressed-tensors")
        elif linear and parameter.layer is not None and isinstance(encoding, Unquantized):
            fact = (
                f"{s.loader} expects all linears of the layers quantized in {s.layout}, and this one is not"
            )
            yield Problem(ERROR, tensor.name, fact, "`qconvert convert --to compressed-tensors`")
        elif isinstance(encoding, AffineInt) and replace(encoding, scale_dtype=DType.F16) != usual:
            fact = f"{s.loader} has one setting for all linears in {s.layout}, and this is {encoding.label}"
            yield Problem(ERROR, tensor.name, fact, "`qconvert convert --to compressed-tensors`")


def _zero_points(s: Subject) -> Iterator[Problem]:
    """transformers cannot unpack zero points."""
    if s.loader == "transformers" and s.traits.packed_zero_points:
        for parameter, tensor, encoding in s.quantized:
            if not isinstance(encoding, AffineInt) or encoding.symmetric:
                continue
            if parameter.role.startswith("mlp.experts."):  # CompressedTensorsDequantize stacks them without
                fact = "transformers does not load packed zero points of experts"
                yield Problem(ERROR, tensor.name, fact, "a scheme without zero points, or serve with vLLM")
            else:
                yield _dequantized(s, tensor, "packed zero points")


def _embeddings(s: Subject) -> Iterator[Problem]:
    """Quantized tables."""
    if s.loader == "mlx":
        return
    for parameter, tensor, encoding in s.quantized:
        if parameter.kind != "embedding":
            continue
        fits = isinstance(encoding, AffineInt) and encoding.symmetric and 32 % encoding.bits == 0
        if s.loader == "transformers" and s.traits.packed_zero_points:
            yield _dequantized(s, tensor, "quantized embeddings")
        elif s.loader != "vllm" or not fits or s.architecture.tied:
            fact = f"{s.loader} does not load an embedding quantized like this ({encoding.label})"
            yield Problem(ERROR, tensor.name, fact, "keep the embedding plain")


def _dequantized(s: Subject, tensor: ModelTensor, what: str) -> Problem:
    """What transformers loads only where it dequantizes, which it does by one scheme for all weights."""
    if len({encoding for _, _, encoding in s.quantized}) > 1:
        fact = f"transformers fails on {what}, and dequantizes models of one scheme only"
        return Problem(ERROR, tensor.name, fact, "one scheme for all, or serve with vLLM")
    fact = f"transformers fails on {what}, unless it dequantizes"
    hint = f"from_pretrained(..., quantization_config={_DEQUANTIZING})"
    return Problem(NEEDS, tensor.name, fact, hint, _DEQUANTIZING)


_MLX_GROUPS = (32, 64, 128)


def _mlx_groups(s: Subject) -> Iterator[Problem]:
    """MLX multiplies integers in groups of three sizes (`mx.quantized_matmul`)."""
    if s.loader != "mlx":
        return
    for _, tensor, encoding in s.quantized:
        if isinstance(encoding, AffineInt) and (encoding.group_size or tensor.width) not in _MLX_GROUPS:
            fact = f"MLX knows groups of 32, 64 and 128 columns, and this is {encoding.label}"
            yield Problem(ERROR, tensor.name, fact, "quantize again with --group-size 128")


def _experts(s: Subject) -> Iterator[Problem]:
    """Experts of a layer are multiplied at once, and have one scheme, that of down included.

    transformers decodes all by one as it loads them, whatever theirs is.
    """
    if s.loader not in (*FUSING, "transformers"):
        return
    for name, labels in mixed_experts(s.tensors, s.architecture):
        fact = f"{s.loader} wants one scheme for all linears of experts, and there are {', '.join(labels)}"
        yield Problem(ERROR, name, fact, "give all parts of experts one scheme")


def _plain_experts(s: Subject) -> Iterator[Problem]:
    """transformers decodes the experts of a model with packed linears, and finds none in plain ones."""
    if s.loader != "transformers" or not s.traits.packed_zero_points or not s.quantized:
        return
    for parameter, tensor in s.weights:
        if parameter.role.startswith("mlp.experts.") and isinstance(tensor.encoding, Unquantized):
            fact = "transformers expects all experts packed where linears are, and these are not"
            yield Problem(ERROR, tensor.name, fact, "quantize the experts too, or serve with vLLM")


def _requantized(s: Subject) -> Iterator[Problem]:
    """Stacked parts with a scale each get one for all."""
    if s.loader != "vllm":
        return
    for entry in s.architecture.fused.values():
        parts = filter(None, (s.tensors.get(part.name) for part in entry.members))
        apart = [tensor for tensor in parts if _has_one_scale(tensor.encoding)]
        if len(apart) < 2 or entry.fusion.per_expert:
            continue
        name, stacks = entry.whole.name, f"vllm stacks its {len(apart)} parts"
        does = "takes one scale for all" if s.traits.own_kernels else "quantizes them again"
        if s.scale_of is None:
            yield Problem(NOTE, name, f"{stacks}, and {does} unless they have one scale")
            continue
        scales = set(map(s.scale_of, apart))
        if len(scales) > 1:
            fact = f"{stacks}, whose scales are {min(scales):.3g} to {max(scales):.3g}, and {does}"
            yield Problem(ERROR if s.traits.own_kernels else WARNING, name, fact, _ONE_SCALE)


_ONE_SCALE = "convert the 16-bit model with --scheme fp8-tensor, which writes one scale for them"


def _has_one_scale(encoding: Encoding) -> bool:
    return isinstance(encoding, Codebook) and encoding.table == "e4m3" and encoding.group_rows is None


def _cpu_kernels(s: Subject) -> Iterator[Problem]:
    """What vLLM's build for CPUs multiplies: int4, int8 with int8 inputs, and FP8 with a scale per row.

    With AMX also FP8 in blocks of 128 columns by a multiple of 32 rows (`kernels/linear/scaled_mm/cpu.py`);
    and what torchao and bitsandbytes multiply.
    """
    if s.loader != "vllm" or s.device != "cpu":
        return
    eight_bit_inputs = any(product.widths == "W8A8" for product in s.products)
    if s.dtype is not DType.F16 and any(product.widths == "W4A16" for product in s.products):
        fact = "on CPUs with AMX, vllm rounds inputs of int4 to 8 bits (W4A8) in bfloat16"
        yield Problem(NOTE, COMPUTED, fact, "VLLM_CPU_INT4_W4A8=0 keeps them")
    for parameter, tensor, encoding in s.quantized:
        what = encoding.label
        if parameter.kind == "embedding":
            what = f"a quantized embedding ({what})"
        elif parameter.role.startswith("mlp.experts."):
            what = f"experts in {what}"
            if _experts_with_tiles(encoding, eight_bit_inputs=eight_bit_inputs):
                yield _with_tiles(tensor, what)
                continue
        elif s.traits.own_kernels and not isinstance(encoding, AffineMin):
            continue
        elif isinstance(encoding, AffineInt):
            if encoding.bits == 4 or (encoding.bits == 8 and eight_bit_inputs):
                continue
        elif isinstance(encoding, Codebook) and encoding.table == "e4m3":
            if encoding.label == "e4m3-channel":
                continue
            if encoding.group_size == 128 and (encoding.group_rows or 1) % 32 == 0:
                yield _with_tiles(tensor, what)
                continue
        fact = f"vllm has no kernel for {what} on a CPU"
        yield Problem(ERROR, tensor.name, fact, "`qconvert convert`, or `quantize --bits 4`: int4 runs")


def _with_tiles(tensor: ModelTensor, what: str) -> Problem:
    fact = f"vllm has a kernel for {what} on CPUs with AMX only"
    return Problem(NEEDS, tensor.name, fact, "Intel's since Sapphire Rapids", "a CPU with AMX")


def _experts_with_tiles(encoding: Quantized, *, eight_bit_inputs: bool) -> bool:
    """Whether vLLM multiplies experts of this encoding with AMX (`fused_moe/experts/cpu_moe.py`)."""
    if isinstance(encoding, AffineInt):
        four = encoding.bits == 4 and encoding.group_size != 32
        return encoding.symmetric and (four or (encoding.bits == 8 and eight_bit_inputs))
    blocks = isinstance(encoding, Codebook) and (encoding.group_size, encoding.group_rows) == (128, 128)
    return blocks or (isinstance(encoding, Codebook) and encoding.is_mxfp4)


SCHEME_RULES = (
    _one_setting,
    _zero_points,
    _embeddings,
    _mlx_groups,
    _experts,
    _plain_experts,
    _requantized,
    _cpu_kernels,
)
