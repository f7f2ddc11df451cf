"""Makers of files that are made to break a reader; each returns the words of a command to be run on one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor, KVType
from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_models import write_gguf
from tests.support.models import tiny

Words = Sequence[object]
Make = Callable[[Path], Words]
Array = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], bytes]


@dataclass(frozen=True)
class Case:
    """What to make in an empty folder, the words of the command then run, and a part of its error."""

    make: Make
    says: str
    seconds: float = 30
    code: int = 1


def config(*words: object, **changes: Any) -> Make:
    """A sound model but for these keys of config.json, and the command's words; `MODEL` is its folder."""

    def make(folder: Path) -> Words:
        model = tiny(folder / "m", **changes)
        return [model if word is MODEL else word for word in words]

    return make


def beside(name: str, content: str | bytes, *words: object) -> Make:
    """A sound model but for one file of its folder."""

    def make(folder: Path) -> Words:
        model = tiny(folder / "m")
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [model if word is MODEL else word for word in words]

    return make


def gguf(
    *words: object, kv: Mapping[str, KV | None] | None = None, tensors: Sequence[GGUFTensor] = ()
) -> Make:
    """A sound GGUF but for these keys (None leaves one out) and more tensors of zeros."""

    def make(folder: Path) -> Words:
        keys, known = sound_gguf()
        entries = {**{entry.key: entry for entry in keys}, **(kv or {})}
        path = folder / "m.gguf"
        write_gguf(path, [entry for entry in entries.values() if entry is not None], [*known, *tensors])
        return [path if word is MODEL else word for word in words]

    return make


@cache
def sound_gguf() -> tuple[tuple[KV, ...], tuple[GGUFTensor, ...]]:
    """The keys and tensors of a small qwen3 model."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        ran = qconvert("to-gguf", tiny(folder / "m"), "--type", "q8_0", "-o", folder / "m.gguf", "-q")
        assert ran.code == 0, ran.err
        with GGUFFile(folder / "m.gguf") as file:
            return tuple(file.kv.values()), tuple(file.tensors.values())


def of_arch(arch: str, **changes: KV) -> dict[str, KV | None]:
    """The keys of the sound GGUF as those of another architecture, with changes by the name's last part."""
    renamed: dict[str, KV | None] = {"general.architecture": KV.text("general.architecture", arch)}
    for entry in sound_gguf()[0]:
        if entry.key.startswith("qwen3."):
            key = entry.key.replace("qwen3", arch)
            renamed |= {entry.key: None, key: KV(key, entry.type, entry.value)}
    return renamed | {f"{arch}.{name}": KV(f"{arch}.{name}", e.type, e.value) for name, e in changes.items()}


MODEL, OUT = object(), object()
TEMPLATE = "tokenizer.chat_template"
HUGE = 10**400
TO_GGUF = ("to-gguf", MODEL, "--type", "q8_0", "--dry-run")
GENERATE = ("generate", MODEL, "-p", "a", "-n", 2)


def many_layers(arch: str) -> Make:
    def make(folder: Path) -> Words:
        return gguf("inspect", MODEL, kv=of_arch(arch, block_count=KV.u32("", 2**31 - 1)))(folder)

    return make


def f64(key: str, value: float) -> dict[str, KV | None]:
    return {key: KV(key, KVType.F64, value)}


def split_of_many(folder: Path) -> Words:
    raw = b"split.count"
    head = struct.pack("<IQQQ", 3, 0, 1, len(raw)) + raw + struct.pack("<IQ", 10, 1 << 40)
    path = folder / "m-00001-of-00002.gguf"
    path.write_bytes(b"GGUF" + head)
    return ["inspect", path]


def counted(tensors: int, keys: int) -> Make:
    """A header that claims so many records, and has room for them."""

    def make(folder: Path) -> Words:
        path = folder / "m.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + bytes(24 * max(tensors, keys)))
        return ["inspect", path]

    return make


def tokens(*words: object, last: str, model: str | None = None) -> Make:
    """A sound GGUF but for its last token, in the tokenizer of another kind."""

    def make(folder: Path) -> Words:
        kv = {entry.key: entry for entry in sound_gguf()[0]}
        texts = [*kv["tokenizer.ggml.tokens"].value[:-1], last]  # type: ignore[index]
        changed = {"tokenizer.ggml.tokens": KV.texts("tokenizer.ggml.tokens", texts)}
        types = "tokenizer.ggml.token_type"
        changed[types] = KV.i32s(types, [1] * len(texts))
        if model is not None:
            changed["tokenizer.ggml.model"] = KV.text("tokenizer.ggml.model", model)
            changed["tokenizer.ggml.scores"] = KV.f32s("tokenizer.ggml.scores", [0.0] * len(texts))
        return gguf(*[folder / "out" if word is OUT else word for word in words], kv=changed)(folder)

    return make


def imatrix_of(sums: int, counts: int) -> Make:
    def make(folder: Path) -> Words:
        name = "blk.0.attn_q.weight"
        tensors = [GGUFTensor(f"{name}.in_sum2", GGMLType.F32, (1, sums))]
        tensors += [GGUFTensor(f"{name}.counts", GGMLType.F32, (counts, 1))]
        path = write_gguf(folder / "i.gguf", [KV.text("general.type", "imatrix")], tensors)
        return [*TO_GGUF[:1], tiny(folder / "m"), *TO_GGUF[2:], "--imatrix", path]

    return make


Q = "model.layers.0.self_attn.q_proj"


def quantized(method: str, arrays: Mapping[str, Array], **settings: object) -> Make:
    """A model whose first query projection is these arrays, under quantization_config's words for it.

    mlx has them under `quantization`, without a method.
    """

    def make(folder: Path) -> Words:
        under = {"quantization_config": {"quant_method": method, **settings}}
        said: dict[str, Any] = {"quantization": settings} if method == "mlx" else under
        dropped: dict[str, Any] = {f"{Q}.weight": None}
        changes = {Q + name: _filled(*array) for name, array in arrays.items()}
        return ["inspect", tiny(folder / "m", dtype="f32", changes=dropped | changes, **said)]

    return make


def _filled(dtype: str, shape: tuple[int, ...], content: bytes = b"") -> np.ndarray:
    """An array of this content, or of zeros."""
    return np.frombuffer(content, dtype).reshape(shape) if content else np.zeros(shape, dtype)


_STATE = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [256, 256]}).encode()
_AWQ: dict[str, Array] = {".scales": ("f2", (2, 256)), ".qzeros": ("i4", (2, 32))}
_GPTQ: dict[str, Array] = {".qweight": ("i4", (32, 256)), **_AWQ}
_CT: dict[str, Array] = {".weight_packed": ("i4", (256, 32)), ".weight_scale": ("f2", (256, 2))}
_SHAPE = np.array([256, 256]).tobytes()
_ROUND: dict[str, object] = {"bits": 4, "group_size": 128, "sym": True}
_QUARK: dict[str, Array] = {".weight": ("i4", (256, 32)), ".weight_scale": ("f4", (2, 256))}
_HQQ: dict[str, Array] = {
    ".W_q": ("u1", (512, 64)),
    ".scale": ("f4", (1024, 1)),
    ".zero": ("f4", (1024, 1)),
    ".shape": ("i8", (2,), _SHAPE),
    ".nbits": ("i4", ()),
    ".group_size": ("i4", ()),
    ".axis": ("i4", ()),
}
_MLX: dict[str, Array] = {
    ".weight": ("u4", (256, 32)),
    ".scales": ("f4", (256, 4)),
    ".biases": ("f4", (256, 4)),
}
_BNB: dict[str, Array] = {
    ".weight": ("u1", (256 * 128, 1)),
    ".weight.absmax": ("f4", (1024,)),
    ".weight.quant_map": ("f4", (16,)),
    ".weight.quant_state.bitsandbytes__nf4": ("u1", (len(_STATE),), _STATE),
}
_INT8: dict[str, Array] = {".weight": ("i1", ()), ".SCB": ("f4", ()), ".weight_format": ("u1", ())}
_TORCHAO: dict[str, Array] = {
    "._weight_qdata": ("i1", (256, 0)),
    "._weight_scale": ("f4", (256, 2)),
    "._weight_zero_point": ("i1", (256, 2)),
}
# Layout, what is wrong with a sound weight's arrays or settings, and what is said of it.
LAYOUTS: tuple[tuple[str, Mapping[str, Array], Mapping[str, object], str], ...] = (
    ("awq", {**_AWQ, ".qweight": ("i4", ())}, {}, ".qweight: i32 [], but it holds codes of AWQ"),
    ("awq", {**_AWQ, ".qweight": ("i4", (0, 32))}, {}, ".qweight: i32 [0, 32], but"),
    ("gptq", {**_GPTQ, ".g_idx": ("i4", (2, 128))}, {"bits": 4}, ".g_idx: i32 [2, 128], but"),
    ("gptq", {**_GPTQ, ".g_idx": ("f2", (256,))}, {"bits": 4}, ".g_idx: f16 [256], but"),
    ("gptq", {**_GPTQ, ".qweight": ("i4", (0, 256))}, {"bits": 4}, ".qweight: i32 [0, 256], but"),
    ("bitsandbytes", {**_BNB, ".weight.quant_map": ("f4", (4, 4))}, {}, ".weight.quant_map: f32 [4, 4]"),
    ("bitsandbytes", {**_BNB, ".weight": ("u1", (1, 32768))}, {}, ".weight: u8 [1, 32768], but"),
    ("bitsandbytes", _INT8, {}, ".weight: i8 [], but its SCB is there"),
    ("compressed-tensors", {**_CT, ".weight_shape": ("i8", (1, 2), _SHAPE)}, {}, ".weight_shape: i64 [1, 2]"),
    (
        "compressed-tensors",
        {**_CT, ".weight_shape": ("i8", (2,), _SHAPE)},
        {"config_groups": {"group_0": {"weights": {"num_bits": 0}}}},
        "num_bits is 0, outside 1..16",
    ),
    ("torchao", _TORCHAO, {}, "._weight_qdata: i8 [256, 0] is not read here"),
    ("auto-round", {**_GPTQ, ".qzeros": ("i4", (2, 31))}, _ROUND, ".qzeros: i32 [2, 31] holds no zeros"),
    ("auto-round", {**_GPTQ, ".qweight": ("i4", (0, 256))}, _ROUND, ".qweight: i32 [0, 256], but"),
    ("auto-round", _GPTQ, {**_ROUND, "extra_config": [1]}, "extra_config is [1], not an object"),
    ("auto-round", _GPTQ, {**_ROUND, "packing_format": ["x"]}, "AutoRound's packing_format"),
    ("auto-round", _GPTQ, {**_ROUND, "bits": 2}, "codes of 4 bits, but quantization_config says bits 2"),
    ("bitnet", {".weight": ("u1", (64, 256))}, {}, ".weight_scale: missing, but"),
    ("bitnet", {".weight": ("u1", (64, 256))}, {"linear_class": 7}, "bitnet with linear_class 7"),
    ("hqq", {".W_q": ("u1", (512, 64))}, {}, ".shape: missing, but"),
    ("hqq", {**_HQQ, ".nbits": ("i4", (2,))}, {}, ".nbits: i32 [2], but"),
    ("hqq", {**_HQQ, ".shape": ("i8", (2,))}, {}, "0 bits on axis 0 are not read here"),
    ("exl2", {".q_weight": ("i4", (32, 256))}, {}, ".q_invperm: missing, but"),
    ("exl3", {".trellis": ("i2", (16, 16))}, {}, ".trellis: i16 [16, 16], but"),
    ("quark", {".weight": ("i4", (256, 32))}, {}, "no weight_scale, but quantization_config says quark"),
    ("quark", _QUARK, {"global_quant_config": {"weight": [1]}}, "scales of two levels are not read here"),
    ("quark", _QUARK, {}, "Quark's None None in groups of None is not read here"),
    ("mlx", _MLX, {"bits": 4.0, "group_size": 64}, ".weight: mode affine with bits 4.0"),
    ("mlx", _MLX, {"bits": 4, "group_size": 64, "mode": ["affine"]}, ".weight: mode ['affine']"),
)


def sentencepiece(pieces: bytes) -> Make:
    """A model whose only tokenizer is a SentencePiece file of these bytes."""

    def make(folder: Path) -> Words:
        model = tiny(folder / "m")
        (model / "tokenizer.json").unlink()
        (model / "tokenizer.model").write_bytes(pieces)
        return [TO_GGUF[0], model, *TO_GGUF[2:]]

    return make


def template(text: str) -> Make:
    return beside("tokenizer_config.json", json.dumps({"chat_template": text}), *GENERATE, "--chat")


def token_beyond(folder: Path) -> Words:
    model = tiny(folder / "m")
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["a"] = 5000
    path.write_text(json.dumps(tokenizer))
    return ["generate", model, "-p", "a", "-n", 2]


def quantize(*words: object) -> Make:
    return config("quantize", MODEL, *words, "--dry-run")


def readme_of(front: str) -> Make:
    """A model card whose front matter is hostile: nothing but labels depends on it."""
    return beside("README.md", f"---\n{front}\n---\n", *TO_GGUF)


def laughs(levels: int = 8) -> str:
    """Lists of nine aliases of the list before, which spell 9**levels words."""
    lines = ["a0: &a0 [" + ", ".join("x" * 9) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, levels)]
    return "\n".join(lines)


def one_list_many_keys() -> str:
    return "a: &a [" + ", ".join("x" * 4000) + "]\n" + "\n".join(f"k{n}: *a" for n in range(4000))
