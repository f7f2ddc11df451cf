"""Stores the layout of FP8 checkpoints, as published for DeepSeek-V3 and Qwen3 in blocks.

A quantized `X.weight` [N, K] is `X.weight` F8_E4M3 [N, K] and `X.weight_scale_inv` [ceil(N/128),
ceil(K/128)], f32, bf16 or (`scale_fmt` ue8m0) F8_E8M0, which is multiplied by, whatever its name says. A
stack of experts is a parameter `X` [E, N, K] with `X_scale_inv`, as transformers' `FP8Experts` has it.
DeepSeek-V4's own files call the scales `X.scale`, and hold experts as E2M1 codes, two in each int8 of
`X.weight` [N, K/2], with E8M0 scales [N, K/32]: MXFP4 under another name.

Without `weight_block_size`, a whole weight has one scale, [] or [1]: Ministral 3 and Devstral 2 call it
`X.weight_scale_inv` and that of the inputs `X.activation_scale`, AutoFP8 `X.weight_scale`, `X.input_scale`.
Sources: transformers 5.23 (`integrations/finegrained_fp8.py`), llama.cpp's `DeepseekV4Model` (conversion),
vLLM 0.32 (`quantization/fp8.py`), config.json of Qwen3-8B-FP8, DeepSeek-V3.2 and V4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from qconvert.core.activations import NO_SCALES, ActivationScheme, ScalesBeside, StoredScale
from qconvert.core.dtypes import FLOAT_DTYPES, DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import CodebookScheme, LayoutTraits, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, PassThrough, Promise, RegisteredLayout
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.scales_beside import cache_scale
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Op, Transcode

NAME = "fp8"
BLOCK = 128
STATIC_SCALE = "activation_scale"
_SCALES, _OWN_SCALES = "weight_scale_inv", "scale"
# AutoFP8's names, which vLLM took over.
_SCALE, _INPUT_SCALE = "weight_scale", "input_scale"
_BLOCKS = "weight_block_size"
_MX = 32
_POWERS_OF_TWO = "ue8m0"
_FORMATS = ("e4m3", "float8_e4m3fn")  # DeepSeek's name, and MiniMax's

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

    `powers_of_two` says that all scales are, those that loaders give inputs too, whatever type stores them;
    `scales` is what the array of scales is called after its module. `one` is the shape of the scale of a
    whole weight, and `static` says that scales of inputs are stored, too.
    """

    traits = TRAITS

    def __init__(
        self,
        powers_of_two: bool = False,
        scales: str = _SCALES,
        one: tuple[int, ...] = (),
        *,
        static: bool = False,
    ) -> None:
        self.powers_of_two = powers_of_two
        self.scales = scales
        self.one = one
        self.static = static

    @property
    def input_scale(self) -> str:
        """What the scale of a linear's inputs is called after its module."""
        return _INPUT_SCALE if self.scales == _SCALE else STATIC_SCALE

    def coded(self, tensor: ModelTensor) -> CodedArrays:
        """The arrays of a tensor; stacks of experts have transformers' names."""
        scales = self.scales if tensor.name.endswith("weight") else _SCALES
        return CodedArrays("weight", scales, words=DType.I8, bare_exponents=False)

    def arrays(self, tensor: ModelTensor, encoding: Codebook) -> tuple[TensorSpec, ...]:
        codes, scales, *number = self.coded(tensor).stored_arrays(tensor)
        return (
            codes,
            scales if encoding.group_rows is not None else replace(scales, shape=self.one),
            *number,
        )

    def rows(self, tensor: ModelTensor, encoding: Codebook) -> int:
        """The rows of a block share its scales."""
        return self.coded(tensor).row_alignment(tensor)

    def store(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterable[ArrayRows]:
        return self.coded(tensor).encode(tensor, start, value)

    def load(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        return self.coded(tensor).decode(tensor, source, rows.start, rows.stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return self.settings_beside(quantized, kept, NO_SCALES)

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        blocks = {name: e for name, e in quantized.items() if not _is_mxfp4(e)}
        encoding = checks.only_encoding(blocks, NAME)
        whole = isinstance(encoding, Codebook) and encoding.group_rows is None
        scheme = "static" if scales.inputs else "dynamic"
        if self.scales == _SCALE and whole:
            said = {"quant_method": NAME, "activation_scheme": scheme, "ignored_layers": sorted(kept)}
            return {"quantization_config": said}
        settings = {
            "quant_method": NAME,
            "fmt": "e4m3",
            "activation_scheme": scheme,
            _BLOCKS: None if whole else [BLOCK, encoding.group_size],
            "modules_to_not_convert": sorted(kept) or None,
        }
        exponents = any(e.scale_dtype is DType.F8_E8M0 for e in quantized.values())
        if self.powers_of_two or exponents:
            settings["scale_fmt"] = _POWERS_OF_TWO
        return {"quantization_config": settings}

    def scale_stored_as(self, name: str) -> StoredScale | None:
        """Those of a linear's inputs, and of an attention's cache."""
        module, _, kind = name.rpartition(".")
        return StoredScale("inputs", module) if kind == self.input_scale else cache_scale(name)

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        """Those of a cache; of inputs where the source has them, elsewhere they are scaled as they come."""
        if scale.of == "inputs":
            whole = self.static and isinstance(weight, Codebook) and weight.group_rows is None
            name = f"{scale.module}.{self.input_scale}"
            return TensorSpec(name, DType.F32, self.one) if whole else None
        return TensorSpec(f"{scale.module}.{scale.of[0]}_scale", DType.F32, (1,))


def _block(settings: Json) -> tuple[int, int] | None:
    """The rows and columns that share a scale, None for a whole weight.

    UnsupportedModel where that is not how FP8 is stored.
    """
    block = settings.get(_BLOCKS)
    square = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not (square or block is None) or (settings.get("fmt") or _FORMATS[0]) not in _FORMATS:
        raise UnsupportedModel(
            f"config.json: fp8 with fmt {shown(settings.get('fmt'))} and weight_block_size {shown(block)} is "
            "not read here",
            "save it again as e4m3 in blocks such as [128, 128], which are read",
        )
    return None if block is None else (block[0], block[1])


def open_fp8(source: Source, config: Json) -> tuple[FP8, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name."""
    settings = checks.settings_of(config)
    block = _block(settings)
    scheme = settings.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModel(
            f"config.json: activation_scheme {shown(scheme)} is not read here",
            "dynamic and static ones are read",
        )
    suffix = _suffix(source)
    quantized = list(_quantized(source, block, checks.dtype_of(config), suffix))
    one = _shape_of_one(source, suffix) if block is None else ()
    layout = FP8(settings.get("scale_fmt") == _POWERS_OF_TWO, suffix, one, static=scheme == "static")
    scales = [f"{checks.base_of(t)}.{layout.input_scale}" for t in quantized] if layout.static else []
    for name in scales:
        if checks.require(source, name, "activation_scheme is static").count != 1:
            raise CorruptCheckpoint(f"{name}: not one number, but activation_scheme is static", checks.APART)
    scales += [name for name in source.specs if cache_scale(name) is not None]
    return checks.gathered(layout, source, quantized, suffix, beside=scales)


def _suffix(source: Source) -> str:
    """What the array of a weight's scales is called after its module."""
    ends = (_OWN_SCALES, _SCALES, _SCALE)
    return next((end for end in ends if any(n.endswith(f".{end}") for n in source.specs)), _SCALES)


def _shape_of_one(source: Source, suffix: str) -> tuple[int, ...]:
    """The shape of a weight's one scale, which is that of all."""
    first = next((spec for name, spec in source.specs.items() if name.endswith(f".{suffix}")), None)
    return (1,) if first is not None and first.shape == (1,) else ()


def _is_mxfp4(encoding: Quantized) -> bool:
    return isinstance(encoding, Codebook) and encoding.is_mxfp4


def _quantized(
    source: Source, block: tuple[int, int] | None, decoded: DType, suffix: str
) -> Iterator[ModelTensor]:
    per, width = block or (None, None)
    for name, spec in source.specs.items():
        of_module = name.endswith("weight")
        scales_name = name.removesuffix("weight") + suffix if of_module else f"{name}_scale_inv"
        if spec.dtype is DType.I8 and scales_name in source.specs:
            shape = (*spec.shape[:-1], 2 * spec.shape[-1])
            yield ModelTensor(name, shape, Codebook("e2m1", _MX, DType.F8_E8M0, decoded))
        if spec.dtype is not DType.F8_E4M3:
            continue
        scales = checks.require(source, scales_name, f"{name} is {spec.dtype.label}")
        kinds = (*FLOAT_DTYPES, DType.F8_E8M0)
        if len(spec.shape) not in (2, 3) or scales.dtype not in kinds:
            raise CorruptCheckpoint(
                f"{scales.name}: {scales.dtype.label} scales of {list(spec.shape)} weights"
            )
        if block is None and len(spec.shape) == 3:
            raise UnsupportedModel(
                f"{name}: a stack of FP8 experts with one scale for each is not read here",
                "start from a model whose experts are apart, or that has blocks of [128, 128]",
            )
        encoding = Codebook("e4m3", width, scales.dtype, decoded, group_rows=per)
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
    encoding, settings = tensor.encoding, checks.settings_of(config)
    if settings.get("activation_scheme") == "static":
        stored = STATIC_SCALE if _BLOCKS in settings else _INPUT_SCALE  # AutoFP8 has no such key
        return ActivationScheme(8, True, "tensor", dynamic=False, stored=(stored,))
    if settings.get(_BLOCKS) is None:
        return ActivationScheme(8, True, "token")
    size = encoding.group_size if isinstance(encoding, Codebook) and not encoding.is_mxfp4 else BLOCK
    exponents = settings.get("scale_fmt") == _POWERS_OF_TWO
    return ActivationScheme(8, True, "group", size, scale_dtype=DType.F8_E8M0 if exponents else DType.F32)


def _promise(config: Json) -> Promise:
    """All linears of the layers that are not named as left plain; the head never (DeepSeek-V3, Qwen3)."""
    settings, decoded = checks.settings_of(config), checks.dtype_of(config)
    rows, columns = _block(settings) or (None, None)
    kept = checks.left_plain(settings.get("modules_to_not_convert") or settings.get("ignored_layers"))

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> Codebook | None:
        if kind != "linear" or kept(tensor):
            return None
        if config.get("expert_dtype") == "fp4" and ".experts." in tensor.name:  # DeepSeek-V4
            if settings.get("moe_quant_algo") == "NVFP4":  # as ModelOpt writes them beside its FP8
                return Codebook("e2m1", 16, DType.F8_E4M3, decoded, second="multiplied")
            return Codebook("e2m1", _MX, DType.F8_E8M0, decoded)
        return Codebook("e4m3", columns, DType.F32, decoded, group_rows=rows)

    note = "config.json does not name the type of the FP8 scales: counted as float32"
    return Promise(FP8(settings.get("scale_fmt") == _POWERS_OF_TWO), encoding, note)


def _like(config: Json) -> FP8:
    """The layout with powers of two for scales where a config.json says so."""
    return FP8(checks.settings_of(config).get("scale_fmt") == _POWERS_OF_TWO)


LAYOUTS = (RegisteredLayout(TRAITS, FP8, open_fp8, _transcode, _activations, promise=_promise, like=_like),)
