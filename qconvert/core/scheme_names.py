"""Translates the names of schemes in other tools: to the same scheme here, or to the nearest one.

Sources: PRESET_SCHEMES of compressed-tensors 0.20 (`quantization/quant_scheme.py`), which are
llm-compressor's names; `bnb_4bit_quant_type` of bitsandbytes' settings in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class NamedScheme:
    """A scheme of ours that is exactly what a name means; `layout` where one alone holds all of it.

    W8A8 is int8-channel with inputs rounded to 8 bits, which only the config of its layout asks for. Without
    a layout it is a scheme of integers, which any layout of integers takes.
    """

    scheme: str
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Why a name is no scheme of ours, and what to type."""

    fact: str
    hint: str


WRITTEN: Mapping[str, NamedScheme] = {
    **{f"w{bits}a16": NamedScheme(f"int{bits}-g128") for bits in range(2, 9)},
    "w4a16_asym": NamedScheme("int4-asym-g128"),
    "w8a8": NamedScheme("int8-channel", "int-quantized"),
    "fp8_dynamic": NamedScheme("fp8-channel", COMPRESSED_TENSORS),
    "fp8_block": NamedScheme("fp8-block", COMPRESSED_TENSORS),
    "nvfp4a16": NamedScheme("nvfp4", COMPRESSED_TENSORS),
    "mxfp4a16": NamedScheme("mxfp4", COMPRESSED_TENSORS),
    "nf4": NamedScheme("nf4", "bitsandbytes"),
    "fp4": NamedScheme("fp4", "bitsandbytes"),
}
_LAYOUTS: Mapping[str, str] = {
    **dict.fromkeys(("autogptq", "gptqmodel"), "gptq"),
    "autoawq": "awq",
    "autoround": "auto-round",
    **dict.fromkeys(("compressedtensors", "llmcompressor"), COMPRESSED_TENSORS),
    "bnb": "bitsandbytes",
    "mlxlm": "mlx",
}
_PLAIN = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("f16", "fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("f32", "fp32", "float32"), "f32"),
}
_UNWRITTEN: Mapping[str, Unwritten] = {
    "fp8": Unwritten(
        "llm-compressor's FP8 has input scales measured on a text, which qconvert does not write",
        "--scheme FP8_DYNAMIC: a scale for each row, inputs rounded at run time; --scheme FP8_BLOCK: a scale "
        "for 128 by 128 weights",
    ),
    "nvfp4": Unwritten(
        "llm-compressor's NVFP4 rounds inputs to 4 bits too, which qconvert does not write",
        "--scheme NVFP4A16: the same weights, inputs in 16 bits",
    ),
    "mxfp4": Unwritten(
        "llm-compressor's MXFP4 rounds inputs to 4 bits too, which qconvert does not write",
        "--scheme MXFP4A16: the same weights, inputs in 16 bits",
    ),
    **{
        name: Unwritten(f"{name} is a method, not a scheme", f"--bits 4 --method {name}")
        for name in ("awq", "gptq")
    },
    **{
        name: Unwritten("not quantized", f"`qconvert convert MODEL --to {dtype}`")
        for name, dtype in _PLAIN.items()
    },
}
_ROUNDED_INPUTS = re.compile(r"w([2-8])(a[2-8]|afp8)")
_MICROSCALED = re.compile(r"mxfp[68](a\d+)?|mxfp4xfp8")
_BITS = re.compile(r"(?:int|q|w)?([2-8])(?:_?bits?)?")
GGUF_OF_BITS = {2: "q2_k", 3: "q3_k_m", 4: "q4_k_m", 5: "q5_k_m", 6: "q6_k", 7: "q8_0", 8: "q8_0"}
# A type of llama.cpp's, of one weight or of a whole file.
_GGUF_TYPE = re.compile(r"(i?q[1-8]|tq[12])_\w+")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def layout_named(name: str) -> str | None:
    """The layout that other tools know by a name, in any case, with dashes or without; None for others."""
    return _LAYOUTS.get(_plain(name).replace("_", ""))


def named_scheme(name: str) -> NamedScheme | None:
    """The scheme that a name means exactly, in any case and with either dash; None for other names."""
    return WRITTEN.get(_plain(name))


def unwritten(name: str) -> Unwritten | None:
    """Why another tool's name for a scheme cannot be written, and what to type; None for other names."""
    if name == "INT8":  # in small letters it is ours, which leaves inputs alone
        return Unwritten(
            "llm-compressor rounds inputs to 8 bits too under this name",
            "--scheme W8A8 for that; --scheme int8 for the weights only",
        )
    plain = _plain(name)
    return _UNWRITTEN.get(plain) or _preset_with_rounded_inputs(plain) or _other_form(plain, name)


def _preset_with_rounded_inputs(plain: str) -> Unwritten | None:
    if match := _ROUNDED_INPUTS.fullmatch(plain):
        others = f"--scheme W{match[1]}A16: the same weights, inputs in 16 bits; --scheme W8A8: both in 8"
        return Unwritten("it rounds inputs too, which qconvert writes for 8-bit weights only", others)
    if _MICROSCALED.fullmatch(plain):
        return Unwritten("qconvert does not write this form", "--scheme FP8_DYNAMIC, or --scheme MXFP4A16")
    return None


def _other_form(plain: str, name: str) -> Unwritten | None:
    if _GGUF_TYPE.fullmatch(plain):
        return Unwritten("a type of GGUF files", f"`qconvert to-gguf MODEL --type {name}`")
    if (bits := bits_in(plain)) and not plain.startswith("int"):
        gguf = f"`qconvert to-gguf MODEL --type {GGUF_OF_BITS[bits]}`"
        return Unwritten("not a scheme", f"--bits {bits} (--scheme int{bits}), or for llama.cpp {gguf}")
    return None


def bits_in(name: str) -> int | None:
    """The number of bits that a word such as `4bit`, `int4` or `q4` names, if any."""
    match = _BITS.fullmatch(_plain(name))
    return int(match[1]) if match else None
