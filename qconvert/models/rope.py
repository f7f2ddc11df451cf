"""Reads the settings of rotary position embeddings from config.json, for the decoder and for GGUF keys.

Covers `rope_parameters` (transformers 5, one set or one per layer type) and the older `rope_scaling` and
`rope_theta`. Pure: what the frequencies are is computed in `qconvert.runtime.rope`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qconvert.core.config_json import positive_int
from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, a ramp lies between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over dimensions; `attention_factor` multiplies cos and sin."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): divisors of each frequency, `short` up to the original context.

    `attention_factor` multiplies cos and sin.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    attention_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Gemma 4: of all pairs only the first `share` are rotated, each as slowly as in a whole head.

    Frequencies are divided by `factor`.
    """

    share: float
    factor: float


Scaling = ProportionalScaling | LinearScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first `share` of each head's dimensions.

    Pairs are dimensions (i, i + half), or neighbours (2i, 2i + 1) where `interleaved`.
    """

    theta: float
    scaling: Scaling | None
    share: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.share)


def rope_fields(settings: Json, layer_type: str = "full_attention") -> Json:
    """The parameters as config.json has them, with `rope_type` and `rope_theta` filled in.

    Of models with one set per layer type, those of `layer_type`. Raises CorruptCheckpoint for
    parameters that are no object.
    """
    stated = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if isinstance(stated, dict) and isinstance(stated.get(layer_type), dict):
        stated = stated[layer_type]
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(f"config.json: rope_scaling is {stated!r}, not an object")
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "mrope":  # Qwen2-VL's published word: sections of the dimensions, and no scaling
        kind = "default"
    theta = stated.get("rope_theta", settings.get("rope_theta"))
    return {**stated, "rope_type": kind, "rope_theta": 10000.0 if theta is None else theta}


def local_rope_settings(settings: Json) -> Json | None:
    """The settings of layers with a sliding window, where they have a rope of their own; None elsewhere."""
    base = settings.get("rope_local_base_freq")
    plain = {**settings, "rope_theta": settings.get("rope_theta") if base is None else base}
    stated = settings.get("rope_parameters")
    if isinstance(stated, dict) and isinstance(stated.get("sliding_attention"), dict):
        return {**plain, "rope_parameters": stated["sliding_attention"]}
    return None if base is None else {**plain, "rope_parameters": None, "rope_scaling": None}


def read_rope(settings: Json, *, interleaved: bool = False) -> Rope:
    """The rotary embedding of a model, or of its layers with full attention.

    Raises UnsupportedModel for a scaling that is not computed here, CorruptCheckpoint for numbers that
    make none.
    """
    fields = rope_fields(settings)
    kind = str(fields["rope_type"] or "default")
    if kind not in _SCALINGS or any(isinstance(value, dict) for value in fields.values()):
        raise UnsupportedModel(
            f"config.json: rope_type {kind!r} with {fields}, which may differ by layer",
            f"llama.cpp may run it (`qconvert to-gguf`); here known: {', '.join(_SCALINGS)}",
        )
    theta = _positive(fields, "rope_theta")
    if theta <= 1:
        raise CorruptCheckpoint(
            f"config.json: rope_theta is {theta}", "correct it: rope_theta must be above 1"
        )
    context = settings.get("max_position_embeddings")
    length = settings.get("original_max_position_embeddings")
    length = length or fields.get("original_max_position_embeddings")
    lengths = {"max_position_embeddings": context, "original_max_position_embeddings": length or context}
    share = _positive({**settings, **fields}, "partial_rotary_factor", 1.0)
    if share > 1:
        raise CorruptCheckpoint(f"config.json: partial_rotary_factor is {share}, more than a whole head")
    scaling = _SCALINGS[kind]({**fields, **lengths, "partial_rotary_factor": share})
    return Rope(theta, scaling, 1.0 if isinstance(scaling, ProportionalScaling) else share, interleaved)


def _positive(fields: Json, key: str, default: float | None = None) -> float:
    """A positive number that float32 holds; the default stands in for an absent or null one."""
    value = default if fields.get(key) is None else fields[key]
    number = positive_number(value)
    if number is None:
        raise CorruptCheckpoint(
            f"config.json: {key} is {shown(repr(value))}", f"correct it: {key} must be a positive number"
        )
    return number


def _llama3(fields: Json) -> Llama3Scaling:
    low, high = _positive(fields, "low_freq_factor"), _positive(fields, "high_freq_factor")
    if low >= high:
        raise CorruptCheckpoint(f"config.json: low_freq_factor {low} is not below high_freq_factor {high}")
    original = positive_int(fields, "original_max_position_embeddings")
    return Llama3Scaling(_positive(fields, "factor"), low, high, original)


def _stretch(fields: Json, original: int) -> float:
    """`factor`, or how much longer the context is than the original one."""
    context = fields.get("max_position_embeddings") or original
    return _positive(fields, "factor", context / original)


def _yarn(fields: Json) -> YarnScaling:
    original = positive_int(fields, "original_max_position_embeddings")
    factor = _stretch(fields, original)
    return YarnScaling(
        factor=factor,
        attention_factor=_positive(fields, "attention_factor", _yarn_attention(fields, factor)),
        beta_fast=_positive(fields, "beta_fast", 32.0),
        beta_slow=_positive(fields, "beta_slow", 1.0),
        original_context=original,
        truncate=bool(fields.get("truncate", True)),
    )


def _yarn_attention(fields: Json, factor: float) -> float:
    """The temperature; for DeepSeek's two `mscale` fields, the quotient of two of them."""
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        above, below = (_positive(fields, key) for key in ("mscale", "mscale_all_dim"))
        return _temperature(factor, above) / _temperature(factor, below)
    return _temperature(factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    """`0.1 m ln(factor) + 1`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_temperature(settings: Json) -> float:
    """What latent attention multiplies its scores by under YaRN: the square of the temperature of all
    dimensions (transformers' `yarn_apply_mscale`); 1 where config.json states none."""
    fields = rope_fields(settings)
    if fields["rope_type"] in (None, "default") or not fields.get("mscale_all_dim"):
        return 1.0
    factor, mscale = _positive(fields, "factor"), _positive(fields, "mscale_all_dim")
    return _temperature(factor, mscale) ** 2


def _long(fields: Json) -> LongScaling:
    original = positive_int(fields, "original_max_position_embeddings")
    factor = _stretch(fields, original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    short, long = (_divisors(fields, key) for key in ("short_factor", "long_factor"))
    return LongScaling(short, long, _positive(fields, "attention_factor", grown), original)


def _divisors(fields: Json, key: str) -> tuple[float, ...]:
    values = fields.get(key)
    if not isinstance(values, list):
        raise CorruptCheckpoint(
            f"config.json: {key} is not a list of divisors", "fetch the model's config.json again"
        )
    numbers = {f"{key}[{i}]": value for i, value in enumerate(values)}
    return tuple(_positive(numbers, each) for each in numbers)


_SCALINGS: Mapping[str, Callable[[Json], Scaling | None]] = {
    "default": lambda fields: None,
    "linear": lambda fields: LinearScaling(_positive(fields, "factor")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
    "su": _long,
    "proportional": lambda fields: ProportionalScaling(
        _positive(fields, "partial_rotary_factor"), _positive(fields, "factor", 1.0)
    ),
}
