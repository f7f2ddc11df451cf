"""Stores the GPTQ layout of AutoGPTQ, GPTQModel and AutoRound, checkpoint formats `gptq` (v1) and `gptq_v2`.

A quantized `X.weight` [N, K] is stored transposed: `X.qweight` int32 [K*b/32, N] (codes of a column
packed along K, the first in the lowest bits), `X.scales` f16 [G, N], `X.qzeros` int32 [G, N*b/32]
(packed along N) and `X.g_idx` int32 [K], the group of every input column. Zeros are stored for
symmetric weights too; v1 stores each one less 1, modulo 2**b. Sources: GPTQModel 7.6
(`nn_modules/qlinear`, `utils/model.py`), and tensors written by it and by AutoRound 0.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Literal

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    RANDOM_EXPERTS,
    SGLANG_GPTQ,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows
from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, PassThrough, Promise, RegisteredLayout
from qconvert.formats.layouts.gptq_dynamic import (
    Claims,
    ModuleSettings,
    settings_of_forms,
)
from qconvert.formats.layouts.transcoding import refused, to_integers
from qconvert.ops import Op, Transcode
from qconvert.quant.packed_codes import words_of

if TYPE_CHECKING:
    import numpy as np

NAME = "gptq"
BITS = (2, 3, 4, 8)
_WORD = 32

TRAITS_V2 = LayoutTraits(
    f"{NAME}_v2",
    method="GPTQ",
    integers=IntegerSchemes(BITS),
    scale_dtype=DType.F16,
    act_order=True,
    symmetric_zeros=True,
    experts="apart",
    settings_file="quantize_config.json",
    readers=("vllm", "sglang", "transformers"),
    marlin=True,
    loads="vLLM, and transformers with GPTQModel, load",
    serve="vllm serve",
    one_setting=("transformers",),
    limits=(
        LoaderLimit(
            ("vllm",),
            "error",
            "vLLM runs symmetric GPTQ of 4 and 8 bits only",
            "`qconvert convert --to compressed-tensors`",
            lambda e: isinstance(e, AffineInt) and (not e.symmetric or e.bits not in (4, 8)),
        ),
        LoaderLimit(
            ("vllm",),
            "error",
            "vLLM refuses desc_act unless group_size is -1",
            "quantize without desc_act",
            lambda e: isinstance(e, AffineInt) and e.act_order and e.group_size is not None,
        ),
        LoaderLimit(
            ("vllm",),
            "error",
            "vllm looks for the parts of this fused GPTQ linear, and treats it as an unquantized one",
            "`qconvert unfuse`, or convert --to compressed-tensors",
            about="fused",
        ),
        with_packages("transformers", "optimum", "gptqmodel"),
        RANDOM_EXPERTS,
        SGLANG_GPTQ,
        LoaderLimit(("sglang",), "note", "SGLang 0.5 has its GPTQ kernels on CUDA only", about="model"),
    ),
)
TRAITS = replace(
    TRAITS_V2,
    name=NAME,
    limits=(
        *TRAITS_V2.limits,
        LoaderLimit(
            ("transformers",),
            "note",
            "GPTQModel's own loader reads zero points only in gptq_v2; transformers reads these",
            "`qconvert convert --to gptq_v2`",
            lambda e: isinstance(e, AffineInt) and not e.symmetric,
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class GPTQ(PassThrough[AffineInt, AffineIntRows]):
    """Stores weights as GPTQ's arrays. `version` 1 stores zeros less one; `groupless` has no g_idx."""

    version: int = 1
    groupless: bool = False
    transposed: bool = True
    named_by: Literal["module"] = "module"

    @property
    def traits(self) -> LayoutTraits:
        return TRAITS if self.version == 1 else TRAITS_V2

    def arrays(self, tensor: ModelTensor, encoding: AffineInt) -> tuple[TensorSpec, ...]:
        rows, width = checks.matrix_shape(tensor, self.name)
        groups, base = encoding.groups(width), checks.base_of(tensor)
        made = (
            TensorSpec(f"{base}.qweight", DType.I32, (width * encoding.bits // _WORD, rows)),
            TensorSpec(f"{base}.scales", encoding.scale_dtype, (groups, rows)),
            TensorSpec(f"{base}.qzeros", DType.I32, (groups, rows * encoding.bits // _WORD)),
        )
        return made if self.groupless else (*made, TensorSpec(f"{base}.g_idx", DType.I32, (width,)))

    def rows(self, tensor: ModelTensor, encoding: AffineInt) -> int:
        """Zeros of several rows share a word."""
        return _WORD // gcd(encoding.bits, _WORD)

    def store(self, tensor: ModelTensor, start: int, value: AffineIntRows) -> Iterator[ArrayRows]:
        import numpy as np

        from qconvert.quant.simd.transpose import transposed

        bits, base = value.encoding.bits, checks.base_of(tensor)
        if self.version == 1 and value.zeros_RG is not None and (value.zeros_RG == 0).any():
            raise BadRecipe(
                f"{tensor.name}: has zeros of 0, which {self.name} (v1) stores as -1; not every loader "
                "undoes that",
                "convert --to gptq_v2",
            )
        yield ArrayRows(f"{base}.qweight", 0, transposed(words_of(value)), column=start)
        yield ArrayRows(f"{base}.scales", 0, transposed(value.scales_RG), column=start)
        yield ArrayRows(f"{base}.qzeros", 0, self._zero_words(value), column=start * bits // _WORD)
        if start == 0 and not self.groupless:
            in_order_I = np.arange(value.width) // (value.encoding.group_size or value.width)
            order_I = in_order_I.astype(np.int32) if value.groups_I is None else value.groups_I
            yield ArrayRows(f"{base}.g_idx", 0, order_I.reshape(-1, 1))

    def load(self, tensor: ModelTensor, encoding: AffineInt, source: Source, rows: range) -> AffineIntRows:
        """Read rows back; CorruptCheckpoint for zeros that symmetric integers cannot have."""
        from qconvert.quant.simd.transpose import transposed

        base, width, columns = checks.base_of(tensor), tensor.width, (rows.start, rows.stop)
        words_WR = source.read(f"{base}.qweight", 0, width * encoding.bits // _WORD, columns=columns)
        scales_GR = source.read(f"{base}.scales", 0, encoding.groups(width), columns=columns)
        zeros_RG = self._zeros(tensor, source, rows.start, rows.stop)
        order_I = source.read(f"{base}.g_idx", 0, width).ravel() if encoding.act_order else None
        return AffineIntRows(transposed(words_WR), transposed(scales_GR), zeros_RG, encoding, order_I)

    def _zeros(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> np.ndarray | None:
        """The true zeros of rows [start, stop), uint8 [rows, groups]; None for symmetric integers."""
        encoding = tensor.encoding
        assert isinstance(encoding, AffineInt)
        aligned = start - start % self.row_alignment(tensor)
        columns = (aligned * encoding.bits // _WORD, -(-stop * encoding.bits // _WORD))
        words_GW = source.read(
            f"{checks.base_of(tensor)}.qzeros", 0, encoding.groups(tensor.width), columns=columns
        )
        if encoding.symmetric and (words_GW == self._middle_words(encoding.bits, words_GW.shape[1])).all():
            return None
        from qconvert.quant.simd.packing import unpack_stream
        from qconvert.quant.simd.transpose import transposed

        stored_GR = unpack_stream(words_GW, encoding.bits, stop - aligned)[:, start - aligned :]
        zeros_RG = transposed(self._shifted(stored_GR, encoding.bits, 1))
        if not encoding.symmetric:
            return zeros_RG
        middle = 1 << (encoding.bits - 1)
        if (zeros_RG != middle).any():
            raise CorruptCheckpoint(
                f"{checks.base_of(tensor)}.qzeros: holds a zero of {zeros_RG[zeros_RG != middle][0]}, but "
                f"quantization_config says sym true, where all are {middle}",
                f"set sym to false, or correct checkpoint_format (read as version {self.version})",
            )
        return None

    def _zero_words(self, value: AffineIntRows) -> np.ndarray:
        """The zeros of all groups as they are stored, int32 [groups, rows * bits / 32]."""
        import numpy as np

        bits, (rows, groups) = value.encoding.bits, value.scales_RG.shape
        if value.zeros_RG is None:
            return np.tile(self._middle_words(bits, rows * bits // _WORD), (groups, 1))
        from qconvert.quant.simd.packing import pack_stream
        from qconvert.quant.simd.transpose import transposed

        return pack_stream(transposed(self._shifted(value.zeros_RG, bits, -1)), bits)

    def _middle_words(self, bits: int, count: int) -> np.ndarray:
        """The first words of a stream of middle codes, as symmetric weights store them: int32 [count]."""
        import numpy as np

        middle = (1 << (bits - 1)) - (self.version == 1)
        period = sum(middle << bits * i for i in range(_WORD)).to_bytes(4 * bits, "little")
        return np.resize(np.frombuffer(period, "<i4"), count)

    def _shifted(self, zeros: np.ndarray, bits: int, by: int) -> np.ndarray:
        return (zeros + by % 256) & ((1 << bits) - 1) if self.version == 1 else zeros

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        settings = {
            "quant_method": NAME,
            **settings_of_forms(quantized, kept),
            "lm_head": "lm_head" in quantized,
            "checkpoint_format": self.name,
            "pack_dtype": "int32",
            "meta": {"quantizer": ["qconvert"]},
        }
        return {"quantization_config": settings}


def _version(settings: Json) -> int:
    """1 or 2, by the checkpoint format; UnsupportedModel for another one."""
    version = str(settings.get("checkpoint_format") or settings.get("format") or NAME)
    if version not in (NAME, f"{NAME}_v2"):
        raise UnsupportedModel(
            f"config.json: GPTQ checkpoint_format {shown(version)!r} is not read here",
            "save it again as gptq or gptq_v2, which are read",
        )
    return 2 if version.endswith("v2") else 1


def open_gptq(source: Source, config: Json) -> tuple[GPTQ, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names array and key where shapes, g_idx and quantization_config disagree.
    """
    settings = checks.settings_of(config)
    version = _version(settings)
    bases = [name.removesuffix(".qweight") for name in source.specs if name.endswith(".qweight")]
    groupless = bool(bases) and not any(f"{base}.g_idx" in source.specs for base in bases)
    layout = GPTQ(version, groupless)
    claims, orders = Claims(settings), _Orders(source, settings)
    found = (_logical(base, source, claims, orders) for base in bases)
    return checks.gathered(layout, source, found, "qweight", NAME)


def _logical(base: str, source: Source, claims: Claims, orders: _Orders) -> ModelTensor:
    why = f"{base}.qweight is there"
    qweight = checks.part(source, f"{base}.qweight", "it holds codes of GPTQ", dims=(2,), dtypes=(DType.I32,))
    scales = checks.part(source, f"{base}.scales", why, dims=(2,))
    if f"{base}.g_idx" in source.specs:
        checks.part(source, f"{base}.g_idx", why, dims=(1,), dtypes=(DType.I32,))
    bits, width = _bits(base, qweight, source, claims.bits)
    size = checks.group_size(scales, width, claims.group_sizes)
    act_order = orders.is_own(f"{base}.g_idx", width, scales.shape[0])
    # A layer's output adds products up, and a sum that begins with +0 never becomes -0.
    encoding = AffineInt(bits, size, claims.symmetric(base), scales.dtype, act_order, signless_zero=True)
    return ModelTensor(f"{base}.weight", (qweight.shape[-1], width), encoding)


def _bits(base: str, qweight: TensorSpec, source: Source, said: list[object]) -> tuple[int, int]:
    """Bits per code and input columns, which g_idx tells; without one the config's bits are taken."""
    g_idx = source.specs.get(f"{base}.g_idx")
    if not set(said) <= set(BITS):
        raise UnsupportedModel(
            f"{qweight.name}: bits {shown(checks.listed(said))} is not read here",
            "save it again with 2, 3, 4 or 8 bits, which are read",
        )
    width = g_idx.count if g_idx is not None else qweight.shape[0] * _WORD // int(str(said[0]))
    bits = qweight.shape[0] * _WORD // width if width else 0
    if bits not in BITS or qweight.shape[0] * _WORD != width * bits:
        raise CorruptCheckpoint(
            f"{qweight.name}: {list(qweight.shape)} holds no whole number of bits for {width} input columns",
            checks.APART,
        )
    if bits not in said:
        raise checks.contradiction(qweight.name, f"codes of {bits} bits", "bits", checks.listed(said))
    return bits, width


class _Orders:
    """Determines from each g_idx whether the columns are in another order than that of their groups."""

    def __init__(self, source: Source, settings: Json) -> None:
        self._source, self._settings, self._is_read = source, settings, source.has_weights
        self._in_order: set[tuple[bytes, int]] = set()  # few of very many differ

    def is_own(self, name: str, width: int, groups: int) -> bool:
        if name not in self._source.specs or not self._is_read:
            return checks.claim(self._settings, "desc_act", bool, default=False) is True
        order_I = self._source.read(name, 0, width).ravel()
        alike = order_I.tobytes(), groups
        if alike in self._in_order:
            return False
        import numpy as np

        if width and not 0 <= order_I.min() <= order_I.max() < groups:
            column = int(np.flatnonzero((order_I < 0) | (order_I >= groups))[0])
            raise CorruptCheckpoint(f"{name}: column {column} is in group {order_I[column]} of {groups}")
        if (order_I != np.arange(width) // max(1, width // groups)).any():
            return True
        self._in_order.add(alike)
        return False


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = to_integers(tensor, encoding)
    if made.bits not in BITS or any(size * made.bits % _WORD for size in tensor.shape):
        raise refused(tensor, f"of shape {list(tensor.shape)} does not fill GPTQ's words (2, 3, 4, 8 bits)")
    return (*ops, Transcode("cast_scales", DType.F16))


def _promise(config: Json) -> Promise:
    """All linears of the layers, by `dynamic` where it says more; the head where the settings say so."""
    settings = checks.settings_of(config)
    layout = GPTQ(_version(settings))
    return Promise(layout, partial(promised_integers, ModuleSettings(settings)))


def promised_integers(modules: ModuleSettings, tensor: ModelTensor, kind: MatrixKind) -> AffineInt | None:
    """The encoding that settings of GPTQ promise of a matrix; None where they leave it plain."""
    own = modules.of(checks.base_of(tensor))
    head = kind == "head" and checks.claim(modules.settings, "lm_head", bool, default=False) is True
    if own is None or not (kind == "linear" or head):
        return None
    bits = checks.claim(own, "bits", int)
    if bits not in BITS:
        raise UnsupportedModel(
            f"config.json: GPTQ with bits {shown(bits)} is not read here",
            "save it again with 2, 3, 4 or 8 bits, which are read",
        )
    assert isinstance(bits, int)
    size = checks.said_group(tensor, checks.claim(own, "group_size", int, -1))
    symmetric = checks.claim(own, "sym", bool, default=False) is True
    act_order = checks.claim(own, "desc_act", bool, default=False) is True
    return AffineInt(bits, size, symmetric, DType.F16, act_order, signless_zero=True)


LAYOUTS = (
    RegisteredLayout(TRAITS, GPTQ, open_gptq, _transcode, promise=_promise),
    RegisteredLayout(TRAITS_V2, lambda: GPTQ(2), None, _transcode),
)
