"""Stores the layouts of bitsandbytes: NF4 and FP4 blocks, their absmax plain or nested, and int8 rows.

A 4-bit `X.weight` [N, K] is `X.weight` uint8 [N*K/2, 1], the flat codes two to a byte, the first one
high; `X.weight.absmax` f32 [N*K/blocksize]; `X.weight.quant_map` f32 [16]; and the JSON bytes
`X.weight.quant_state.bitsandbytes__nf4`. Nested, absmax is uint8 [nb] and stands for
`nested_quant_map[code] * nested_absmax[block / 256] + nested_offset`. An int8 weight is `X.weight` int8
[N, K] with `X.SCB` f32 [N], the largest magnitude of each row. Source: bitsandbytes 0.50
(`functional.py`: QuantState, dequantize_4bit, int8_vectorwise_dequant).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    PLAIN_HEAD,
    CodebookScheme,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, PassThrough, Promise, RegisteredLayout
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Op, Transcode

if TYPE_CHECKING:
    import numpy as np

NAME = "bitsandbytes"
BLOCK = 64
_NESTED_BLOCK = 256
_THRESHOLD = 6.0
_LONGEST_NUMBER = 24  # characters of a float64 as Python writes it: -1.2345678901234567e-123
_DEQUANTIZE = "dequantize it with bitsandbytes, and convert what that saves"
_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _four_bit(name: str, table: str, *, nested: bool = False) -> CodebookScheme:
    return CodebookScheme(name, Codebook(table, BLOCK, DType.F32, DType.BF16), nested=nested)


TRAITS = LayoutTraits(
    NAME,
    integers=IntegerSchemes((8,), (), asymmetric=False),
    codebooks=(
        _four_bit("nf4", "nf4"),
        _four_bit("fp4", "fp4"),
        _four_bit("nf4-nested", "nf4", nested=True),
        _four_bit("fp4-nested", "fp4", nested=True),
        # Weights are rounded to half precision before they become int8 (`Int8Params`).
        CodebookScheme("int8", Codebook("int8", None, DType.F32, DType.BF16), cast_first=DType.F16),
    ),
    default_codebook=True,
    experts="apart",
    readers=("vllm", "sglang", "transformers"),
    own_kernels=True,
    loads="transformers with bitsandbytes, and vLLM, load",
    limits=(
        with_packages("vllm", "vllm-bnb-plugin"),  # since 0.28 (vllm#43529)
        with_packages("transformers", "bitsandbytes", "accelerate"),
        LoaderLimit(
            ("transformers",),
            "error",
            "transformers finds no module for experts in {layout}",
            "`qconvert convert --to compressed-tensors`",
            about="experts",
        ),
        PLAIN_HEAD,
    ),
    schemes="nf4, fp4, nf4-nested, fp4-nested and int8-channel",
)


class BitsAndBytes(PassThrough[Codebook, CodebookRows]):
    """Stores weights as bitsandbytes' arrays; it has no state."""

    traits = TRAITS

    def arrays(self, tensor: ModelTensor, encoding: Codebook) -> tuple[TensorSpec, ...]:
        name = tensor.name
        checks.matrix_shape(tensor, NAME)
        if encoding.table == "int8":
            base = name.removesuffix(".weight")
            return (
                TensorSpec(name, DType.I8, tensor.shape),
                TensorSpec(f"{base}.SCB", DType.F32, tensor.shape[:1]),
                TensorSpec(f"{base}.weight_format", DType.U8, ()),
            )
        blocks = tensor.rows * encoding.groups(tensor.width)
        nested = encoding.second == "nested"
        made = [
            TensorSpec(name, DType.U8, (tensor.count // 2, 1)),
            TensorSpec(f"{name}.absmax", DType.U8 if nested else DType.F32, (blocks,)),
            TensorSpec(f"{name}.quant_map", DType.F32, (16,)),
        ]
        if nested:
            made.append(TensorSpec(f"{name}.nested_absmax", DType.F32, (-(-blocks // _NESTED_BLOCK),)))
            made.append(TensorSpec(f"{name}.nested_quant_map", DType.F32, (256,)))
        made.append(TensorSpec(f"{name}{_STATE}{encoding.table}", DType.U8, (len(_state(tensor)),)))
        return tuple(made)

    def rows(self, tensor: ModelTensor, encoding: Codebook) -> int:
        """Blocks never span rows of the weights that are written here, but runs of nested scales do."""
        from qconvert.quant.nested_scales import rows_together

        return rows_together(tensor.width) if encoding.second == "nested" else 1

    def store(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterator[ArrayRows]:
        import numpy as np

        from qconvert.quant.codebook import TABLES
        from qconvert.quant.nested_scales import TABLE as NESTED_TABLE
        from qconvert.quant.nibbles import pack_nibbles

        codes, scales, *others = self.stored_arrays(tensor)
        if value.encoding.table == "int8":
            yield ArrayRows(codes.name, start, value.codes_RI.view(np.int8))
            yield ArrayRows(scales.name, start, value.scales_RG)
            if start == 0:
                yield ArrayRows(others[0].name, 0, np.zeros((1, 1), np.uint8))
            return
        table, *upper, state = others
        packed = pack_nibbles(value.codes_RI, high_first=True)
        blocks = start * value.scales_RG.shape[1]
        stored_RG = value.nested.codes_RG if value.nested else value.scales_RG
        yield ArrayRows(codes.name, start * packed.shape[1], packed.reshape(-1, 1))
        yield ArrayRows(scales.name, blocks, stored_RG.reshape(-1, 1))
        if value.nested:
            yield ArrayRows(upper[0].name, blocks // _NESTED_BLOCK, value.nested.upper_B.reshape(-1, 1))
        if start == 0:
            state_bytes = _state(tensor, value.nested.offset if value.nested else 0.0)
            yield ArrayRows(table.name, 0, TABLES[value.encoding.table].reshape(-1, 1))
            yield ArrayRows(state.name, 0, np.frombuffer(state_bytes, np.uint8).reshape(-1, 1))
            if value.nested:
                yield ArrayRows(upper[1].name, 0, NESTED_TABLE.reshape(-1, 1))

    def load(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        """Read rows back; nested scales come resolved, as float32."""
        from qconvert.quant.nibbles import unpack_nibbles

        name, width, start, stop = tensor.name, tensor.width, rows.start, rows.stop
        if encoding.table == "int8":
            scales_R1 = source.read(f"{name.removesuffix('.weight')}.SCB", start, stop)
            return CodebookRows(source.read(name, start, stop).view("u1"), scales_R1, encoding)
        bytes_RB = source.read(name, start * width // 2, stop * width // 2).reshape(stop - start, width // 2)
        groups = encoding.groups(width)
        scales_B = _scales(tensor, source, start * groups, stop * groups)
        return CodebookRows(
            unpack_nibbles(bytes_RB, high_first=True), scales_B.reshape(stop - start, groups), encoding
        )

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        encoding = checks.only_encoding(quantized, NAME)
        assert isinstance(encoding, Codebook)
        eight = encoding.table == "int8"
        settings = {
            "quant_method": NAME,
            "_load_in_4bit": not eight,
            "_load_in_8bit": eight,
            "load_in_4bit": not eight,
            "load_in_8bit": eight,
            "bnb_4bit_compute_dtype": "float32" if eight else _NAMES[encoding.decoded],
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "fp4" if eight else encoding.table,
            "bnb_4bit_use_double_quant": encoding.second == "nested",
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": sorted(kept) or None,
            "llm_int8_threshold": _THRESHOLD,
        }
        return {"quantization_config": settings}


def _state(tensor: ModelTensor, offset: float = 0.0) -> bytes:
    """The bytes of quant_state, written as bitsandbytes writes them.

    With an offset of nested scales, spaces fill them up: their number must not depend on the weights.
    """
    encoding = tensor.encoding
    assert isinstance(encoding, Codebook)
    state: Json = {
        "quant_type": encoding.table,
        "blocksize": encoding.group_size,
        "dtype": _NAMES[encoding.decoded],
        "shape": list(tensor.shape),
    }
    if encoding.second is None:
        return json.dumps(state).encode()
    nested = {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    room = len(json.dumps(state | nested | {"nested_offset": ""})) + _LONGEST_NUMBER
    return json.dumps(state | nested).ljust(room).encode()


def _scales(tensor: ModelTensor, source: Source, first: int, last: int) -> np.ndarray:
    import numpy as np

    encoding, name = tensor.encoding, tensor.name
    assert isinstance(encoding, Codebook)
    stored = source.read(f"{name}.absmax", first, last).ravel()
    if encoding.second != "nested":
        return stored
    offset = np.float32(_stored_state(source, name, encoding.table)["nested_offset"])
    table = source.read(f"{name}.nested_quant_map", 0, 256).ravel()
    per_block = source.read(
        f"{name}.nested_absmax", first // _NESTED_BLOCK, -(-last // _NESTED_BLOCK)
    ).ravel()
    nested = per_block[np.arange(first, last) // _NESTED_BLOCK - first // _NESTED_BLOCK]
    return np.asarray(table[stored] * nested + offset)


def _stored_state(source: Source, name: str, table: str) -> Json:
    from qconvert.formats.io.strict_json import parse_json_object

    array = f"{name}{_STATE}{table}"
    spec = source.specs[array]
    if spec.dtype is not DType.U8 or len(spec.shape) != 1 or spec.count > 4096:
        raise CorruptCheckpoint(f"{array}: {spec.dtype.label} {list(spec.shape)} is not a quantization state")
    return parse_json_object(source.read(array, 0, spec.count).tobytes(), array)


def open_bitsandbytes(source: Source, config: Json) -> tuple[BitsAndBytes, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names the array where shapes, quant_state and code book disagree.
    """
    found: dict[str, ModelTensor] = {}
    used: set[str] = set()
    for array in source.specs:
        name, state, table = array.rpartition(_STATE)
        if state:
            found[name] = _four_bits(name, table, source)
        elif array.endswith(".SCB"):
            name = array.removesuffix(".SCB") + ".weight"
            found[name] = _int8(name, source, config)
        else:
            continue
        used |= {array, *(spec.name for spec in BitsAndBytes().stored_arrays(found[name]))}
    found = checks.plain_rest(source, used, found)
    checks.check_claimed(found, NAME, "quant_state and no SCB")
    return BitsAndBytes(), found


def _four_bits(name: str, table: str, source: Source) -> ModelTensor:
    import numpy as np

    from qconvert.quant.codebook import TABLES

    state = _stored_state(source, name, table)
    shape, block, dtype = state.get("shape"), state.get("blocksize"), _DTYPES.get(str(state.get("dtype")))
    sizes = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)
    if not sizes or type(block) is not int or block < 2 or dtype is None or table not in ("nf4", "fp4"):
        raise CorruptCheckpoint(f"{name}{_STATE}{table}: {shown(state)} is not a quantization state")
    assert isinstance(shape, list)
    if shape[1] % block:
        raise UnsupportedModel(
            f"{name}: blocks of {block} span rows of {shape[1]} columns, which is not read here", _DEQUANTIZE
        )
    nested = "nested_blocksize" in state
    offset = state.get("nested_offset")
    if nested and (state["nested_blocksize"] != _NESTED_BLOCK or type(offset) is not float):
        raise UnsupportedModel(
            f"{name}{_STATE}{table}: nested absmax {shown(state)} is not read here", _DEQUANTIZE
        )
    encoding = Codebook(table, block, DType.F32, dtype, second="nested" if nested else None)
    tensor = ModelTensor(name, (shape[0], shape[1]), encoding)
    for spec in BitsAndBytes().stored_arrays(tensor):
        stored = checks.require(source, spec.name, f"{encoding.label} of shape {shape} needs it")
        if "quant_state" not in spec.name and _of(stored) != _of(spec):
            raise CorruptCheckpoint(
                f"{spec.name}: {stored.dtype.label} {list(stored.shape)}, but {encoding.label} of shape "
                f"{shape} needs {spec.dtype.label} {list(spec.shape)}",
                checks.APART,
            )
    if not np.array_equal(source.read(f"{name}.quant_map", 0, 16).ravel(), TABLES[table]):
        raise UnsupportedModel(
            f"{name}.quant_map: is not the code book of {table}",
            "save it again with a bitsandbytes of 0.39 or later, whose code book is read",
        )
    return tensor


def _of(spec: TensorSpec) -> tuple[DType, int, int]:
    """What of an array decides how it is read: [n] and [n, 1] are alike, [1, n] is not."""
    return spec.dtype, spec.rows, spec.width


def _int8(name: str, source: Source, config: Json) -> ModelTensor:
    weight = checks.part(source, name, "its SCB is there", dims=(2,), dtypes=(DType.I8,))
    tensor = ModelTensor(name, weight.shape, Codebook("int8", None, DType.F32, checks.dtype_of(config)))
    for spec in BitsAndBytes().stored_arrays(tensor):
        stored = checks.require(source, spec.name, f"{name} is int8")
        if _of(stored) != _of(spec):
            raise CorruptCheckpoint(
                f"{spec.name}: {stored.dtype.label} {list(stored.shape)} beside int8 {list(weight.shape)}",
                checks.APART,
            )
    order = f"{name.removesuffix('.weight')}.weight_format"
    if source.has_weights and source.read(order, 0, 1)[0, 0] != 0:
        raise UnsupportedModel(
            f"{order}: rows in a tiled order are not read here", "save it again, row by row"
        )
    return tensor


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.table in ("nf4", "fp4", "int8"):
        return ()
    rows = isinstance(encoding, AffineInt) and encoding.group_size is None and encoding.symmetric
    if rows and encoding.bits == 8:
        return (Transcode("to_int8_rows", encoding.decoded),)
    raise refused(tensor, "is not one of bitsandbytes' grids (nf4, fp4, and int8 with one scale per row)")


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """LLM.int8 multiplies int8 rows, but for columns with large numbers (arXiv 2208.07339)."""
    if not isinstance(tensor.encoding, Codebook) or tensor.encoding.table != "int8":
        return None
    threshold = checks.settings_of(config).get("llm_int8_threshold", _THRESHOLD)
    above = float(threshold) if isinstance(threshold, int | float) and threshold > 0 else inf
    return ActivationScheme(8, False, "token", outliers=above)


def _promise(config: Json) -> Promise:
    """All linears that the settings do not skip; the head is skipped where they name none to skip."""
    settings, decoded = checks.settings_of(config), checks.dtype_of(config)
    skipped, table = settings.get("llm_int8_skip_modules"), settings.get("bnb_4bit_quant_type", "fp4")
    kept = checks.left_plain(skipped)
    four = settings.get("load_in_4bit", settings.get("_load_in_4bit")) is True
    if four and table not in ("nf4", "fp4"):
        raise UnsupportedModel(
            f"config.json: bnb_4bit_quant_type {shown(table)} is not read here", "nf4 and fp4 are read"
        )
    second = "nested" if settings.get("bnb_4bit_use_double_quant") is True else None
    rows = Codebook("int8", None, DType.F32, decoded)
    made = Codebook(str(table), BLOCK, DType.F32, decoded, second=second) if four else rows

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> Codebook | None:
        plain = kind == "head" and skipped is None
        fits = kind in ("linear", "head") and not plain and len(tensor.shape) == 2
        return made if fits and not kept(tensor) else None

    return Promise(BitsAndBytes(), encoding)


LAYOUTS = (
    RegisteredLayout(TRAITS, BitsAndBytes, open_bitsandbytes, _transcode, _activations, promise=_promise),
)
