"""Tokenizers as GGUF keys: llama.cpp's converter, llama.cpp itself and Ollama's converter as oracles."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from qconvert.core.ggml_types import KV
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.tokenizers.to_gguf import GGUFTokenizer, read_tokenizer
from tests.support.gguf_models import llama_cpp_vocab, one_layer_llama
from tests.support.gguf_models import test_strings as strings_for

QWEN = {"model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645}
LLAMA = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
SPACE = "\u2581"


def values(tokenizer: GGUFTokenizer) -> dict[str, Any]:
    return {entry.key.removeprefix("tokenizer.ggml."): entry.value for entry in tokenizer.kv}


def sha(array: Iterable[object]) -> str:
    """SHA-256 of the array as Go's encoding/json spells it."""
    text = json.dumps(list(array), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return hashlib.sha256(text.encode()).hexdigest()


def short(kv: Iterable[KV]) -> list[tuple[str, object]]:
    """Keys and values in order, arrays and templates as their hash."""
    return [
        (e.key.removeprefix("tokenizer.ggml."), sha(e.value)[:12] if isinstance(e.value, tuple) else e.value)
        for e in kv
        if e.key != "tokenizer.chat_template"
    ]


# What convert_hf_to_gguf.py of llama.cpp at commit 0c1e57098 wrote for the same folders and configs;
# arrays as the first digits of their hash.
QWEN_TAIL = [
    ("merges", "6b1b1c58f122"),
    ("eos_token_id", 151645),
    ("padding_token_id", 151643),
    ("bos_token_id", 151643),
    ("add_bos_token", False),
    ("add_eos_token", False),
]
LLAMA_TAIL = [
    ("bos_token_id", 1),
    ("eos_token_id", 2),
    ("unknown_token_id", 0),
    ("add_bos_token", True),
    ("add_sep_token", False),
    ("add_eos_token", False),
]
GPT2_HEAD = [("model", "gpt2"), ("pre", "qwen2")]
LLAMA_HEAD = [("model", "llama"), ("pre", "default")]
CONVERTER = {
    ("qwen2.5", 151936): [
        *GPT2_HEAD, ("tokens", "af7980399909"), ("token_type", "17ccfa7767a8"), *QWEN_TAIL,
    ],
    ("qwen3", 151936): [
        *GPT2_HEAD, ("tokens", "430353f26b0d"), ("token_type", "536de815c967"), *QWEN_TAIL,
    ],
    ("llama-2", 32000): [
        *LLAMA_HEAD, ("tokens", "209fbb8470f0"), ("scores", "d62d6f8b0a76"), ("token_type", "6040635e6bd3"),
        *LLAMA_TAIL,
    ],
    ("llama-2", 32003): [
        *LLAMA_HEAD, ("tokens", "e94267e288b8"), ("scores", "9837c2ef51d2"), ("token_type", "448bb8d0c10c"),
        *LLAMA_TAIL,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("folder", "rows"), CONVERTER)
def test_keys_values_and_order_of_the_converter(assets: Path, folder: str, rows: int) -> None:
    config = LLAMA if folder == "llama-2" else QWEN
    found = read_tokenizer(assets / "tokenizers" / folder, rows, config)
    assert short(found.kv) == CONVERTER[folder, rows]
    assert not found.warnings


def test_tokens_and_merges_of_ollama(assets: Path) -> None:
    """Ollama's converter counts padding from 0 and goes by the flag of added tokens alone."""
    expected = json.loads((assets / "metadata" / "gguf-expected" / "Qwen2.5-0.5B-Instruct.json").read_text())
    folder = assets / "tokenizers" / "qwen2.5"
    found = values(read_tokenizer(folder, 151936, QWEN))
    tokens = [*found["tokens"][:151665], *(f"[PAD{i}]" for i in range(151936 - 151665))]
    assert sha(tokens) == expected["tokenizer.ggml.tokens"]
    assert sha(found["merges"]) == expected["tokenizer.ggml.merges"]
    types = [1] * 151643 + [4] * (151936 - 151643)
    for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    assert sha(types) == expected["tokenizer.ggml.token_type"]
    assert all(ours in (theirs, 3, 5) for ours, theirs in zip(found["token_type"], types, strict=True))


CASES = {
    "qwen2.5": (151936, {"model_type": "qwen2"}, "qwen2"),
    "qwen3": (151936, {"model_type": "qwen3"}, "qwen2"),
    "llama-2": (32000, {"model_type": "llama"}, "llama-spm"),
    "gpt2": (50257, {"model_type": "gpt2"}, "gpt-2"),
    "falcon": (65024, {"model_type": "falcon"}, "falcon"),
}


@pytest.mark.parametrize("folder", CASES)
def test_llama_cpp_finds_the_tokens_of_its_own_test_strings(
    assets: Path, tmp_path: Path, folder: str
) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    rows, config, name = CASES[folder]
    keys = read_tokenizer(assets / "tokenizers" / folder, rows, config).kv
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys, rows))
    cases = strings_for(assets, name)
    assert len(cases) == 46
    for text, ids in cases:
        assert list(vocab.tokenize(text, False, False)) == ids, text


def test_scores_without_a_sentencepiece_model_are_those_of_the_model(assets: Path, tmp_path: Path) -> None:
    folder = assets / "tokenizers" / "llama-2"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    assert read_tokenizer(tmp_path, 32000, LLAMA).kv == read_tokenizer(folder, 32000, LLAMA).kv


def test_unigram_encodes_as_its_own_library(assets: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    tokenizers = pytest.importorskip("tokenizers")
    folder = assets / "tokenizers" / "t5-small"
    keys = read_tokenizer(folder, 32128, {"model_type": "t5"})
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys.kv, 32128))
    for text in (
        "Hello World",
        "  two  spaces ",
        "The ½ ﬁne naïve café, 3.14!",
        "translate English to German: ok",
    ):
        assert list(vocab.tokenize(text, False, False)) == theirs.encode(text, add_special_tokens=False).ids


def test_wordpiece_finds_the_tokens_of_llama_cpps_vocabulary(assets: Path, tmp_path: Path) -> None:
    """A vocab.txt with the words of llama.cpp's bert-bge vocabulary gives that vocabulary again."""
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    with GGUFFile(assets / "ggml-vocab" / "ggml-vocab-bert-bge.gguf") as file:
        theirs: Any = {key: entry.value for key, entry in file.kv.items()}
    texts, types = theirs["tokenizer.ggml.tokens"], theirs["tokenizer.ggml.token_type"]
    words = [
        text if kind == 3 else text.removeprefix(SPACE) if text.startswith(SPACE) else "##" + text
        for text, kind in zip(texts, types, strict=True)
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({f"{k}_token": f"[{k.upper()}]" for k in ("pad", "unk", "cls", "sep", "mask")})
    )
    keys = read_tokenizer(tmp_path, len(words), {"model_type": "bert", "type_vocab_size": 2})
    found = values(keys)
    assert (found["model"], found["tokens"], found["token_type_count"]) == ("bert", texts, 2)
    assert found["normalizer.lowercase"] is True
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys.kv, len(words)))
    for text, ids in strings_for(assets, "bert-bge"):
        assert list(vocab.tokenize(text, False, False)) == ids, text


def test_a_cased_vocabulary_is_not_lowered(assets: Path) -> None:
    found = values(read_tokenizer(assets / "tokenizers" / "bert-cased", 30000, {"model_type": "bert"}))
    assert found["normalizer.lowercase"] is False
    assert f"{SPACE}London" in found["tokens"]
