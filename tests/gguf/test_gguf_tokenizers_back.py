"""Tokenizers read back from GGUF keys: they must find the tokens that the original, or llama.cpp, finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from qconvert.core.ggml_types import KV
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.tokenizers.from_gguf import lost_tokenizer, tokenizer_files
from qconvert.formats.tokenizers.to_gguf import read_tokenizer
from tests.gguf.test_gguf_tokenizers import STRINGS, TRAINED, train
from tests.support.commands import qconvert
from tests.support.gguf_models import one_layer_llama
from tests.support.gguf_models import test_strings as strings_for

VOCABULARIES = ("bert-bge", "falcon", "gpt-2", "llama-spm")


def rebuilt(kv: Mapping[str, KV]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_files(kv)["tokenizer.json"])


def original(folder: Path) -> Callable[[str], list[int]]:
    """What encodes a text as the model's own files say, with the tokens that go around it."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer

    if (folder / "tokenizer.json").exists():
        theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif (folder / "merges.txt").exists():
        theirs = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    else:
        theirs = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=False)
    return lambda text: list(theirs.encode(text).ids)


@pytest.mark.parametrize(
    ("name", "rows", "model_type"),
    [
        ("t5-small", 32128, "t5"),
        ("bert-cased", 28996, "bert"),
        ("gpt2", 50257, "gpt2"),
        ("falcon", 65024, "falcon"),
        ("qwen3", 151936, "qwen3"),
        ("llama-2", 32000, "llama"),
    ],
)
def test_real_tokenizers_come_back(assets: Path, name: str, rows: int, model_type: str) -> None:
    folder = assets / "tokenizers" / name
    kv = {entry.key: entry for entry in read_tokenizer(folder, rows, {"model_type": model_type}).kv}
    ours, theirs = rebuilt(kv), original(folder)
    texts = [*STRINGS, *(text for which in VOCABULARIES for text, _ in strings_for(assets, which))]
    texts += [
        (assets / "text" / file).read_text()[:20000] for file in ("wiki.test.raw", "tinyshakespeare.txt")
    ]
    for text in texts:
        assert ours.encode(text).ids == theirs(text), text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_of_llama_cpps_tests(assets: Path, name: str) -> None:
    with GGUFFile(assets / "ggml-vocab" / f"ggml-vocab-{name}.gguf") as file:
        ours = rebuilt(file.kv)
    cases = strings_for(assets, name)
    assert len(cases) >= 46
    for text, ids in cases:
        assert ours.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.parametrize("name", TRAINED)
def test_trained_sentencepiece_models_come_back(tmp_path: Path, name: str) -> None:
    theirs = train(tmp_path, **TRAINED[name])
    keys = read_tokenizer(tmp_path, theirs.vocab_size() + 5, {"model_type": name})
    ours = rebuilt({entry.key: entry for entry in keys.kv})
    for text in STRINGS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text


def test_words_around_one_text_and_two(assets: Path) -> None:
    with GGUFFile(assets / "ggml-vocab" / "ggml-vocab-bert-bge.gguf") as file:
        ours = rebuilt(file.kv)
    assert ours.encode("hello").tokens == ["[CLS]", "hello", "[SEP]"]
    pair = ours.encode("hello", "world")
    assert pair.tokens == ["[CLS]", "hello", "[SEP]", "world", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [("model", "rwkv", "rwkv tokenizers are not rebuilt"), ("pre", "dbrx", "splitting rules of dbrx")],
)
def test_a_model_without_its_tokenizer(tmp_path: Path, key: str, value: str, told: str) -> None:
    """What cannot be rebuilt is said, and the weights are written all the same."""
    texts = {"model": "gpt2", "pre": "qwen2", key: value}
    kv = [KV.text(f"tokenizer.ggml.{name}", text) for name, text in texts.items()]
    kv.append(KV.texts("tokenizer.ggml.tokens", ["a", "b"]))
    gguf = one_layer_llama(tmp_path / "m.gguf", kv, 2)
    assert lost_tokenizer({entry.key: entry for entry in kv}) is not None
    ran = qconvert("from-gguf", gguf, "-o", tmp_path / "out")
    assert ran.code == 0 and told in ran.err and "use the model's own tokenizer files" in ran.err
    assert not (tmp_path / "out" / "tokenizer.json").exists()
