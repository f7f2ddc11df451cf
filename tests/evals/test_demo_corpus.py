"""The demo's two texts, and the embedded model they belong to."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
import sysconfig
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from qconvert.demo import MODEL_DIR
from qconvert.demo import corpus as demo_corpus
from qconvert.demo.corpus import HELD_OUT, TRAIN, demo_text

SPARE_TEXT = demo_corpus.SPARE_TEXT.read_text(encoding="utf-8")
WINDOW = 2048


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    return tmp_path / "lib"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_nothing_is_both_trained_on_and_evaluated() -> None:
    assert len({*HELD_OUT, *TRAIN}) == len(HELD_OUT) + len(TRAIN)


def test_every_held_out_module_exists_here() -> None:
    corpus = demo_text("held-out")
    if corpus.fallback:
        pytest.skip("this Python has no library sources")
    assert corpus.missing == ()
    assert corpus.modules == HELD_OUT
    assert corpus.python_version == ".".join(map(str, sys.version_info[:3]))


def test_the_hash_is_of_the_text_and_stable() -> None:
    first, second = demo_text("held-out"), demo_text("held-out")
    assert first == second
    assert first.sha256 == hashlib.sha256(first.text.encode()).hexdigest()


def test_reading_a_module_does_not_import_it() -> None:
    code = (
        "import sys; from qconvert.demo.corpus import demo_text; text = demo_text('train').text; "
        "sys.exit(len(text) < 1000 or not {'antigravity', 'this', 'turtle', 'torch'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_module_may_be_a_file_or_a_package_and_tests_stay_out(stdlib: Path) -> None:
    write(stdlib / "statistics.py", "mean = 1\n")
    write(stdlib / "argparse" / "__init__.py", "parse = 2\n")
    write(stdlib / "argparse" / "inner" / "more.py", "more = 3\n")
    write(stdlib / "argparse" / "tests" / "test_more.py", "secret = 4\n")
    write(stdlib / "pathlib.py", "trained_on = 5\n")
    corpus = demo_text("held-out")
    assert corpus.text == "mean = 1\n\n\nparse = 2\n\n\nmore = 3\n"
    assert corpus.modules == ("statistics", "argparse")
    assert corpus.missing == HELD_OUT[2:]
    assert not corpus.fallback


def test_the_language_reference_is_read_as_prose(stdlib: Path) -> None:
    write(stdlib / "pydoc_data" / "topics.py", "topics = {'with': 'The\\n' \"statement's\", 'x': r'''y'''}\n")
    assert demo_text("train").text == "The\nstatement's\n\ny"


@pytest.mark.parametrize(("kind", "limit"), [("held-out", 2 << 20), ("train", 16 << 20)])
def test_the_text_is_bounded(stdlib: Path, kind: str, limit: int) -> None:
    name = {"held-out": "statistics", "train": "abc"}[kind]
    write(stdlib / f"{name}.py", "#" * (limit + 1))
    assert len(demo_text(kind).text) == limit  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["held-out", "train"])
def test_without_sources_the_text_is_our_own_and_says_so(stdlib: Path, kind: str) -> None:
    corpus = demo_text(kind)  # type: ignore[arg-type]
    assert corpus.fallback
    assert corpus.text == SPARE_TEXT
    assert corpus.sha256 == hashlib.sha256(SPARE_TEXT.encode()).hexdigest()
    assert corpus.modules == ()


def test_both_texts_fill_windows(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(SPARE_TEXT).ids) >= WINDOW
    corpus = demo_text("held-out")
    assert corpus.fallback or len(tokenizer.encode(corpus.text).ids) >= 100_000


def test_the_model_folder_is_complete_and_small() -> None:
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 10_000_000


def test_the_weights_are_bf16_and_rows_fill_super_blocks() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    with safe_open(MODEL_DIR / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
        assert {piece.get_dtype() for piece in slices.values()} == {"BF16"}
    assert config["tie_word_embeddings"] and "lm_head.weight" not in shapes
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    assert all(shape[1] % 256 == 0 for shape in shapes.values() if len(shape) == 2)
    assert len(shapes) == 2 + 11 * config["num_hidden_layers"]


def test_special_tokens_are_last_and_survive_a_round_trip(tokenizer: Tokenizer) -> None:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ids = tokenizer.encode("".join(specials)).ids
    assert ids == [4093, 4094, 4095]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(specials)
    assert sorted(tokenizer.get_vocab().values()) == list(range(4096))
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["vocab_size"] == 4096
    assert config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>")


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_text_is_cut_as_qwen_cuts_it(assets: Path) -> None:
    ours = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    qwen = json.loads((assets / "tokenizers" / "qwen2.5" / "tokenizer.json").read_text(encoding="utf-8"))
    assert ours["normalizer"] == qwen["normalizer"]
    assert ours["pre_tokenizer"]["pretokenizers"][0] == qwen["pre_tokenizer"]["pretokenizers"][0]
    assert ours["pre_tokenizer"]["pretokenizers"][1]["type"] == "ByteLevel"
    assert ours["pre_tokenizer"]["pretokenizers"][1]["use_regex"] is False


def test_the_card_states_the_numbers_of_the_log() -> None:
    log = (MODEL_DIR.parent / "training.log").read_text(encoding="utf-8")
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^held-out perplexity, \w+ .*: ([\d.]+)$", log, re.MULTILINE)
    assert len(numbers) == 2
    assert float(numbers[0]) < float(numbers[1]) / 5
    assert all(f"{number} " in card for number in numbers)


def test_transformers_reads_the_tokenizer_and_the_chat_template(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    text = SPARE_TEXT + "\u00e9\t1234 <|im_end|>"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_model_has_learned_the_language(tokenizer: Tokenizer) -> None:
    """Against the hardest unigram model there is: the frequencies of the evaluated text itself."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    ids = np.array(tokenizer.encode(demo_text("held-out").text).ids)
    frequencies = np.bincount(ids) / len(ids)
    unigram = math.exp(-float(np.mean(np.log(frequencies[ids]))))
    model = transformers.Qwen3ForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    windows = torch.from_numpy(ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)[:2])
    with torch.no_grad():
        loss = model(input_ids=windows, labels=windows).loss.item()
    assert math.exp(loss) < unigram / 5
