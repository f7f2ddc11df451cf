"""What llama-quantize writes in types of 1 to 3 bits, recorded: their tables take it 15 s in every process.

    python -m tests.support.llama_low_bits

asks llama.cpp again, and says what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from qconvert.formats.gguf.imatrix import read_imatrix
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.plan.gguf.file_types import find_file_type
from tests.support.commands import Ran, qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.llama_blocks import SLOW_TABLES, blocks_of_llama_cpp, file_of_kinds
from tests.support.llama_quantize import quantize_as_llama_cpp

BLOCKS = {
    "IQ1_S": "032821fc98e4cf77",
    "IQ2_S": "857622b3dfd8839e",
    "IQ2_XS": "08575618dd76a871",
    "IQ2_XXS": "4b8fd534a1603542",
}
"""Digests of the blocks that it makes of every kind of numbers with importances, by type."""

FILES = {
    "iq1_s": "ae0e8002744fa81f",
    "iq2_s": "49da942c02785fdf",
    "iq2_m": "91c66a3748ef0eff",
    "iq3_xs": "4a3a5006592ee3fd",
    "iq3_m": "1e96b8a170201512",
}
"""Digests of the files that it makes of a `NarrowModel`; the assets have files of its other types."""

# Of a layer of tiny-qwen3, half of its weights. (Its rows of three blocks are in test_to_gguf.py.)
WIDTH = 256
SHARE = {"mlp.gate_proj": (slice(WIDTH), slice(None)), "mlp.up_proj": (slice(WIDTH), slice(None)),
         "mlp.down_proj": (slice(None), slice(WIDTH)), "self_attn.k_proj": (slice(64), slice(None)),
         "self_attn.v_proj": (slice(64), slice(None))}  # fmt: skip


@dataclass(frozen=True)
class NarrowModel:
    """A model whose layers are parts of a real one's, in bf16 as a GGUF too, and its importances."""

    folder: Path
    plain: Path
    measured: Path
    imatrix: dict[str, np.ndarray]


def narrow_model(folder: Path, assets: Path) -> NarrowModel:
    """All eight layers of tiny-qwen3: the first, the last and those between have types of their own."""
    model = assets / "models" / "tiny-qwen3"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    sizes = {"intermediate_size": WIDTH, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | sizes))
    weights = load_file(model / "model.safetensors")
    for name, rows_RI in weights.items():
        part = SHARE.get(name.removesuffix(".weight").split(".", 3)[-1])
        weights[name] = rows_RI if part is None else rows_RI[part].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    means = read_imatrix(assets / "fixtures" / "gguf" / "imatrix.gguf").means
    imatrix = {name: np.array(means_I, np.float32)[:WIDTH] for name, means_I in means.items()}
    found = NarrowModel(folder, folder / "bf16.gguf", folder / "i.dat", imatrix)
    found.measured.write_bytes(
        imatrix_dat({name: (1, list(map(float, each))) for name, each in imatrix.items()})
    )
    ran = to_gguf(folder, found.plain, "--type", "bf16")
    assert ran.code == 0, ran.err
    return found


def to_gguf(model: Path, out: Path, *flags: object) -> Ran:
    return qconvert("to-gguf", model, "-o", out, "-q", *flags)


def digest(pieces: Iterable[bytes]) -> str:
    """Sixteen hexadecimal digits of SHA-256."""
    return hashlib.sha256(b"".join(pieces)).hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """Of names, types, shapes and bytes of all tensors in a GGUF, in its order."""
    with GGUFFile(path) as file:
        return digest(
            part
            for name, tensor in file.tensors.items()
            for part in (
                f"{name} {tensor.type.name} {tensor.shape}".encode(),
                file.read(name, 0, file.specs[name].rows).tobytes(),
            )
        )


def main() -> int:
    """Prints every record that llama.cpp does not write now; returns how many."""
    from cyllama.llama import llama_cpp

    llama_cpp.disable_logging()
    assets = Path(os.environ["QCONVERT_ASSETS"])
    with tempfile.TemporaryDirectory() as made:
        source, narrow = file_of_kinds(Path(made) / "kinds.gguf"), narrow_model(Path(made) / "m", assets)
        blocks, files = {}, {}
        for name in sorted(SLOW_TABLES):
            found = blocks_of_llama_cpp(name, source, weighted=True)
            blocks[name] = digest(found[kind].tobytes() for kind in found)
        for name in FILES:
            out = Path(made) / f"{name}.gguf"
            quantize_as_llama_cpp(narrow.plain, out, find_file_type(name).number, imatrix=narrow.imatrix)
            files[name] = digest_of_file(out)
    now, recorded = blocks | files, BLOCKS | FILES
    differing = {name: now[name] for name in now if now[name] != recorded[name]}
    for name, value in differing.items():
        print(f"{name}: recorded {recorded[name]}, now {value}")
    print(f"{len(now) - len(differing)} of {len(now)} records are what llama.cpp writes")
    return len(differing)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
