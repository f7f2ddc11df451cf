"""Names the outputs that clients are to read: every layout that is written, by the command that writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from evals.client_mixture import mixture

_GGUF = ("llama.cpp",)
_FOLDERS = ("vllm", "transformers", "mlx-lm")
_GPTQ = (*_FOLDERS, "gptqmodel")
_HQQ = ("transformers-4",)


@dataclass(frozen=True, slots=True)
class Subject:
    """One output: the words after `qconvert` that make it of a model, and who is to read it.

    `source` is the subject it is made of, "" for the model itself. `change` alters its files afterwards,
    as a tool of others would have written them. `origin` makes it of the model's folder, without qconvert.
    """

    name: str
    words: str
    clients: tuple[str, ...] = _FOLDERS
    source: str = ""
    change: Callable[[Path], None] | None = None
    origin: Callable[[Path, Path], None] | None = None


def _shuffled(folder: Path) -> None:
    """Give every linear of a GPTQ folder columns in an order of activations (`desc_act`)."""
    path = folder / "model.safetensors"
    arrays = load_file(path)
    draw = np.random.default_rng(0)
    for name in arrays:
        if name.endswith(".g_idx"):
            arrays[name] = draw.permutation(arrays[name])
    save_file(arrays, path, {"format": "pt"})


def _packed() -> list[Subject]:
    schemes = ("int4", "int4-asym", "int4-g32", "int4-asym-g64", "int4-channel", "int4-asym-channel",
               "int8", "int8-asym", "int8-channel", "int2", "int3", "int5", "int6-asym", "int7")  # fmt: skip
    found = [Subject(f"compressed-tensors {scheme}", f"quantize --scheme {scheme}") for scheme in schemes]
    more = {
        "int4 f16": "--bits 4 --dtype f16",
        "int4 f32": "--bits 4 --dtype f32",
        "int4, untied": "--bits 4 --untie",
        "int4, int4 head": "--bits 4 --untie --rule lm_head=int4-g128",
        "int4-asym, int4-asym head": "--scheme int4-asym --untie --rule lm_head=int4-asym-g128",
        "int4, int8 head": "--bits 4 --untie --rule lm_head=int8-g128",
        "int4, int4 embedding": "--bits 4 --untie --rule embed=int4-g128",
        "int4, int4 embedding, tied": "--bits 4 --rule embed=int4-g128",
        "int4, down int8": "--bits 4 --rule mlp.down=int8-g128",
        "int4, down int4-asym": "--bits 4 --rule mlp.down=int4-asym-g64",
        "int4, one plain": "--bits 4 --keep layers.0.mlp.down",
        "int4, fused": "--bits 4 --fuse qkv --fuse gate_up",
        "int4-asym, fused": "--scheme int4-asym-g64 --fuse qkv --fuse gate_up",
        "int4, padded": "--bits 4 --pad-to-tp 4",
    }
    return found + [
        Subject(f"compressed-tensors {name}", f"quantize {words}") for name, words in more.items()
    ]


def _scaled() -> list[Subject]:
    """W8A8, FP8, MXFP4 and NVFP4."""
    found = []
    for scheme in ("fp8-channel", "fp8-tensor", "fp8-block", "mxfp4", "nvfp4"):
        words = f"convert --to compressed-tensors --scheme {scheme}"
        whole = Subject(f"compressed-tensors {scheme}", words)
        found += [whole, Subject(f"{whole.name}, fused", "fuse", source=whole.name)]
    for scheme in ("int8-channel", "int8-asym-channel"):
        found.append(Subject(f"int-quantized {scheme}", f"quantize --layout int-quantized --scheme {scheme}"))
    found.append(Subject("int-quantized, fused", "fuse", source="int-quantized int8-channel"))
    found.append(Subject("fp8", "convert --to fp8"))
    found.append(Subject("fp8, fused", "fuse", source="fp8"))
    for scheme in ("fp8", "fp8-block", "nvfp4"):
        found.append(Subject(f"modelopt {scheme}", f"convert --to modelopt --scheme {scheme}"))
    return found


def _gptq() -> list[Subject]:
    """GPTQ, AWQ and AutoRound in float16, which is what their scales are; one of each of a bfloat16 model."""
    half = "--dtype f16"
    cases = {
        "gptq": ("int4", "int4-g32", "int4-channel", "int4-asym", "int8", "int8-channel", "int3", "int2"),
        "gptq_v2": ("int4", "int4-asym", "int8", "int3"),
        "awq": ("int4-asym", "int4-asym-g32", "int4", "int4-asym-channel"),
        "auto-round": ("int4", "int4-asym", "int8", "int3", "int8-asym", "int3-asym", "int2-asym"),
    }
    found = [
        Subject(f"{layout} {scheme}", f"quantize --layout {layout} --scheme {scheme} {half}", _GPTQ)
        for layout, schemes in cases.items()
        for scheme in schemes
    ]
    usual = {"gptq": "int4", "awq": "int4-asym", "auto-round": "int4"}
    for layout, scheme in usual.items():
        words = f"quantize --layout {layout} --scheme {scheme}"
        found.append(Subject(f"{layout} {scheme} of bf16", words, _GPTQ))
        found.append(
            Subject(f"{layout} {scheme}, one plain", f"{words} {half} --keep layers.0.mlp.down", _GPTQ)
        )
        head = f"{words} {half} --untie --rule lm_head={scheme}-g128"
        found.append(Subject(f"{layout} {scheme}, {scheme} head", head, _GPTQ))
        found.append(Subject(f"{layout} {scheme}, fused", f"{words} {half} --fuse qkv --fuse gate_up", _GPTQ))
        if layout != "awq":
            mixed = f"{words} {half} --rule mlp.down=int8-g128"
            found.append(Subject(f"{layout} {scheme}, down int8", mixed, _GPTQ))
    converted = "convert --to gptq"
    found.append(Subject("gptq of compressed-tensors", converted, _GPTQ, "compressed-tensors int4"))
    shuffled = Subject("gptq int4-g32, shuffled", converted, (), "gptq int4-g32", _shuffled)
    found += [shuffled, Subject("gptq desc_act", converted, _GPTQ, shuffled.name)]
    return found


def _torchao() -> list[Subject]:
    """Integers of all widths, those of 4 bits packed and, where rows have one scale, not; and FP8."""
    schemes = ("int2", "int3", "int4", "int4-g32", "int4-asym", "int4-channel", "int4-asym-channel", "int5",
               "int6-asym", "int7", "int8", "int8-asym-g64", "int8-channel", "fp8-channel",
               "fp8-tensor")  # fmt: skip
    found = [Subject(f"torchao {scheme}", f"convert --to torchao --scheme {scheme}") for scheme in schemes]
    more = {
        "int8-channel f16": "--scheme int8-channel --dtype f16",
        "int8-channel f32": "--scheme int8-channel --dtype f32",
        "int8-channel, down int4": "--scheme int8-channel --rule mlp.down=int4-channel",
        "int8-channel, one plain": "--scheme int8-channel --keep layers.0.mlp.down",
        "int8-channel, int8 head": "--scheme int8-channel --untie --rule lm_head=int8-channel",
        "int8-channel, fused": "--scheme int8-channel --fuse qkv --fuse gate_up",
    }
    found += [
        Subject(f"torchao {name}", f"quantize --layout torchao {words}") for name, words in more.items()
    ]
    return _shown_to_mlx(found)


def _quark() -> list[Subject]:
    schemes = ("int4", "int4-g32", "int4-asym", "int4-channel", "int8-channel", "fp8-channel", "fp8-tensor",
               "mxfp4")  # fmt: skip
    found = [Subject(f"quark {scheme}", f"convert --to quark --scheme {scheme}") for scheme in schemes]
    kept = "quantize --layout quark --bits 4 --keep layers.0.mlp.down"
    found.append(Subject("quark int4, one plain", kept))
    found.append(Subject("quark int4, fused", "fuse", source="quark int4"))
    return _shown_to_mlx(found)


def _hqq() -> list[Subject]:
    """In float32, in which transformers computes on a CPU; one of bfloat16, whose numbers hqq rounds."""
    schemes = ("int2-asym-g64", "int3-asym-g64", "int4", "int4-asym-g64", "int8-asym-g64", "int8-channel")
    words = "quantize --layout hqq --scheme"
    found = [Subject(f"hqq {scheme}", f"{words} {scheme} --dtype f32", _HQQ) for scheme in schemes]
    usual = f"{words} int4-asym-g64"
    kept = Subject("hqq int4-asym-g64, one plain", f"{usual} --dtype f32 --keep layers.0.mlp.down", _HQQ)
    return [*found, kept, Subject("hqq int4-asym-g64 of bf16", usual, _HQQ)]


def _shown_to_mlx(found: list[Subject]) -> list[Subject]:
    """Of a layout that mlx-lm does not read: the first one shows it."""
    return [found[0], *(replace(each, clients=("vllm", "transformers")) for each in found[1:])]


def _mlx() -> list[Subject]:
    schemes = ("int4-g64", "int2-g64", "int3-g64", "int4-asym-g32", "int5-g64", "int6-g64", "int8-g64",
               "mxfp4", "nvfp4")  # fmt: skip
    found = [Subject(f"mlx {scheme}", f"convert --to mlx --scheme {scheme}") for scheme in schemes]
    more = {
        "int4, down int8": "--rule mlp.down=int8-g64",
        "int4, int4 embedding, tied": "--rule embed=int4-g64",
        "int4, int4 head": "--untie --rule lm_head=int4-g64",
        "int4, one plain": "--keep layers.0.mlp.down",
    }
    found += [
        Subject(f"mlx {name}", f"quantize --layout mlx --scheme int4-g64 {words}")
        for name, words in more.items()
    ]
    # Others read no MLX at all; one of them shows it.
    return [found[0], *(replace(each, clients=("mlx-lm",)) for each in found[1:])]


def _gguf() -> list[Subject]:
    """GGUF types that need no importance matrix."""
    types = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_m", "q4_k_m",
             "q5_k_m", "q6_k", "iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "nvfp4", "q1_0",
             "q2_0")  # fmt: skip
    return [Subject(f"gguf {name}", f"to-gguf --type {name}", _GGUF) for name in types]


def _mixtures() -> list[Subject]:
    """A mixture of experts in each layout, and in those of several schemes."""
    plain = Subject("mixture", "", origin=mixture)
    half = "--dtype f16"
    kept = " ".join(f"--keep mlp.experts.{part}" for part in ("gate", "up", "down"))
    words = {
        "compressed-tensors int4": "quantize --scheme int4",
        "compressed-tensors int4-asym": "quantize --scheme int4-asym",
        "compressed-tensors int8-channel": "quantize --scheme int8-channel",
        "compressed-tensors int4, down int8": "quantize --bits 4 --rule mlp.experts.down=int8-g128",
        "compressed-tensors int4, plain experts": f"quantize --bits 4 {kept}",
        "compressed-tensors fp8-channel": "convert --to compressed-tensors --scheme fp8-channel",
        "compressed-tensors fp8-block": "convert --to compressed-tensors --scheme fp8-block",
        "compressed-tensors mxfp4": "convert --to compressed-tensors --scheme mxfp4",
        "compressed-tensors nvfp4": "convert --to compressed-tensors --scheme nvfp4",
        "int-quantized int8-channel": "quantize --layout int-quantized --scheme int8-channel",
        "fp8": "convert --to fp8",
        "quark int4": "convert --to quark --scheme int4",
        "quark fp8-channel": "convert --to quark --scheme fp8-channel",
        "torchao int8-channel": "convert --to torchao --scheme int8-channel",
        "modelopt fp8": "convert --to modelopt --scheme fp8",
        "modelopt nvfp4": "convert --to modelopt --scheme nvfp4",
        "gptq int4": f"quantize --layout gptq --scheme int4 {half}",
        "awq int4-asym": f"quantize --layout awq --scheme int4-asym {half}",
        "auto-round int4": f"quantize --layout auto-round --scheme int4 {half}",
        "bitsandbytes nf4": "convert --to bitsandbytes --scheme nf4 --allow-requantize",
    }
    gptq = ("gptq", "awq")
    found = [
        Subject(f"mixture, {name}", line, _GPTQ if name.startswith(gptq) else _FOLDERS, plain.name)
        for name, line in words.items()
    ]
    mlx = Subject("mixture, mlx int4-g64", "quantize --layout mlx --scheme int4-g64", ("mlx-lm",), plain.name)
    ggufs = [Subject(f"gguf {kind}, mixture", f"to-gguf --type {kind}", _GGUF, plain.name) for kind in _MIXED]
    return [plain, *found, mlx, *ggufs]


_MIXED = ("q8_0", "q4_k_m")


def subjects() -> tuple[Subject, ...]:
    """All of them, those that others are made of first."""
    plain = [
        Subject("bf16", "convert --to bf16"),
        Subject("bf16, untied", "untie"),
        Subject("bf16, fused", "fuse"),
    ]
    kinds = ("nf4", "nf4-nested", "fp4", "int8-channel")
    bits = [
        Subject(f"bitsandbytes {kind}", f"convert --to bitsandbytes --scheme {kind} --allow-requantize")
        for kind in kinds  # the nested one rounds scales by more than is taken unasked
    ]
    return (
        *plain,
        *_packed(),
        *_scaled(),
        *_gptq(),
        *_quark(),
        *_torchao(),
        *_hqq(),
        *_mlx(),
        *bits,
        *_gguf(),
        *_mixtures(),
    )


def make(subject: Subject, model: str, folder: Path) -> Path:
    """Write the subject into `folder`, under its name, unless it is there; RuntimeError where that fails."""
    source = path_of(subject.source, folder) if subject.source else Path(model)
    out = path_of(subject.name, folder)
    if subject.origin is not None and not out.exists():
        subject.origin(Path(model), out)
    elif not out.exists():
        command, *words = subject.words.split()
        line = [sys.executable, "-m", "qconvert", command, str(source), *words, "-o", str(out), "-q"]
        ran = subprocess.run(line, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"{subject.name}: {ran.stderr}")
        if subject.change is not None:
            subject.change(out)
    return out


def path_of(name: str, folder: Path) -> Path:
    """Where the subject of this name lies."""
    stem = re.sub(r"[^a-z0-9_.]+", "-", name)
    return folder / (f"{stem}.gguf" if name.startswith("gguf") else stem)
