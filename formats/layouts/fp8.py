"""Stores the layout of block-scaled FP8 checkpoints, as published for DeepSeek-V3 and Qwen3.

A quantized `X.weight` [N, K] is `X.weight` F8_E4M3 [N, K] and `X.weight_scale_inv` [ceil(N/128),
ceil(K/128)], f32, bf16 or (`scale_fmt` ue8m0) F8_E8M0, which is multiplied by, whatever its name says. A
stack of experts is a parameter `X` [E, N, K] with `X_scale_inv`, as transformers' `FP8Experts` has it.
Sources: transformers 5.23 (`integrations/finegrained_fp8.py`), config.json of Qwen3-8B-FP8 and DeepSeek-V3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from qconvert.core.activations import ActivationScheme, StoredScale
from qconvert.core.dtypes import FLOAT_DTYPES, DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import CodebookScheme, LayoutTraits, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.scales_beside import cache_scale
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Op, Transcode

NAME = "fp8"
BLOCK = 128
STATIC_SCALE = "activation_scale"
_CODED = CodedArrays("weight", "weight_scale_inv", bare_exponents=False)
_POWERS_OF_TWO = "ue8m0"

TRAITS = LayoutTraits(
    NAME,
    codebooks=(CodebookScheme("fp8-block", Codebook("e4m3", BLOCK, DType.F32, DType.BF16, BLOCK)),),
    default_codebook=True,
    readers=("vllm", "sglang", "transformers"),
    stack_readers=("transformers",),
    ollama_decodes="e4m3",
    limits=(with_packages("transformers", "accelerate"),),
    loads="vLLM, SGLang and transformers load",
    serve="vllm serve",
    schemes="fp8 in blocks of 128 by 128",
)


class FP8(PassThrough[Codebook, CodebookRows]):
    """Stores weights as E4M3 arrays with a scale for each block.

    `powers_of_two` says that all scales are, those that loaders give inputs too, whatever type stores them.
    """

    traits = TRAITS

    def __init__(self, powers_of_two: bool = False) -> None:
        self.powers_of_two = powers_of_two

    def arrays(self, tensor: ModelTensor, encoding: Codebook) -> tuple[TensorSpec, ...]:
        return _CODED.stored_arrays(tensor)

    def rows(self, tensor: ModelTensor, encoding: Codebook) -> int:
        """The rows of a block share its scales."""
        return _CODED.row_alignment(tensor)

    def store(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterable[ArrayRows]:
        return _CODED.encode(tensor, start, value)

    def load(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        return _CODED.decode(tensor, source, rows.start, rows.stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        encoding = checks.only_encoding(quantized, NAME)
        settings = {
            "quant_method": NAME,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, encoding.group_size],
            "modules_to_not_convert": sorted(kept) or None,
        }
        exponents = any(e.scale_dtype is DType.F8_E8M0 for e in quantized.values())
        if self.powers_of_two or exponents:
            settings["scale_fmt"] = _POWERS_OF_TWO
        return {"quantization_config": settings}

    def scale_stored_as(self, name: str) -> StoredScale | None:
        """The scales of an attention's cache."""
        return cache_scale(name)

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        """Those of a cache; inputs are scaled as they come."""
        if scale.of == "inputs":
            return None
        return TensorSpec(f"{scale.module}.{scale.of[0]}_scale", DType.F32, (1,))


def open_fp8(source: Source, config: Json) -> tuple[FP8, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name."""
    settings = checks.settings_of(config)
    block = settings.get("weight_block_size")
    square = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not square or settings.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedModel(
            f"config.json: fp8 with fmt {shown(settings.get('fmt'))} and weight_block_size {shown(block)} is "
            "not read here",
            "save it again as e4m3 in blocks such as [128, 128], which are read",
        )
    assert isinstance(block, list)
    scheme = settings.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModel(
            f"config.json: activation_scheme {shown(scheme)} is not read here", "dynamic and static ones are"
        )
    quantized = list(_quantized(source, block, checks.dtype_of(config)))
    scales = [f"{checks.base_of(t)}.{STATIC_SCALE}" for t in quantized] if scheme == "static" else []
    for name in scales:
        if checks.require(source, name, "activation_scheme is static").count != 1:
            raise CorruptCheckpoint(f"{name}: not one number, but activation_scheme is static", checks.APART)
    scales += [name for name in source.specs if cache_scale(name) is not None]
    layout = FP8(powers_of_two=settings.get("scale_fmt") == _POWERS_OF_TWO)
    return checks.gathered(layout, source, quantized, "weight_scale_inv", beside=scales)


def _quantized(source: Source, block: list[int], decoded: DType) -> Iterator[ModelTensor]:
    for name, spec in source.specs.items():
        if spec.dtype is not DType.F8_E4M3:
            continue
        scales = checks.require(source, f"{name}_scale_inv", f"{name} is {spec.dtype.label}")
        kinds = (*FLOAT_DTYPES, DType.F8_E8M0)
        if len(spec.shape) not in (2, 3) or scales.dtype not in kinds:
            raise CorruptCheckpoint(
                f"{scales.name}: {scales.dtype.label} scales of {list(spec.shape)} weights"
            )
        encoding = Codebook("e4m3", block[1], scales.dtype, decoded, group_rows=block[0])
        yield ModelTensor(name, spec.shape, encoding)


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.table == "e4m3":
        if encoding.group_rows == encoding.group_size == BLOCK:
            return ()
        if encoding.group_rows is None:
            return (Transcode("repeat_tensor_scale", replace(encoding, group_rows=BLOCK, group_size=BLOCK)),)
    raise refused(tensor, "is not FP8 in blocks of 128 by 128, which this layout holds")


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """FP8 too: a scale for each block of columns of a row, or one that is stored."""
    if checks.settings_of(config).get("activation_scheme") == "static":
        return ActivationScheme(8, True, "tensor", dynamic=False, stored=(STATIC_SCALE,))
    size = tensor.encoding.group_size if isinstance(tensor.encoding, Codebook) else BLOCK
    exponents = checks.settings_of(config).get("scale_fmt") == _POWERS_OF_TWO
    return ActivationScheme(8, True, "group", size, scale_dtype=DType.F8_E8M0 if exponents else DType.F32)


LAYOUTS = (RegisteredLayout(TRAITS, FP8, open_fp8, _transcode, _activations),)
