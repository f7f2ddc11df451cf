"""Tokenizers as GGUF keys: what settings, templates and added tokens say, and what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.ggml_types import KV
from qconvert.errors import BadRecipe, CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.formats.tokenizers.pretokenizer_patterns import QWEN2
from qconvert.formats.tokenizers.to_gguf import read_tokenizer
from tests.gguf.test_gguf_vocab import LLAMA, SPACE, values


def small(folder: Path, settings: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A byte-level tokenizer of six tokens."""
    split = {"type": "Split", "pattern": {"Regex": QWEN2[0]}, "behavior": "Isolated", "invert": False}
    tokenizer: dict[str, Any] = {
        "added_tokens": [{"id": 4, "content": "<|end|>", "special": True}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
        },
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": [["a", "b"]]},
    }
    tokenizer["model"] |= changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **changes}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {"eos_token": "<|end|>"}))
    return folder


def test_rows_without_a_token_are_padding(tmp_path: Path) -> None:
    found = values(read_tokenizer(small(tmp_path), 7, {}))
    assert found["tokens"] == ("a", "b", "ab", "Ġ", "<|end|>", "[PAD5]", "[PAD6]")
    assert found["token_type"] == (1, 1, 1, 1, 3, 5, 5)
    assert found["merges"] == ("a b",)
    assert found["eos_token_id"] == 4


def test_a_fine_tuned_vocabulary_keeps_its_words(tmp_path: Path) -> None:
    added = [
        {"id": 4, "content": "<|end|>", "special": True},
        {"id": 5, "content": f"caf\u00e9{SPACE}au lait", "special": False},
        {"id": 6, "content": "<|tool|>", "special": False},
        {"id": 7, "content": "<pad>", "special": False},
    ]
    found = values(read_tokenizer(small(tmp_path, added_tokens=added), 8, {}))
    assert found["pre"] == "qwen2"
    assert found["tokens"][4:] == ("<|end|>", "caf\u00e9 au lait", "<|tool|>", "<pad>")
    assert found["token_type"][4:] == (3, 4, 3, 3)


def test_tokens_of_the_settings_alone_count_too(tmp_path: Path) -> None:
    settings = {
        "eos_token": {"content": "<|end|>"},
        "pad_token": "<p>",
        "added_tokens_decoder": {"5": {"content": "<p>", "special": False}, "6": {"content": "word"}},
    }
    found = values(read_tokenizer(small(tmp_path, settings), 8, {"pad_token_id": 5}))
    assert found["tokens"][5:] == ("<p>", "word", "[PAD7]")
    assert found["token_type"][5:] == (3, 4, 5)
    assert (found["eos_token_id"], found["padding_token_id"]) == (4, 5)


def test_an_id_beyond_the_embedding_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"'<\|end\|>' has id 4; the embedding has 4 rows"):
        read_tokenizer(small(tmp_path), 4, {})


def test_a_special_id_beyond_the_vocabulary_is_left_out_aloud(tmp_path: Path) -> None:
    found = read_tokenizer(small(tmp_path), 5, {"bos_token_id": 99})
    assert "bos_token_id" not in values(found)
    assert found.warnings == ("bos_token_id is 99, outside the 5 tokens; left out",)


def template(*tokens: str | None, pair: tuple[str | None, ...] = ()) -> dict[str, Any]:
    def entries(names: tuple[str | None, ...]) -> list[dict[str, Any]]:
        texts = iter("AB")
        return [{"SpecialToken": {"id": n}} if n else {"Sequence": {"id": next(texts)}} for n in names]

    return {"type": "TemplateProcessing", "single": entries(tokens), "pair": entries(pair)}


@pytest.mark.parametrize(
    ("processor", "settings", "added"),
    [
        ({"type": "ByteLevel"}, {"add_bos_token": True}, {"bos": False, "eos": False}),
        (template("<s>", None), {"bos_token": "<s>"}, {"bos": True}),
        (template("<s>", None), {}, {"bos": True}),
        (template(None, "</s>"), {"eos_token": "</s>"}, {"eos": True}),
        (
            template("<s>", None, pair=("<s>", None, "<s>", None)),
            {"bos_token": "<s>"},
            {"bos": True, "sep": False},
        ),
        (
            template("[CLS]", None, "[SEP]", pair=("[CLS]", None, "[SEP]", None, "[SEP]")),
            {"cls_token": "[CLS]", "sep_token": "[SEP]"},
            {"bos": True, "eos": True, "sep": False},
        ),
        (
            {"type": "RobertaProcessing", "cls": ["<s>", 0], "sep": ["</s>", 2]},
            {},
            {"bos": True, "eos": True, "sep": True},
        ),
        (None, {"add_bos_token": False, "add_eos_token": True}, {"bos": False, "eos": True}),
        (None, {}, {}),
    ],
)
def test_what_is_put_around_a_text(
    tmp_path: Path, processor: dict[str, Any] | None, settings: dict[str, Any], added: dict[str, bool]
) -> None:
    found = values(read_tokenizer(small(tmp_path, {"x": 1, **settings}, post_processor=processor), 5, {}))
    assert {k[4:-6]: v for k, v in found.items() if k.startswith("add_")} == added


def test_llama_3_without_a_bos_template_is_told_not_to_add_one(tmp_path: Path) -> None:
    regex = QWEN2[0].replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    pre = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}
    small(tmp_path, normalizer=None, pre_tokenizer=pre, model={"ignore_merges": True})
    found = values(read_tokenizer(tmp_path, 5, {}))
    assert (found["pre"], found["add_bos_token"]) == ("llama-bpe", False)


def test_chat_templates_from_wherever_they_are(tmp_path: Path) -> None:
    def keys() -> dict[str, Any]:
        found = read_tokenizer(tmp_path, 5, {})
        return {e.key: e.value for e in found.kv if "chat" in e.key}

    small(tmp_path)
    assert not keys()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert keys() == {"tokenizer.chat_template": "from json"}
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert keys() == {"tokenizer.chat_template": "from jinja"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool-use.jinja").write_text("tools")
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ("tool_use",)}
    assert keys() == {**named, "tokenizer.chat_template": "from jinja"}
    small(tmp_path, {"chat_template": "from settings"})
    assert keys() == {"tokenizer.chat_template": "from settings"}
    small(tmp_path, {"chat_template": 7})
    assert not keys()


def test_code_llama_and_granite_keep_their_exceptions(tmp_path: Path) -> None:
    small(tmp_path, {"add_bos_token": True})
    llama = {"model_type": "llama"}
    assert values(read_tokenizer(tmp_path, 32016, llama))["eot_token_id"] == 32010
    assert values(read_tokenizer(tmp_path, 49152, llama))["add_bos_token"] is False
    assert values(read_tokenizer(tmp_path, 49152, {}))["add_bos_token"] is True


def test_the_space_before_the_first_word_is_said_for_llama(assets: Path, tmp_path: Path) -> None:
    shutil.copy(assets / "tokenizers" / "llama-2" / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": False}))
    keys = read_tokenizer(tmp_path, 32000, LLAMA).kv
    assert keys[0] == KV.flag("tokenizer.ggml.add_space_prefix", value=False)


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"model": {"vocab": {"a": 0, "b": 0}}}, CorruptCheckpoint, "'a' and 'b' have id 0"),
        ({"model": {"vocab": {"a": -1}}}, CorruptCheckpoint, "'a' has id -1"),
        ({"model": {"vocab": [1]}}, CorruptCheckpoint, "vocab entry 0"),
        ({"model": {"merges": [["a"]]}}, CorruptCheckpoint, "merge 0"),
        ({"added_tokens": [{"id": "x", "content": "t"}]}, CorruptCheckpoint, "'t' has id x"),
        ({"added_tokens": [{"id": 1}]}, CorruptCheckpoint, "not a token"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, UnsupportedModel, "without bytes to fall back on"),
    ],
)
def test_what_makes_no_vocabulary_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[QConvertError], names: str
) -> None:
    with pytest.raises(error) as caught:
        read_tokenizer(small(tmp_path, **changes), 5, {})
    assert names in caught.value.fact


def parameters(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of every value inside a JSON value."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from parameters(child, (*path, key))


@settings(max_examples=300)
@given(data=st.data())
def test_no_odd_value_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = small(
        tmp_path_factory.mktemp("odd"), {"eos_token": "<|end|>", "added_tokens_decoder": {"4": {}}}
    )
    file = folder / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = json.loads(file.read_text())
    content |= data.draw(
        st.sampled_from([{}, {"post_processor": template("<s>", None, pair=(None, "x", None))}])
    )
    *parents, last = data.draw(st.sampled_from(list(parameters(content))))
    target = content
    for key in parents:
        target = target[key]
    target[last] = data.draw(
        st.sampled_from([None, True, 0, -1, 1 << 70, 0.5, "", "x", [], [1], {}, {"x": []}])
    )
    file.write_text(json.dumps(content))
    with contextlib.suppress(QConvertError):
        read_tokenizer(folder, 5, {})


def test_merges_in_no_order_are_refused(tmp_path: Path) -> None:
    model = {"byte_fallback": True, "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3}, "merges": ["b a", "a b"]}
    with pytest.raises(UnsupportedModel, match="not in the order of its tokens"):
        read_tokenizer(small(tmp_path, model=model, pre_tokenizer=None, normalizer=None), 5, LLAMA)


def test_an_override_is_for_byte_level_tokenizers(assets: Path, tmp_path: Path) -> None:
    assert values(read_tokenizer(small(tmp_path), 5, {}, pre_tokenizer="stablelm2"))["pre"] == "stablelm2"
    with pytest.raises(BadRecipe, match="has no pre-tokenizer"):
        read_tokenizer(assets / "tokenizers" / "llama-2", 32000, LLAMA, pre_tokenizer="qwen2")


def test_a_folder_without_a_tokenizer_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        read_tokenizer(tmp_path, 5, {})
