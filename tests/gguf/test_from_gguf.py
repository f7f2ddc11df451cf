"""Reading GGUF models: back to the files they came from, and like any other checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import shortest
from qconvert.formats.io.local_file import octets
from qconvert.formats.tokenizers.from_gguf import tokenizer_files
from qconvert.formats.tokenizers.to_gguf import read_tokenizer
from qconvert.quant.dequantize import numbers
from tests.support.commands import qconvert
from tests.support.gguf_models import TEXT, TRANSFORMERS, transformers_logits, transformers_model
from tests.support.gguf_models import test_strings as strings_for
from tests.support.models import stored

IDS = [5, 1, 299, 17, 260]


def run(*args: object) -> Path:
    """A writing command that must succeed; what it made."""
    ran = qconvert(*args, "-q")
    assert ran.code == 0, ran.err
    return Path(ran.out.strip())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    dtype = "float32" if name == "llama" else "bfloat16"
    source = transformers_model(tmp_path / name, name, dtype)
    file_type = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    gguf = run("to-gguf", source, "--type", file_type, "-o", tmp_path / "m.gguf")
    back = run("from-gguf", gguf, "-o", tmp_path / "back")
    assert stored(back) == stored(source)
    assert np.array_equal(transformers_logits(back, IDS), transformers_logits(source, IDS))
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(f) for f in (back, source))
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.get_vocab() == theirs.get_vocab()


def test_bf16_through_an_f32_file(tmp_path: Path) -> None:
    source = transformers_model(tmp_path / "m", "mistral")
    gguf = run("to-gguf", source, "--type", "f32", "-o", tmp_path / "m.gguf")
    back = run("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", "bf16")
    assert stored(back) == stored(source)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A llama with interleaved heads, and its Q8_0 file in parts."""
    folder = tmp_path_factory.mktemp("small")
    source = transformers_model(folder / "m", "llama")
    return source, run(
        "to-gguf", source, "--type", "q8_0", "-o", folder / "q8.gguf", "--split-max-size", "50KB"
    )


def test_any_part_stands_for_all(small: tuple[Path, Path], tmp_path: Path) -> None:
    parts = sorted(small[1].parent.glob("q8-*.gguf"))
    assert len(parts) > 1
    made = [run("from-gguf", part, "-o", tmp_path / part.stem) for part in (parts[0], parts[-1])]
    assert stored(made[0]) == stored(made[1])


def test_quantized_rows_of_interleaved_heads_come_back_in_order(small: tuple[Path, Path]) -> None:
    ran = qconvert("diff", small[0], small[1], "--all", "--json")
    rows = {row["name"]: row for row in ran.json["tensors"]}
    assert rows["model.norm.weight"]["status"] == "equal"
    assert all(row["relative_rms"] < 0.006 for row in rows.values() if row["status"] != "equal")
    assert len(rows) == len(stored(small[0]))


def test_verify_against_the_source(small: tuple[Path, Path], tmp_path: Path) -> None:
    exact = run("to-gguf", small[0], "--type", "bf16", "-o", tmp_path / "m.gguf")
    ran = qconvert("verify", exact, "--against", small[0])
    assert ran.code == 0 and "equal" in ran.out, ran.err
    assert qconvert("verify", small[1], "--against", small[0]).code == 0


def test_inspect_counts_the_blocks(small: tuple[Path, Path]) -> None:
    found = qconvert("inspect", small[1], "--json").json
    assert found["quantization"] == "gguf (q8_0)"
    assert found["family"].startswith("Llama")


def test_perplexity_of_a_gguf_beside_its_source(small: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT * 8)
    flags = ["--text", tmp_path / "text", "--context", "32", "--json"]
    ran = qconvert("eval", "perplexity", small[0], small[1], *flags)
    assert ran.code == 0, ran.err
    alone = qconvert("eval", "perplexity", small[1], *flags)  # with the tokenizer of its own keys
    assert alone.code == 0, alone.err


def test_generate_speaks_a_ggufs_tokens(small: tuple[Path, Path], tmp_path: Path) -> None:
    exact = run("to-gguf", small[0], "--type", "bf16", "-o", tmp_path / "m.gguf")
    flags = ["-p", "The quick", "--max-tokens", "8", "--backend", "reference"]
    ours, theirs = (qconvert("generate", model, *flags) for model in (exact, small[0]))
    assert ours.code == 0 and ours.out == theirs.out, ours.err


def test_rearranging_and_quantizing_again(small: tuple[Path, Path], tmp_path: Path) -> None:
    ran = qconvert("fuse-qkv", small[1], "-o", tmp_path / "out")
    assert ran.code == 1 and "q8_0 blocks, which safetensors files do not hold" in ran.err
    ran = qconvert("quantize", small[1], "--bits", "4", "--group-size", "32", "-o", tmp_path / "out")
    assert ran.code == 1 and "already quantized (q8_0)" in ran.err
    plain = run("to-gguf", small[0], "--type", "f16", "-o", tmp_path / "f16.gguf")
    fused = run("fuse-qkv", plain, "-o", tmp_path / "fused")
    assert qconvert("diff", fused, plain, "--exit-code").code == 0


def test_a_folder_is_no_gguf(small: tuple[Path, Path]) -> None:
    ran = qconvert("from-gguf", small[0])
    assert ran.code == 1 and "not a GGUF file" in ran.err


# llama.cpp's own files


@pytest.fixture(scope="module")
def golden(assets: Path) -> Any:
    return json.loads((assets / "fixtures" / "gguf" / "golden.json").read_text())


def test_numbers_of_a_file_of_llama_quantize(assets: Path, golden: Any) -> None:
    checkpoint = open_checkpoint(assets / "fixtures" / "gguf" / "tiny-qwen3-Q4_K_M.gguf")
    recorded = golden["files"]["Q4_K_M"]["tensors"]
    compared = 0
    for tensor in checkpoint.tensors.values():
        name = checkpoint.layout.stored_arrays(tensor)[0].name
        expected = recorded[name].get("dequantized_f32_sha256")
        if expected is not None:
            found = numbers(checkpoint.reader.read(tensor, 0, tensor.rows), DType.F32)
            assert hashlib.sha256(octets(found.rows_RI)).hexdigest() == expected, name
            compared += 1
    assert compared == 7


def test_config_and_tokenizer_of_a_file_of_llama_quantize(assets: Path, tmp_path: Path) -> None:
    source = assets / "models" / "tiny-qwen3"
    back = run("from-gguf", assets / "fixtures" / "gguf" / "tiny-qwen3-Q4_K_M.gguf", "-o", tmp_path / "back")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (back, source))
    same = set(ours) & set(theirs) - {"torch_dtype", "bos_token_id", "pad_token_id", "eos_token_id"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert len(same) > 12
    assert_same_tokenizer(back, source, [TEXT, "<|im_start|>user\nna\u00efve\u2014 3.14<|im_end|>"])


def assert_same_tokenizer(ours: Path, theirs: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer

    a, b = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (ours, theirs))
    assert a.get_vocab() == b.get_vocab()
    for text in texts:
        assert a.encode(text).ids == b.encode(text).ids, text
        bare = b.encode(text, add_special_tokens=False).ids
        assert a.decode(bare) == b.decode(bare)


@pytest.mark.parametrize(
    ("folder", "rows", "model_type", "strings"),
    [
        ("qwen2.5", 151936, "qwen2", "qwen2"),
        ("qwen3", 151936, "qwen3", "qwen2"),
        ("llama-2", 32000, "llama", "llama-spm"),
    ],
)
def test_real_tokenizers_come_back(
    assets: Path, tmp_path: Path, folder: str, rows: int, model_type: str, strings: str
) -> None:
    source = assets / "tokenizers" / folder
    kv = {entry.key: entry for entry in read_tokenizer(source, rows, {"model_type": model_type}).kv}
    for name, text in tokenizer_files(kv).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    texts = [text for text, _ in strings_for(assets, strings)]
    assert len(texts) == 46
    assert_same_tokenizer(tmp_path, source, texts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"tokenizer.ggml.model": KV.text("tokenizer.ggml.model", "rwkv")},
            "rwkv tokenizers are not rebuilt",
        ),
        ({"tokenizer.ggml.pre": KV.text("tokenizer.ggml.pre", "bert-bge")}, "splitting rules of bert-bge"),
        ({"tokenizer.ggml.tokens": KV.u32("tokenizer.ggml.tokens", 1)}, "tokens: not a list"),
        ({"tokenizer.ggml.token_type": KV.i32s("tokenizer.ggml.token_type", [1])}, "1 entries for 2"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt(changes: dict[str, KV], says: str) -> None:
    from qconvert.errors import QConvertError

    kv = {
        "tokenizer.ggml.model": KV.text("tokenizer.ggml.model", "gpt2"),
        "tokenizer.ggml.pre": KV.text("tokenizer.ggml.pre", "qwen2"),
        "tokenizer.ggml.tokens": KV.texts("tokenizer.ggml.tokens", ["a", "b"]),
    }
    with pytest.raises(QConvertError, match=says):
        tokenizer_files(kv | changes)


def test_a_float32_is_written_as_somebody_would_type_it() -> None:
    assert shortest(9.999999974752427e-07) == 1e-06
    assert shortest(1e6) == 1e6 and shortest(float(np.float32(0.1))) == 0.1
    assert np.float32(shortest(1 / 3)) == np.float32(1 / 3)
