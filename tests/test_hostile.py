"""Files made to break a reader: each costs an error that names the place, and little time.

What no command may ever say is "unexpected ...": that is what it calls a bug of its own.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import pytest

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor, KVType
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.models.gguf.declaration import GGUFModel
from qconvert.models.gguf.families import MODELS
from tests.commands import qconvert
from tests.gguf_models import write_gguf
from tests.models import tiny

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


CASES = {
    "SentencePiece of empty pieces": Case(
        sentencepiece(b"\x0a\0" * (3 << 20)), "piece 0 is empty", seconds=5
    ),
    "added token of 5000 digits": Case(
        beside(
            "tokenizer_config.json",
            json.dumps({"added_tokens_decoder": {"1" * 5000: {"content": "x"}}}),
            *TO_GGUF,
        ),
        "token 'x' has id None",
    ),
    "scheme of 5000 digits": Case(quantize("--scheme", "int4-g" + "1" * 5000), "not a scheme", code=2),
    "layers of 5000 digits": Case(
        quantize("--bits", 4, "--rule", f"layers.{'1' * 5000}.mlp.down=int8"), "no such role"
    ),
    "shards of 400 digits": Case(quantize("--bits", 4, "--shard-size", "9" * 400), "is not a size", code=2),
    "seed of 20 digits": Case(config(*GENERATE, "--seed", "9" * 20), "--seed", code=2),
    "token beyond the embedding": Case(token_beyond, "token 5000 is beyond the model's 320 rows"),
    "10^9 tokens": Case(
        config(*GENERATE[:-1], 10**9, max_position_embeddings=2**30),
        "1,000,000,001 tokens: their keys and values need",
    ),
    "template of 100 GB": Case(template("{{ 'a' * 10**11 }}"), "does not run: it takes more than 512 MiB"),
    "template of 100 MB": Case(template("{{ 'a' * 10**8 }}"), "it makes 100,000,000 characters"),
    "template without an end": Case(
        template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "does not run: it takes more than",
        seconds=60,
    ),
    **{f"{name}: {says}": Case(quantized(name, a, **said), says) for name, a, said, says in LAYOUTS},
    "GGUF of 2^40 parts": Case(split_of_many, "split.count is 1,099,511,627,776", seconds=2),
    "GGUF of 300,000 tensors": Case(counted(300_000, 0), "the tensor count is 300,000", seconds=2),
    "GGUF of 300,000 keys": Case(counted(0, 300_000), "the metadata count is 300,000", seconds=2),
    "GGUF token of 400 kB": Case(
        tokens("from-gguf", MODEL, "-o", OUT, last="a" * 400_000, model="llama"),
        "tokenizer.ggml.tokens: token 319 has a length of 400,000",
    ),
    "GGUF token that is not UTF-8, from-gguf": Case(
        tokens("from-gguf", MODEL, "-o", OUT, last="ab\udcff"),
        "tokenizer.ggml.tokens: entry 319 is not UTF-8",
    ),
    "GGUF token that is not UTF-8, generate": Case(
        tokens("generate", MODEL, "-p", "a", last="ab\udcff"), "tokenizer.ggml.tokens: entry 319 is not UTF-8"
    ),
    "GGUF chat template that is not UTF-8": Case(
        gguf("generate", MODEL, "-p", "a", kv={TEMPLATE: KV.text(TEMPLATE, "\udcff")}),
        "tokenizer.chat_template is not UTF-8",
    ),
    "factors of frequencies that are zero": Case(
        gguf("inspect", MODEL, tensors=[GGUFTensor("rope_freqs.weight", GGMLType.F32, (32,))]),
        "rope_freqs.weight holds a factor that is not a positive number",
    ),
    "imatrix of 3 counts and 256 sums": Case(imatrix_of(256, 3), "counts has 3 entries for 256 sums"),
    "rope_theta of 400 digits, to-gguf": Case(config(*TO_GGUF, rope_theta=HUGE), "config.json: rope_theta"),
    "rope_theta of 400 digits, generate": Case(config(*GENERATE, rope_theta=HUGE), "config.json: rope_theta"),
    "rms_norm_eps of 400 digits, generate": Case(
        config(*GENERATE, rms_norm_eps=HUGE), "config.json: rms_norm_eps"
    ),
    "rms_norm_eps beyond float32, to-gguf": Case(
        config(*TO_GGUF, rms_norm_eps=1e300), "config.json: rms_norm_eps is 1e+300, not a positive number"
    ),
    "rms_norm_eps beyond float32, generate": Case(
        config(*GENERATE, rms_norm_eps=1e300), "config.json: rms_norm_eps is 1e+300"
    ),
    "temperature of 400 digits": Case(
        beside("generation_config.json", json.dumps({"temperature": HUGE}), *TO_GGUF),
        "generation_config.json: temperature",
    ),
    "temperature beyond float32": Case(
        beside("generation_config.json", '{"temperature": 1e300}', *TO_GGUF), "general.sampling.temp"
    ),
    "GGUF base of frequencies beyond float32": Case(
        gguf("inspect", MODEL, kv=f64("qwen3.rope.freq_base", 1e300)), "qwen3.rope.freq_base is 1e+300"
    ),
    "GGUF epsilon beyond float32": Case(
        gguf("inspect", MODEL, kv=f64("qwen3.attention.layer_norm_rms_epsilon", 1e308)),
        "qwen3.attention.layer_norm_rms_epsilon is 1e+308",
    ),
    **{
        f"GGUF of 2^31 layers: {arch}": Case(many_layers(arch), f"m.gguf: {arch}.")
        for arch in sorted({model.arch for model in MODELS.values() if isinstance(model, GGUFModel)})
    },
}


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


HARMLESS = {
    "front matter of 9^8 aliases": readme_of(laughs()),
    "front matter of one list under many keys": readme_of(one_list_many_keys()),
    "front matter that holds itself": readme_of("a: &a [*a]"),
    "front matter nested deeply": readme_of("a: " + "[" * 20_000),
    "front matter of 2 MB": readme_of("tags:\n" + "- x\n" * 500_000),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_hostile_labels_cost_no_time(name: str, tmp_path: Path) -> None:
    words = HARMLESS[name](tmp_path)
    with limited(30):
        ran = qconvert(*words)
    assert ran.code == 0 and "unexpected" not in ran.err, ran.err


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stop what runs longer, with an error that no command words as its own."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_no_command_says_unexpected(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    words = case.make(tmp_path)
    with limited(case.seconds):
        ran = qconvert(*words)
    assert (ran.code, ran.out) == (case.code, ""), ran
    assert "Error: " in ran.err and "unexpected" not in ran.err and "Warning" not in ran.err, ran.err
    assert case.says in ran.err, ran.err
