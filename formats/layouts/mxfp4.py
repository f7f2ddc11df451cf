"""Stores the layout of gpt-oss: stacks of experts in MXFP4.

A stack `X` is `X_blocks` uint8 [E, N, K/32, 16] (two codes to a byte, the first one low) and `X_scales`
uint8 [E, N, K/32], exponents of two with bias 127. The logical tensor is [E, N, K], a row for each output;
transformers computes with the numbers as [E, K, N]. Rows of gate and up alternate along N and stay so.
Source: transformers 5.23 (`integrations/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import CodebookScheme, LayoutTraits, RoundingRules, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.layouts.base import MatrixKind, PassThrough, Promise, RegisteredLayout
from qconvert.formats.layouts.config_checks import gathered, require
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Op

NAME = "mxfp4"
BLOCK = 32

TRAITS = LayoutTraits(
    NAME,
    codebooks=(CodebookScheme("mxfp4", Codebook("e2m1", BLOCK, DType.F8_E8M0, DType.BF16)),),
    default_codebook=True,
    # As downcast_to_mxfp_torch of triton_kernels rounds, with which gpt-oss is made.
    rounding=RoundingRules(halves="up"),
    experts="class",
    readers=("vllm", "sglang", "transformers", "mlx"),
    stack_readers=("vllm", "sglang", "transformers", "mlx", "llama.cpp"),
    ollama_decodes="e2m1",
    limits=(with_packages("transformers", "accelerate"),),
    schemes="stacks of experts in MXFP4",
)


class MXFP4(PassThrough[Codebook, CodebookRows]):
    """Stores stacks of experts as gpt-oss's arrays; it has no state."""

    traits = TRAITS

    def arrays(self, tensor: ModelTensor, encoding: Codebook) -> tuple[TensorSpec, ...]:
        if not isinstance(encoding, Codebook) or not encoding.is_mxfp4 or len(tensor.shape) != 3:
            raise BadRecipe(
                f"{tensor.name}: {encoding.label} {list(tensor.shape)}, but gpt-oss' layout holds only "
                "stacks of experts in MXFP4",
                "convert --to compressed-tensors",
            )
        blocks = (*tensor.shape[:-1], tensor.width // BLOCK)
        return (
            TensorSpec(f"{tensor.name}_blocks", DType.U8, (*blocks, BLOCK // 2)),
            TensorSpec(f"{tensor.name}_scales", DType.U8, blocks),
        )

    def store(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterator[ArrayRows]:
        from qconvert.quant.nibbles import pack_nibbles

        blocks = tensor.width // BLOCK
        packed = pack_nibbles(value.codes_RI).reshape(-1, BLOCK // 2)
        yield ArrayRows(f"{tensor.name}_blocks", start * blocks, packed)
        yield ArrayRows(f"{tensor.name}_scales", start, value.scales_RG)

    def load(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        from qconvert.quant.nibbles import unpack_nibbles

        blocks = tensor.width // BLOCK
        bytes_BC = source.read(f"{tensor.name}_blocks", rows.start * blocks, rows.stop * blocks)
        codes_RI = unpack_nibbles(bytes_BC).reshape(-1, tensor.width)
        return CodebookRows(codes_RI, source.read(f"{tensor.name}_scales", rows.start, rows.stop), encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return {"quantization_config": {"quant_method": NAME, "modules_to_not_convert": sorted(kept)}}


def open_mxfp4(source: Source, config: Json) -> tuple[MXFP4, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the 16-bit model."""
    return gathered(MXFP4(), source, _stacks(source), "_blocks")


def _stacks(source: Source) -> Iterator[ModelTensor]:
    for array, spec in source.specs.items():
        if not array.endswith("_blocks"):
            continue
        name = array.removesuffix("_blocks")
        require(source, f"{name}_scales", f"{array} is there")
        if len(spec.shape) != 4:
            raise CorruptCheckpoint(f"{array}: {list(spec.shape)}, not [experts, outputs, blocks, 16]")
        experts, outputs, blocks, _ = spec.shape
        encoding = Codebook("e2m1", BLOCK, DType.F8_E8M0, DType.BF16)
        yield ModelTensor(name, (experts, outputs, blocks * BLOCK), encoding)


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.is_mxfp4:
        return ()
    raise refused(tensor, "is not MXFP4, which gpt-oss's layout holds its experts in")


def _promise(config: Json) -> Promise:
    """All stacks of experts, and nothing else."""

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> Codebook | None:
        stack = kind == "linear" and len(tensor.shape) == 3
        return Codebook("e2m1", BLOCK, DType.F8_E8M0, DType.BF16) if stack else None

    return Promise(MXFP4(), encoding)


LAYOUTS = (RegisteredLayout(TRAITS, MXFP4, open_mxfp4, _transcode, promise=_promise),)
