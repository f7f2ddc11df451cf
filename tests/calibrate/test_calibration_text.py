"""Calibration text: what is read, how it is cut, and that none of it is what quality is measured on."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from qconvert.calibrate.sources import DEFAULT_FILE, open_source
from qconvert.calibrate.text import PACKED, WHOLE, CalibrationText, calibration_windows
from qconvert.demo.corpus import SPARE_TEXT, demo_text
from qconvert.errors import BadRecipe, QConvertError
from qconvert.evaluate.corpora import load_text
from qconvert.formats.tokenizers.prompts import Dialogue, open_dialogue
from tests.checkpoint.test_hub import COMMIT, Hub, ask

SUM = r"(?:What is|Add|Compute)\D*(\d+)(?: \+ |\+| and )(\d+)\b(?!/)"
BOS, EOS, SPECIAL = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<turn>{{ m.role }}: {{ m.content }}{% endfor %}"
)


def dialogue(folder: Path, *, bos: bool = False, template: str | None = None, rows: int = 260) -> Dialogue:
    """A tokenizer of bytes, with three special tokens beyond them."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<s>", "</s>", "<turn>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_dialogue(folder, {"vocab_size": rows})


def letters_of(ids: np.ndarray) -> str:
    """The ASCII text of ids, special tokens as `|`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join("|" if i >= BOS else alphabet[i] for i in ids.ravel()).replace("Ġ", " ").replace("Ċ", "\n")


def packed(folder: Path, texts: dict[str, str], tokens: int | None, window: int = 16) -> CalibrationText:
    names = []
    for name, text in texts.items():
        (folder / name).write_text(text)
        names.append(str(folder / name))
    return calibration_windows(dialogue(folder / "model"), names, tokens, window)


def test_every_piece_of_a_packed_text_comes_once_between_ends(tmp_path: Path) -> None:
    lines = [f"{letter * 20}\n" for letter in "abcdefghijkl"]
    found = packed(tmp_path, {"t.txt": "".join(lines)}, None, 16)
    pieces = {"".join(lines[i : i + 3]) for i in range(0, 12, 3)}  # of about four characters a token
    *whole, last = letters_of(found.tokens_BT).split("|")
    assert sorted(whole) == sorted(pieces) and last == ""
    assert EOS in found.tokens_BT and found.tokens_BT.dtype == np.int64
    assert found.tokens_BT.shape == (found.tokens // 16, 16) == (16, 16)
    model, text = open_dialogue(tmp_path / "model", {}), [str(tmp_path / "t.txt")]
    orders = [calibration_windows(model, text, None, 16, seed=seed).tokens_BT for seed in range(4)]
    assert np.array_equal(found.tokens_BT, orders[0]) and not np.array_equal(orders[0], orders[1])
    starts = {letters_of(order[0])[0] for order in orders}
    assert len(starts) > 1


def test_several_texts_share_the_tokens_and_a_short_one_leaves_its_rest(tmp_path: Path) -> None:
    texts = {"a.txt": "a" * 4000, "b.txt": "b" * 4000, "c.txt": "c" * 40}
    shown = letters_of(packed(tmp_path, texts, 2048).tokens_BT)
    counts = {letter: shown.count(letter) for letter in "abc"}
    assert counts["c"] == 40 and abs(counts["a"] - counts["b"]) <= 100
    assert sum(counts.values()) > 1900


def test_a_whole_text_is_cut_as_llama_imatrix_cuts_it(tmp_path: Path) -> None:
    """Tokenized once with its BOS, windows without overlap, BOS put over the first token of each."""
    text = "".join(chr(97 + i % 26) for i in range(100)) + " <turn> is text here" * 3
    (tmp_path / "t.txt").write_text(text)
    model = dialogue(tmp_path / "model", bos=True)
    found = calibration_windows(model, [str(tmp_path / "t.txt")], None, 20, protocol=WHOLE)
    stream = "|" + text
    assert len(found.tokens_BT) == len(stream) // 20
    for i, window in enumerate(found.tokens_BT):
        assert letters_of(window) == "|" + stream[20 * i + 1 : 20 * i + 20]
    assert SPECIAL not in found.tokens_BT
    parsed = calibration_windows(model, [str(tmp_path / "t.txt")], None, 20, protocol=PACKED)
    assert SPECIAL in parsed.tokens_BT and set(parsed.tokens_BT[:, 0]) == {BOS}


def test_lines_of_jsonl_are_documents_and_chats_take_the_models_template(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    lines = [{"text": "plain"}, {"messages": chat}, {"messages": [{"role": "system", "content": "x"}, *chat]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    name = [str(tmp_path / "t.jsonl")]
    found = calibration_windows(dialogue(tmp_path / "m", template=TEMPLATE), name, None, 16, protocol=WHOLE)
    shown = letters_of(found.tokens_BT)
    assert shown.startswith("plain|user: Why?|assistant: Because.System: x\n\nUser: Why?")
    assert found.tokens_BT.ravel()[5] == SPECIAL
    plain = calibration_windows(dialogue(tmp_path / "base"), name, None, 16, protocol=WHOLE)
    assert letters_of(plain.tokens_BT).startswith("plainUser: Why?\n\nAssistant: Because.\n")


def test_the_record_names_the_files_and_hashes_them_as_evaluation_does(tmp_path: Path) -> None:
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "more" / "b.md").write_text("b" * 99)
    (tmp_path / "texts" / "a.txt").write_bytes("\ufeffa".encode() * 3)
    (tmp_path / "texts" / "left.out").write_text("?")
    found = calibration_windows(dialogue(tmp_path / "m"), [str(tmp_path / "texts")], 32, 16)
    files = [tmp_path / "texts" / "a.txt", tmp_path / "texts" / "more" / "b.md"]
    assert found.text_sha256 == tuple(load_text(path).sha256 for path in files)
    assert found.record["texts"] == ["texts"] and found.record["tokens"] == 32
    assert [file["name"] for file in found.record["files"]] == ["a.txt", "b.md"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("t.txt", b"short", r"has 6 tokens, 16 are needed"),
        ("t.txt", b"", r"there is no text in it"),
        ("t.txt", b" \n\t ", r"there is no text in it"),
        ("t.txt", b"abc\0def" * 50, r"is binary: character 3 is NUL"),
        ("t.txt", b"abc\xff", r"byte 3 is not UTF-8"),
        ("t.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"t.jsonl line 2: has neither a text nor messages"),
        ("t.jsonl", b'{"messages": [1]}\n', r"t.jsonl line 1: has neither"),
        ("t.jsonl", b"{", r"t.jsonl line 1: is not valid JSON"),
    ],
)
def test_texts_that_are_none_are_told_in_one_sentence(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(QConvertError, match=says) as told:
        calibration_windows(dialogue(tmp_path / "m"), [str(tmp_path / name)], None, 16)
    assert told.value.hint


def test_what_cannot_be_cut_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.txt").write_text("z" * 99)
    text, model = str(tmp_path / "t.txt"), dialogue(tmp_path / "m")
    with pytest.raises(QConvertError, match=r"nowhere: No such file"):
        calibration_windows(model, [str(tmp_path / "nowhere")], None, 16)
    with pytest.raises(QConvertError, match=r"empty: holds no .txt, .md, .jsonl file"):
        calibration_windows(model, [str(tmp_path / "empty")], None, 16)
    with pytest.raises(BadRecipe, match="window 8: too short"):
        calibration_windows(model, [text], None, 8)
    with pytest.raises(BadRecipe, match="10 tokens: fewer than the 16 that are needed"):
        calibration_windows(model, [text], 10, 16)
    with pytest.raises(BadRecipe, match="tokens, 128 are needed"):
        calibration_windows(model, [text], None, 64, protocol=WHOLE)
    with pytest.raises(BadRecipe, match=r"token 89 is beyond the model's 80 rows"):
        calibration_windows(dialogue(tmp_path / "small", rows=80), [text], None, 16)


# The bundled text


@pytest.fixture(scope="module")
def bundled() -> str:
    return lzma.decompress(DEFAULT_FILE.read_bytes()).decode()


def test_the_bundled_text_is_small_and_of_many_kinds(bundled: str) -> None:
    folder = DEFAULT_FILE.parent
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
    documents = [json.loads(line) for line in bundled.splitlines()]
    assert len(documents) > 500 and len(bundled.encode()) > 1_000_000
    assert sum("messages" in document for document in documents) > 200
    assert sum("tools" in document for document in documents) > 30
    for written in ("ж", "的", "です", "है", "ال", "SELECT", "#include", "fn ", "def ", "func ", "<div"):
        assert written in bundled, written
    readme = (folder / "README.md").read_text()
    assert hashlib.sha256(bundled.encode()).hexdigest() in readme
    assert {"MIT", "BSD-3-Clause", "PSF-2.0", "Apache-2.0"} <= {
        word for word in readme.replace("|", " ").replace(";", " ").replace(".\n", " ").split()
    }
    assert "Permission is hereby granted" in (folder / "LICENSES.txt").read_text()


def test_the_bundled_text_has_its_share_of_random_tokens(tmp_path: Path) -> None:
    model = dialogue(tmp_path / "m")
    found = calibration_windows(model, ["default"], 65536, 1024)
    source = open_source("default")
    assert source.random_share == 0.05
    drawn = np.isin(found.tokens_BT, np.arange(0, 256))
    assert drawn.any() and found.tokens_BT.max() < BOS + 3
    # Bytes that UTF-8 never has come from the random tokens alone: 13 of 256.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    never = [i for i, byte in enumerate(alphabet) if byte in _never()]
    share = float(np.isin(found.tokens_BT, never).mean()) * 256 / len(never)
    assert 0.03 < share < 0.07


def _never() -> set[str]:
    """How the byte-level alphabet writes the bytes that no UTF-8 text has."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return {names[byte] for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}


def lines_of(text: str, least: int = 60) -> set[str]:
    return {line.strip() for line in text.split("\n") if len(line.strip()) >= least}


def contents(bundled: str) -> Iterator[str]:
    """Every text and message of the bundled documents."""
    for line in bundled.splitlines():
        document = json.loads(line)
        yield document.get("text", "")
        for message in document.get("messages", []):
            yield message["content"]


def test_the_bundled_text_holds_nothing_that_quality_is_measured_on(bundled: str) -> None:
    own = lines_of("\n".join(contents(bundled)))
    assert len(own) > 3000
    for text in (demo_text("held-out").text, SPARE_TEXT.read_text()):
        assert len(own & lines_of(text)) <= 2  # licence lines that half of the library has


def test_the_bundled_text_holds_no_line_of_the_evaluation_texts(bundled: str, assets: Path) -> None:
    own = lines_of("\n".join(contents(bundled)), 40)
    for name in ("wiki.test.raw", "heldout-novel.txt", "tinyshakespeare.txt"):
        assert not own & lines_of((assets / "text" / name).read_text(encoding="utf-8"), 40), name


# The Hub


READ = """
import json, sys
from qconvert.errors import QConvertError
from qconvert.calibrate.sources import open_source
for name, _ in json.loads(sys.argv[1]):
    try:
        found = open_source(name)
        print(json.dumps([found.name, [file.name for file in found.files], len(found.documents)]))
    except QConvertError as error:
        print(json.dumps({"fact": error.fact, "hint": error.hint}))
"""


def test_a_dataset_of_the_hub_gives_its_text_files(tmp_path: Path) -> None:
    files = {"data/a.jsonl": b'{"text": "one"}\n{"text": "two"}\n', "b.txt": b"three", "c.parquet": b"PAR1"}
    with Hub() as server:
        server.repos = {"datasets/org/texts": files, "datasets/org/tables": {"c.parquet": b"PAR1"}}
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        names = ("hub:org/texts", f"hub:org/texts@{COMMIT}", "hub:org/tables", "hub:org/none", "hub:nonsense")
        calls = [(name, {}) for name in names]
        found, pinned, tables, none, nonsense = ask(server.url, tmp_path, *calls, script=READ)
        assert found == ["hub:org/texts", ["b.txt", "a.jsonl"], 3] and pinned[1:] == found[1:]
        assert "c.parquet" not in server.asked
        assert tables["fact"] == "text hub:org/tables: holds no .txt, .md, .jsonl file"
        assert none["fact"] == "org/none: there is no such dataset on the Hub"
        assert nonsense["fact"] == "nonsense: not a valid name for a dataset on the Hub"
        server.shutdown()


def test_made_chats_are_right_and_repeat() -> None:
    import random

    from evals.calibration_dialogues import arithmetic, queries, records, tool_chats

    made = [list(arithmetic(random.Random(5), 80)) for _ in range(2)]
    assert made[0] == made[1]
    sums = 0
    for chat in made[0]:
        turns = chat["messages"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            if terms := re.match(
                r"(?:What is|Add|Compute)\D*(\d+)(?: \+ |\+| and )(\d+)\b(?!/)", question["content"]
            ):
                sums += 1
                assert f"**{int(terms[1]) + int(terms[2])}**" in answer["content"]
    assert sums > 4
    for chat in tool_chats(random.Random(5), 10):
        (call,) = chat["messages"][1]["tool_calls"]
        assert call["function"]["name"] in {tool["function"]["name"] for tool in chat["tools"]}
    assert all("SELECT" in text for text in queries(random.Random(5), 3))
    assert json.loads(next(records(random.Random(5), 1)))["total"] >= 3
