"""Tokenizer files of every kind: llama.cpp must find in a GGUF the tokens that their own library finds."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.tokenizers.pretokenizer_patterns import LLAMA3
from qconvert.formats.tokenizers.pretokenizers import RULES
from qconvert.formats.tokenizers.tiktoken import find_tiktoken, read_ranks, read_tiktoken
from qconvert.formats.tokenizers.to_gguf import read_tokenizer
from tests.gguf.test_gguf_pretokenizer import spelled
from tests.support.gguf_models import TEXT, llama_cpp_vocab, one_layer_llama
from tests.support.gguf_models import test_strings as strings_for

STRINGS = [
    "Hello World",
    "  two  spaces ",
    "The ½ ﬁne naïve café, 3.14!",
    "\n\n\n\t\ta",
    "<table>x</table>",
    "\uff46\uff55\uff4c\uff4c",
    "nouns' 1234 brown\r\n  foxes",
    "Führer тест 试验 🦙",
    "\u0301e",
    "it's 'LL",
]
# One line for each setting of SentencePiece's trainer that a family in the catalogue uses.
TRAINED: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True},
    "baichuan": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "gemma": {
        "model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "split_digits": True,
        "user_defined_symbols": ["\n", "\n\n", "\t\t", "▁▁", "▁▁▁▁", "<table>", "</table>"],
    },
    "t5": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "unigram": {"model_type": "unigram", "add_dummy_prefix": False},
}  # fmt: skip


def train(folder: Path, **options: Any) -> Any:
    """A SentencePiece model of a few hundred pieces as tokenizer.model, and its own library's reader."""
    spm = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text(TEXT.replace(". ", ".\n") * 20 + "0123456789 abc XYZ äöü\n")
    spm.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options},
    )
    return spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("name", TRAINED)
def test_sentencepiece_models_encode_as_their_own_library(tmp_path: Path, name: str) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    theirs = train(tmp_path, **TRAINED[name])
    rows = theirs.vocab_size() + 5
    keys = read_tokenizer(tmp_path, rows, {"model_type": name})
    assert not keys.warnings
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys.kv, rows))
    for text in STRINGS:
        assert list(vocab.tokenize(text, False, False)) == theirs.encode(text), text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"model_type": "unigram", "byte_fallback": True}, "unknown characters as bytes"),
    ],
)
def test_what_llama_cpp_does_not_do_is_said(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    rows = train(tmp_path, **options).vocab_size()
    (warning,) = read_tokenizer(tmp_path, rows, {}).warnings
    assert told in warning


@pytest.mark.parametrize("folder", ["llama-2", "chatglm3"])
def test_real_sentencepiece_models(assets: Path, tmp_path: Path, folder: str) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    spm = pytest.importorskip("sentencepiece")
    path = assets / "tokenizers" / folder
    theirs = spm.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    keys = read_tokenizer(path, 65024, {"model_type": "chatglm"})
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys.kv, 65024))
    for text in [*STRINGS, *(text for text, _ in strings_for(assets, "llama-spm"))]:
        assert list(vocab.tokenize(text, False, False)) == theirs.encode(text), text
    if folder == "chatglm3":  # whose control tokens stand in no file; the last one begins a turn
        prompt = list(vocab.tokenize("[gMASK]sop<|user|>", False, True))
        assert prompt == [64790, 64792, 64795]
        assert vocab.token_eot() == 64795 and not vocab.get_add_bos()


def vocabularies() -> list[str]:
    """The byte-level vocabularies of llama.cpp's own tests whose rules are in the table."""
    return [rule.name for rule in RULES]


@pytest.mark.parametrize("name", vocabularies())
def test_vocabularies_of_llama_cpps_tests(assets: Path, tmp_path: Path, name: str) -> None:
    """A tokenizer.json of our rule and llama.cpp's tokens gives the ids that llama.cpp's test expects."""
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    path = assets / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    if not (path.is_file() and path.with_suffix(".gguf.inp").is_file()):
        pytest.skip(f"{path.name} is not among the assets")
    with GGUFFile(path) as file:
        kv: dict[str, Any] = {key.rpartition(".")[2]: entry.value for key, entry in file.kv.items()}
    rule = next(rule for rule in RULES if rule.name == name)
    tokens = list(enumerate(zip(kv["tokens"], kv["token_type"], strict=True)))
    spec = spelled(rule)
    spec["model"] |= {
        "vocab": {text: i for i, (text, kind) in tokens if kind == 1},
        "merges": [merge.split(" ") for merge in kv["merges"]],
    }
    spec["added_tokens"] = [
        {"id": i, "content": text, "special": kind == 3} for i, (text, kind) in tokens if kind in (3, 4)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    keys = read_tokenizer(tmp_path, len(tokens), {"model_type": next(iter(rule.model_types), "x")})
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys.kv, len(tokens)))
    cases = strings_for(assets, name)
    assert len(cases) >= 46
    for text, ids in cases:
        assert list(vocab.tokenize(text, False, False)) == ids, text


def tiktoken_lines(vocab: dict[str, int]) -> str:
    """A vocabulary as OpenAI's and Qwen's files spell it; letters stand for bytes by transformers' table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {ord(letter): byte for byte, letter in bytes_to_unicode().items()}
    raw = ((bytes(map(letters.__getitem__, map(ord, text))), rank) for text, rank in vocab.items())
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in raw)


def test_the_merges_of_a_tiktoken_file_are_those_of_the_same_models_tokenizer_json(
    assets: Path, tmp_path: Path
) -> None:
    """Qwen 1 and Qwen 2 have the same tokens; Qwen 2 lists its merges."""
    model = json.loads((assets / "tokenizers" / "qwen2.5" / "tokenizer.json").read_text())["model"]
    (tmp_path / "qwen.tiktoken").write_text(tiktoken_lines(model["vocab"]))
    path = find_tiktoken(tmp_path)
    assert path is not None
    found = read_tiktoken(path, {"tokenizer_class": "QWenTokenizer"}, {})
    assert found["model"]["vocab"] == model["vocab"]
    listed = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    assert found["model"]["merges"] == listed
    assert not found["model"]["ignore_merges"]
    assert [token["id"] for token in found["added_tokens"]][:3] == [151643, 151644, 151645]


def small_ranks(folder: Path, name: str = "qwen.tiktoken") -> Path:
    """A tiktoken file of all bytes and a few merges."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"in", b"th", b"the", b" the", b"ing"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / name).write_text("".join(lines))
    return folder / name


@pytest.mark.parametrize(
    ("name", "model_type", "pre"),
    [("qwen.tiktoken", "qwen", "qwen2"), ("tokenizer.model", "chatglm", "chatglm-bpe")],
)
def test_tiktoken_folders(tmp_path: Path, name: str, model_type: str, pre: str) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    small_ranks(tmp_path, name)
    settings = {"added_tokens_decoder": {"261": {"content": "<|user|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings if model_type == "chatglm" else {}))
    keys = read_tokenizer(tmp_path, 500, {"model_type": model_type}).kv
    values = {entry.key: entry.value for entry in keys}
    assert values["tokenizer.ggml.pre"] == pre
    vocab, _model = llama_cpp_vocab(llama_cpp, one_layer_llama(tmp_path / "m.gguf", keys, 500))
    assert list(vocab.tokenize("the thing", False, False)) == [258, 32, 257, 260]
    special = "<|user|>" if model_type == "chatglm" else "<|endoftext|>"
    assert list(vocab.tokenize(special, False, True)) == [261]


def test_a_tiktoken_file_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    small_ranks(tmp_path)
    with pytest.raises(UnsupportedModel, match="splitting rules that are not known") as caught:
        read_tokenizer(tmp_path, 500, {"model_type": "strange"})
    assert "tokenizer.json" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("YQ== x", "line 257 is not a token"),
        ("Y 9999", "line 257 is not a token"),
        ("YWI= 5", "257 tokens have 256 ranks"),
        (f"{base64.b64encode(b'a' * 600).decode()} 999", "token 256 has a length of 600"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused(tmp_path: Path, line: str, told: str) -> None:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (tmp_path / "qwen.tiktoken").write_text("\n".join([*lines, line]))
    with pytest.raises(CorruptCheckpoint, match=told):
        read_ranks(tmp_path / "qwen.tiktoken")


def test_glm_stops_where_a_turn_or_a_call_ends(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": LLAMA3[0]}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "use_regex": False}
    spec = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "added_tokens": [
            {"id": 3 + i, "content": text, "special": True}
            for i, text in enumerate(["<|endoftext|>", "<|user|>", "<|observation|>"])
        ],
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": [["a", "b"]],
            "ignore_merges": True,
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    keys = {e.key.rpartition(".")[2]: e.value for e in read_tokenizer(tmp_path, 6, {"model_type": "glm4"}).kv}
    assert keys["pre"] == "glm4"
    assert [keys[f"{kind}_token_id"] for kind in ("eos", "unknown", "eot", "eom")] == [3, 3, 4, 5]


def test_a_sentencepiece_model_alone_is_enough(assets: Path, tmp_path: Path) -> None:
    shutil.copy(assets / "tokenizers" / "llama-2" / "tokenizer.model", tmp_path)
    keys = {e.key.rpartition(".")[2]: e.value for e in read_tokenizer(tmp_path, 32000, {}).kv}
    assert (keys["model"], keys["unknown_token_id"]) == ("llama", 0)
