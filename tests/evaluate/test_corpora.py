"""Texts by their bytes, tokens by their tokenizer; the two spellings of wikitext-2."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from qconvert.errors import BadRecipe, QConvertError
from qconvert.evaluate import corpora
from qconvert.evaluate.corpora import hf_join, load_text
from qconvert.evaluate.protocols import protocol_named
from qconvert.formats.tokenizers.tokenized_text import check_tokenizer, tokenize


def write_tokenizer(folder: Path, *, bos: bool) -> Path:
    words = {"<s>": 0, "a": 1, "b": 2, "?": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_text_keeps_its_bytes_but_for_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffa\r\nb\u2028é".encode())
    text = load_text(path)
    assert text.text == "a\r\nb\u2028é"
    assert (text.name, text.nbytes) == ("text.txt", 9)
    assert text.sha256 == hashlib.sha256("a\r\nb\u2028é".encode()).hexdigest()


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(QConvertError, match=r"latin\.txt: byte 3 is not UTF-8"):
        load_text(tmp_path / "latin.txt")
    with pytest.raises(QConvertError, match=r"nowhere\.txt: No such file"):
        load_text(tmp_path / "nowhere.txt")


def test_rows_of_the_datasets_library() -> None:
    assert hf_join(" \n = Title = \n \n Text\u2028more\n") == "\n\n = Title = \n\n\n\n\n Text\u2028more\n"


@pytest.mark.parametrize("bos", [False, True])
def test_tokens_are_free_of_special_ones(tmp_path: Path, bos: bool) -> None:
    (tmp_path / "text.txt").write_text("a b b a")
    tokens = tokenize(load_text(tmp_path / "text.txt"), write_tokenizer(tmp_path, bos=bos))
    assert tokens.ids_N.tolist() == [1, 2, 2, 1]
    assert tokens.bos == (0 if bos else None)
    assert tokens.tokenizer_sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_tokenizers_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a")
    text = load_text(tmp_path / "text.txt")
    with pytest.raises(QConvertError, match=r"tokenizer\.json: No such file"):
        tokenize(text, tmp_path)
    for broken in (b"{", b"\xff", b'{"model": {"type": "Unheard"}}'):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(QConvertError, match=r"tokenizer\.json: "):
            tokenize(text, tmp_path)


def hub_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, data: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "wikitext.zip", "w") as archive:
        archive.writestr(name, data)
    monkeypatch.setattr(corpora, "_archive", lambda: str(tmp_path / "wikitext.zip"))


@pytest.mark.parametrize(
    ("offline", "says"),
    [
        ("0", "SourceUnavailable: wikitext2: cannot be downloaded from"),
        ("1", "QConvertError: wikitext2: cannot be downloaded from ggml-org/ci: it is not in the cache"),
    ],
)
def test_without_a_network_it_says_so_once_and_soon(tmp_path: Path, offline: str, says: str) -> None:
    program = "from qconvert.evaluate.corpora import load_text; load_text('wikitext2')"
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **nobody},
        capture_output=True,
        text=True,
        check=False,
    )
    assert says in done.stderr and "Retry" not in done.stderr
    assert time.monotonic() - started < 20  # of which the library alone would wait 23


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("wikitext-2-raw/wiki.test.raw", b"x", "1 bytes, not 1290590"),
        ("wikitext-2-raw/wiki.test.raw", b"x" * 1_290_590, "not the published ones"),
        ("elsewhere.txt", b"x", "cannot be downloaded"),
    ],
)
def test_other_bytes_from_the_hub_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    hub_with(monkeypatch, tmp_path, name, data)
    with pytest.raises(QConvertError, match=says):
        load_text("wikitext2")


def test_wikitext_from_the_hub_in_both_spellings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, assets: Path
) -> None:
    raw = (assets / "text" / "wiki.test.raw").read_bytes()
    hub_with(monkeypatch, tmp_path, corpora._WIKITEXT_MEMBER, raw)
    for spelling, file in (("raw", "wiki.test.raw"), ("hf-join", "test.hf-join.txt")):
        assert load_text("wikitext2", spelling) == load_text(assets / "text" / file)


def test_wikitext_in_qwen_tokens(assets: Path) -> None:
    text = load_text(assets / "text" / "test.hf-join.txt")
    tokens = tokenize(text, assets / "tokenizers" / "qwen2.5")
    assert text.name == "wikitext-2 test (hf-join)"
    assert (len(tokens.ids_N), tokens.bos) == (299_078, None)
    assert len(protocol_named("gptq2048").windows(len(tokens.ids_N))) == 146


def test_llama_puts_a_token_first(assets: Path) -> None:
    text = load_text(assets / "text" / "heldout-novel.txt")
    assert tokenize(text, assets / "models" / "stories260K-hf").bos == 1


def test_tokenizers_are_compared_by_the_tokens_of_the_text(tmp_path: Path) -> None:
    """Files that differ but cut alike pass; the first unlike token is named; no tokenizer is none."""
    folders = [tmp_path / name for name in ("first", "same", "like", "unlike", "longer", "none")]
    for folder in folders:
        folder.mkdir()
    first, same, like, unlike, longer, none = folders
    write_tokenizer(first, bos=False)
    write_tokenizer(same, bos=False)
    write_tokenizer(like, bos=True)
    for folder, words in ((unlike, {"a": 1, "b": 3, "?": 2}), (longer, {"a": 1, "b": 2, "?": 3})):
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        if folder is longer:
            tokenizer.pre_tokenizer = pre_tokenizers.Split("x", "isolated")
        tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a a b a")
    text = tokenize(load_text(tmp_path / "text.txt"), first)
    assert check_tokenizer(text, "same", same) == text.tokenizer_sha256
    assert check_tokenizer(text, "like", like) not in (None, text.tokenizer_sha256)
    assert check_tokenizer(text, "none", none) is None
    with pytest.raises(
        BadRecipe, match=r"token 2 of text.txt is 2 by the first .* 3 \('b'\) by that of unlike"
    ):
        check_tokenizer(text, "unlike", unlike)
    with pytest.raises(
        BadRecipe, match=r"token 0 of text.txt is 1 by the first .* 3 \('\?'\) by that of longer"
    ):
        check_tokenizer(text, "longer", longer)
