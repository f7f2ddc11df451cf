"""Drives the commands, in this process, over changed models of every layout and GGUF type."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from qconvert.core.ggml_types import GGMLType
from qconvert.formats.layouts import registry
from tests.layouts.foreign_layouts import FOLDER
from tests.pairs import gpt_oss
from tests.support.commands import made, qconvert
from tests.support.gguf_models import write_gguf
from tests.support.hostile_files import sound_gguf
from tests.support.models import tiny

# What a terminal would obey.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_OUT = "out"
# Words of commands; each changed file gets one of them, by its bytes.
_READING = (
    "inspect {} --json",
    "inspect {} --tensors",
    "inspect {} --metadata",
    "verify {}",
    "convert {} --to mlx --dry-run --allow-requantize --json",
    "to-gguf {} --type q8_0 --dry-run --json",
    "convert {} --to bf16 --dry-run",
)
_FOLDERS = (
    *_READING,
    "check {} --for vllm",
    "check {} --for transformers --json",
    "quantize {} --scheme int8 --dry-run",
    f"dequantize {{}} --dtype f32 -o {_OUT}",
    f"convert {{}} --to compressed-tensors -o {_OUT}",
)
_GGUFS = (*_READING, "check {} --for llama.cpp", f"from-gguf {{}} -o {_OUT}")
# One scheme of each layout that has several; of the others, what is nearest to int4.
_SCHEMES = {
    "compressed-tensors": ("int4-asym-g32", "fp8-block", "mxfp4", "nvfp4"),
    "bitsandbytes": ("nf4-nested", "int8"),
    "modelopt": ("fp8", "nvfp4"),
    "mlx": ("int3-g32", "mxfp4"),
    "gptq": ("int4-g32",),
    "gptq_v2": ("int3-asym-g32",),
    "int-quantized": ("int8-channel",),
    "awq": ("int4-asym-g32",),
    "auto-round": ("int4-g32",),
}
_BLOCK = 256  # columns that every type of GGML cuts into whole blocks


def folders(folder: Path, sizes: dict[str, int]) -> Iterator[Path]:
    """A sound folder in every layout that is read: by its own tool, or as it is written here."""
    for own in sorted(FOLDER.iterdir()):
        yield Path(shutil.copytree(own, folder / own.name))
    plain = tiny(folder / "to-be-written", **sizes)  # type: ignore[arg-type]
    by_tools = {own.name.split("-")[0] for own in FOLDER.iterdir()}
    for layout in registry.written():
        if layout == "mxfp4":
            yield made("convert", gpt_oss(folder / "oss"), "--to", layout, "-o", folder / layout)
        elif layout not in by_tools or layout in _SCHEMES:
            for scheme in _SCHEMES.get(layout, ("",)):
                asked = ("--scheme", scheme) if scheme else ()
                out = folder / f"{layout}-{scheme}"
                yield made("convert", plain, "--to", layout, *asked, "-o", out)


def ggufs(folder: Path) -> Iterator[Path]:
    """A sound GGUF of every type that GGML has."""
    keys, tensors = sound_gguf()
    for kind in GGMLType:
        turned = [
            replace(each, type=kind) if len(each.shape) == 2 and each.width % _BLOCK == 0 else each
            for each in tensors
            if ".1." not in each.name
        ]
        kv = [replace(e, value=1) if e.key.endswith(".block_count") else e for e in keys]
        yield write_gguf(folder / f"{kind.name}.gguf", kv, turned)


def drive_folder(path: Path) -> None:
    """Run one command on the folder of this file."""
    _drive(path, path.parent, _FOLDERS)


def drive_gguf(path: Path) -> None:
    """Run one command on this GGUF file."""
    _drive(path, path, _GGUFS)


def drive_part(path: Path) -> None:
    """Run one command on the GGUF of which this file is a part: it is named by its first one."""
    _drive(path, min(path.parent.glob("*.gguf")), _GGUFS)


def _drive(path: Path, model: Path, words: tuple[str, ...]) -> None:
    asked = words[zlib.crc32(path.read_bytes()) % len(words)].split()
    out = model.parent / _OUT
    said = [str(model) if word == "{}" else str(out) if word == _OUT else word for word in asked]
    try:
        ran = qconvert(*said)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    told = f"{asked}: {ran}"
    assert ran.code in (0, 1, 2, 3) and "this is a bug" not in ran.out + ran.err, told
    assert not OBEYED.search(ran.out + ran.err), told
    if "--json" in asked:
        found = json.loads(ran.out)
        assert ran.code in (0, 3) or (found["error"]["fact"] and found["error"]["hint"]), told
    elif ran.code in (1, 2):
        assert ran.err.rstrip().count("\nHint: ") == 1, told
    assert ran.code or not ran.err.startswith("Error"), told
