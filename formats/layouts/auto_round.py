"""Stores what AutoRound exports in its own format: integers in the words of GPTQ or of AWQ.

`packing_format` says which: `auto_round:auto_gptq` is GPTQ's v1 and `auto_round` and `auto_round:gptqmodel`
its v2, both without g_idx unless it is stored; `auto_round:auto_awq` is AWQ's gemm. `extra_config` has the
settings of single modules, by name or regular expression; a module of 16 bits or more is plain. MXFP4 is in
the arrays of compressed-tensors (`auto_round:llm_compressor`), and is read as that, as are exports for
llm-compressor, which say that they are compressed-tensors. Sources: auto-round 0.16
(`export/export_to_autoround`), and folders written by it; vLLM (`quantization/auto_round.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    SGLANG_GPTQ,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    with_packages,
)
from qconvert.core.protocols import Layout, Source
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.awq import AWQ
from qconvert.formats.layouts.base import MatrixKind, Promise, RegisteredLayout
from qconvert.formats.layouts.compressed_tensors.activations import activations
from qconvert.formats.layouts.compressed_tensors.promised import promise
from qconvert.formats.layouts.compressed_tensors.reading import open_compressed_tensors
from qconvert.formats.layouts.gptq import GPTQ, promised_integers
from qconvert.formats.layouts.gptq_dynamic import Claims, ModuleSettings
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode

NAME = "auto-round"
BITS = (2, 3, 4, 8)
_READ_BITS = (2, 3, 4, 5, 6, 7, 8)
_WORD = 32
_AWQ_BITS = _EXLLAMA_BITS = 4
_PLAIN_BITS = 16
_OWN, _AWQ = "auto_round", "auto_round:auto_awq"
# GPTQ's versions by the packings that they are.
_VERSIONS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 2, _OWN: 2}
# What auto-round takes for other packings (`inference/convert_model.py`).
_OTHER_NAMES = {
    "auto": "auto_round:auto_gptq",
    "auto_round:gptq": "auto_round:auto_gptq",
    "auto_round:awq": _AWQ,
}

# Of packings that store zeros as they are.
_OTHER_TRAITS = LayoutTraits(
    NAME,
    method="AutoRound",
    integers=IntegerSchemes(BITS),
    scale_dtype=DType.F16,
    symmetric_zeros=True,
    experts="apart",
    readers=("vllm", "sglang", "transformers"),
    marlin=True,
    loads="vLLM, and transformers with auto-round, load",
    serve="vllm serve",
    limits=(
        LoaderLimit(
            ("vllm",),
            "error",
            "vLLM runs symmetric AutoRound of 4 and 8 bits only",
            "`qconvert convert --to compressed-tensors`",
            lambda e: isinstance(e, AffineInt) and (not e.symmetric or e.bits not in (4, 8)),
        ),
        with_packages("transformers", "auto-round"),
        SGLANG_GPTQ,
        LoaderLimit(("sglang",), "note", "SGLang 0.5 has its GPTQ kernels on CUDA only", about="model"),
    ),
)
TRAITS = replace(
    _OTHER_TRAITS,
    limits=(
        *_OTHER_TRAITS.limits,
        # Of auto-round 0.16's backends (`inference/backend.py`), those that take zeros less one.
        LoaderLimit(
            ("transformers",),
            "needs",
            "auto-round multiplies zero points that are stored less one only with ExLlamaV2, on CUDA",
            "pip install gptqmodel, or `qconvert convert --to gptq_v2`",
            lambda e: isinstance(e, AffineInt) and not e.symmetric and e.bits == _EXLLAMA_BITS,
            needs="gptqmodel's ExLlamaV2 on CUDA",
        ),
        LoaderLimit(
            ("transformers",),
            "error",
            "auto-round has no kernel for zero points of {bits} bits that are stored less one",
            "`qconvert convert --to gptq_v2`",
            lambda e: isinstance(e, AffineInt) and not e.symmetric and e.bits != _EXLLAMA_BITS,
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class AutoRound(GPTQ):
    """Stores weights in GPTQ's words, by default without g_idx and with zeros less one.

    A `new` one becomes AutoRound's own packing where a weight has zero points: its loaders take those that
    are stored less one nowhere but on CUDA (auto-round 0.16, `inference/backend.py`).
    """

    groupless: bool = True
    packing: str = "auto_round:auto_gptq"
    new: bool = False

    @property
    def traits(self) -> LayoutTraits:
        return TRAITS if self.version == 1 else _OTHER_TRAITS

    def fitted(self, encodings: Iterable[Quantized]) -> Layout:
        zeros = (isinstance(encoding, AffineInt) and not encoding.symmetric for encoding in encodings)
        return replace(self, version=2, packing=_OWN) if self.new and any(zeros) else self

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return {"quantization_config": _settings(quantized, kept, self.packing)}


class AutoRoundAWQ(AWQ):
    """Stores weights in AWQ's words; it has no state."""

    traits = replace(_OTHER_TRAITS, packs="rows")

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return {"quantization_config": _settings(quantized, kept, _AWQ)}


def _settings(quantized: Mapping[str, Quantized], kept: list[str], packing: str) -> Json:
    """The settings of most modules, and `extra_config` for the others, a head, and linears left plain."""
    settings = {module: _setting(encoding) for module, encoding in quantized.items()}
    usual = checks.most_common(settings.values())
    extra: Json = {module: own for module, own in settings.items() if own != usual or module == "lm_head"}
    extra |= {module: {"bits": _PLAIN_BITS} for module in kept if module != "lm_head"}
    return {
        "quant_method": NAME,
        **usual,
        "packing_format": packing,
        **({"extra_config": extra} if extra else {}),
    }


def _setting(encoding: Quantized) -> Json:
    assert isinstance(encoding, AffineInt)
    return {
        "bits": encoding.bits,
        "group_size": encoding.group_size or -1,
        "sym": encoding.symmetric,
        "data_type": "int",
    }


def open_auto_round(source: Source, config: Json) -> tuple[Layout, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names array and key where shapes and quantization_config disagree; UnsupportedModel
    is raised for packings of other kinds than integers.
    """
    settings = checks.settings_of(config)
    packing = _packing(settings)
    if _is_mxfp4(settings):
        return open_compressed_tensors(source, _as_compressed(settings))
    own = Claims(_by_module(settings))
    bases = [name.removesuffix(".qweight") for name in source.specs if name.endswith(".qweight")]
    if packing == _AWQ:
        awq = AutoRoundAWQ()
        return checks.gathered(awq, source, (_awq(base, source, own) for base in bases), "qweight", NAME)
    groupless = not any(f"{base}.g_idx" in source.specs for base in bases)
    layout = AutoRound(_VERSIONS[packing], groupless, packing=packing)
    return checks.gathered(layout, source, (_gptq(base, source, own) for base in bases), "qweight", NAME)


def _packing(settings: Json) -> str:
    """How the codes are packed; UnsupportedModel for packings that are not read."""
    packing = str(settings.get("packing_format") or "auto_round:auto_gptq")
    packing = _OTHER_NAMES.get(packing, packing)
    integers = packing in (_AWQ, *_VERSIONS) and settings.get("data_type", "int") == "int"
    if not (integers or _is_mxfp4(settings)):
        raise UnsupportedModel(
            f"config.json: AutoRound's packing_format {shown(packing)!r} with data_type "
            f"{shown(settings.get('data_type'))} is not read here",
            f"export it as {', '.join([*_VERSIONS, _AWQ])}, or for llm_compressor, which are read",
        )
    return packing


def _is_mxfp4(settings: Json) -> bool:
    kind = (settings.get("packing_format"), settings.get("data_type"), settings.get("bits"))
    return kind == ("auto_round:llm_compressor", "mx_fp", 4)


def _as_compressed(settings: Json) -> Json:
    """The settings of MXFP4 as compressed-tensors has them."""
    args = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    }
    inputs = {**args, "dynamic": True} if settings.get("act_bits") == args["num_bits"] else None
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
    return {"quantization_config": {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}}


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """MXFP4, where that is said; inputs of linears with integers stay as they are."""
    settings = checks.settings_of(config)
    return activations(_as_compressed(settings), tensor) if _is_mxfp4(settings) else None


def _by_module(settings: Mapping[str, object]) -> Json:
    """The settings as GPTQModel has them, with those of single modules as `dynamic`."""
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict):
        raise CorruptCheckpoint(
            f"config.json: quantization_config: extra_config is {shown(extra)}, not an object",
            "correct quantization_config",
        )
    mine = {key: settings.get(key) for key in ("bits", "group_size")}
    return {**mine, "sym": settings.get("sym", True), "dynamic": extra}


def _gptq(base: str, source: Source, claims: Claims) -> ModelTensor:
    """A weight in GPTQ's words: its bits are told by its zeros, as no g_idx need be there."""
    why = f"{base}.qweight is there"
    qweight = _words(source, f"{base}.qweight", "it holds codes of AutoRound")
    qzeros = _words(source, f"{base}.qzeros", why)
    scales = checks.part(source, f"{base}.scales", why, dims=(2,))
    rows = qweight.shape[1]
    bits, rest = divmod(qzeros.shape[1] * _WORD, rows)
    width, more = divmod(qweight.shape[0] * _WORD, bits or 1)
    if rest or more or bits not in _READ_BITS:
        raise CorruptCheckpoint(
            f"{qzeros.name}: {qzeros.dtype.label} {list(qzeros.shape)} holds no zeros of 2 to 8 bits for "
            f"{rows} rows of {list(qweight.shape)}",
            checks.APART,
        )
    if bits not in claims.bits:
        raise checks.contradiction(qweight.name, f"codes of {bits} bits", "bits", checks.listed(claims.bits))
    size = checks.group_size(scales, width, claims.group_sizes)
    _check_order(base, source, width, scales.shape[0])
    # A layer's output adds products up, and a sum that begins with +0 never becomes -0.
    encoding = AffineInt(bits, size, claims.symmetric(base), scales.dtype, signless_zero=True)
    return ModelTensor(f"{base}.weight", (rows, width), encoding)


def _words(source: Source, name: str, why: str) -> TensorSpec:
    return checks.part(source, name, why, dims=(2,), dtypes=(DType.I32,))


def _check_order(base: str, source: Source, width: int, groups: int) -> None:
    """Raise where a stored g_idx moves columns, which AutoRound never does."""
    name = f"{base}.g_idx"
    if name not in source.specs:
        return
    checks.part(source, name, f"{base}.qweight is there", dims=(1,), dtypes=(DType.I32,))
    if not source.has_weights:
        return
    import numpy as np

    order_I = source.read(name, 0, source.specs[name].count).ravel()
    if not np.array_equal(order_I, np.arange(width) // max(1, width // groups)):
        raise UnsupportedModel(
            f"{name}: its columns are in activation order, which AutoRound does not write",
            "say quant_method gptq in config.json if GPTQ wrote this",
        )


def _awq(base: str, source: Source, claims: Claims) -> ModelTensor:
    qweight = _words(source, f"{base}.qweight", "it holds codes of AutoRound")
    scales = checks.part(source, f"{base}.scales", f"{base}.qweight is there", dims=(2,))
    width, rows = qweight.shape[0], qweight.shape[1] * _WORD // _AWQ_BITS
    if scales.shape[1] != rows:
        raise UnsupportedModel(
            f"{qweight.name}: {list(qweight.shape)} and {scales.shape[1]} scales: not 4 bits, which AWQ's "
            "words are read with here",
            "export it as auto_round:auto_gptq, which is read with 2 to 8 bits",
        )
    size = checks.group_size(scales, width, claims.group_sizes)
    encoding = AffineInt(_AWQ_BITS, size, claims.symmetric(base), scales.dtype)
    return ModelTensor(f"{base}.weight", (rows, width), encoding)


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = to_integers(tensor, encoding)
    if made.bits not in BITS or any(size * made.bits % _WORD for size in tensor.shape):
        raise refused(
            tensor, f"of shape {list(tensor.shape)} does not fill AutoRound's words (2, 3, 4, 8 bits)"
        )
    check_column_order(tensor, made, NAME)
    return (*ops, Transcode("cast_scales", DType.F16))


def _promise(config: Json) -> Promise:
    """All linears of the layers but those that `extra_config` gives 16 bits; a head that it names."""
    settings = checks.settings_of(config)
    packing = _packing(settings)
    if _is_mxfp4(settings):
        return promise(config | _as_compressed(settings))
    own = _by_module(settings)
    own["lm_head"] = "lm_head" in own["dynamic"]
    modules = ModuleSettings(own)
    plain = {m for m, each in own["dynamic"].items() if isinstance(each, dict) and each.get("bits", 0) > 8}

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> AffineInt | None:
        return None if checks.base_of(tensor) in plain else promised_integers(modules, tensor, kind)

    layout = AutoRoundAWQ() if packing == _AWQ else AutoRound(_VERSIONS[packing], packing=packing)
    return Promise(layout, encoding)


def _new() -> AutoRound:
    return AutoRound(new=True)


LAYOUTS = (RegisteredLayout(TRAITS, _new, open_auto_round, _transcode, _activations, promise=_promise),)
