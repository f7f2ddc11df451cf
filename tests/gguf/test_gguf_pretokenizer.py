"""Pre-tokenizers are recognised by structure, and only by structure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.tokenizers import pretokenizer_patterns
from qconvert.formats.tokenizers.pretokenizers import NAMES, RULES, Rule, prefer_cleaning, recognise
from tests.support.gguf_models import test_strings as strings_for


def spelled(rule: Rule) -> dict[str, Any]:
    """A tokenizer.json of this rule, as transformers writes one."""
    steps: list[dict[str, Any]] = []
    for i, split in enumerate(rule.splits):
        if split == pretokenizer_patterns.GPT2[0]:
            steps.append(
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
            )
        elif split == r"\p{N}":
            steps.append({"type": "Digits", "individual_digits": True})
        elif split == r"\p{N}+" and "bytes" in rule.splits[:i]:
            steps.append({"type": "Digits", "individual_digits": False})
        elif split.startswith("punctuation"):
            steps.append({"type": "Punctuation", "behavior": "Contiguous"})
        elif split != "bytes":
            pattern = {"Regex": split.replace(r"\r\n", "\r\n") if rule.name == "deepseek-v3" else split}
            steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    if not any(step["type"] == "ByteLevel" for step in steps):
        steps.append(
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        )
    return {
        "normalizer": None if rule.normaliser == "none" else {"type": rule.normaliser},
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "ignore_merges": bool(rule.whole_words)},
    }


QWEN2 = spelled(next(rule for rule in RULES if rule.name == "qwen2"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_recognised(rule: Rule) -> None:
    config = {"model_type": rule.model_types[0]} if rule.model_types else {}
    found = recognise(spelled(rule), config)
    assert prefer_cleaning(found.name, cleans=rule.cleans) == rule.name
    assert not found.warnings


def test_no_two_rules_claim_the_same_structure() -> None:
    keys = [(r.splits, r.normaliser, r.whole_words, r.cleans, r.model_types) for r in RULES]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("folder", "name"), [("qwen2.5", "qwen2"), ("qwen3", "qwen2"), ("falcon", "falcon")])
def test_real_tokenizers(assets: Path, folder: str, name: str) -> None:
    tokenizer = json.loads((assets / "tokenizers" / folder / "tokenizer.json").read_text())
    found = recognise(tokenizer, {})
    assert (found.name, found.warnings) == (name, ())


@pytest.mark.parametrize("name", ["gpt-2", "falcon"])
def test_the_expressions_cut_as_llama_cpp_cuts(assets: Path, name: str) -> None:
    """Hugging Face's library, given our steps and llama.cpp's vocabulary, finds llama.cpp's tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    rule = next(rule for rule in RULES if rule.name == name)
    with GGUFFile(assets / "ggml-vocab" / f"ggml-vocab-{name}.gguf") as file:
        kv: dict[str, Any] = {key.rpartition(".")[2]: entry.value for key, entry in file.kv.items()}
    vocab = {text: i for i, text in enumerate(kv["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in kv["merges"]]
    spec = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges)).to_str())
    spec |= {key: spelled(rule)[key] for key in ("normalizer", "pre_tokenizer")}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    special = [text for text, kind in zip(kv["tokens"], kv["token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens(special)
    for text, ids in strings_for(assets, name):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def test_added_words_and_a_bos_template_change_nothing() -> None:
    tuned = copy.deepcopy(QWEN2)
    tuned["added_tokens"] = [{"id": 5, "content": "apple", "special": False}]
    tuned["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}
    tuned["model"]["vocab"] = {"!": 0}
    assert recognise(tuned, {}) == recognise(QWEN2, {})


def test_a_missing_normaliser_is_said_aloud() -> None:
    found = recognise({**QWEN2, "normalizer": None}, {})
    assert found.name == "qwen2"
    assert "no normaliser" in found.warnings[0]
    assert not recognise(
        {**QWEN2, "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, {}
    ).warnings


def test_an_unexpected_normaliser_is_said_aloud() -> None:
    llama = spelled(next(rule for rule in RULES if rule.name == "llama-bpe"))
    found = recognise({**llama, "normalizer": {"type": "NFC"}}, {})
    assert found.name == "llama-bpe"
    assert "normalises to NFC" in found.warnings[0]


def changed(**step: object) -> dict[str, Any]:
    tokenizer = copy.deepcopy(QWEN2)
    tokenizer["pre_tokenizer"]["pretokenizers"][0].update(step)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [
        (changed(pattern={"Regex": r"\p{L}+"}), r"\p{L}+"),
        (changed(pattern={"String": " "}), "Split"),
        (changed(behavior="MergedWithNext"), "MergedWithNext"),
        (changed(behavior="Removed"), "Removed"),
        ({**QWEN2, "normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({**QWEN2, "model": {"ignore_merges": True}}, "ignore_merges True"),
        ({**QWEN2, "model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
        ({**QWEN2, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "a space before"),
        ({**QWEN2, "pre_tokenizer": {"type": "Whitespace"}}, "Whitespace step"),
        ({**QWEN2, "pre_tokenizer": None}, "normaliser NFC"),
    ],
)
def test_an_unknown_structure_is_refused_with_what_was_found(tokenizer: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        recognise(tokenizer, {})
    assert told in caught.value.fact
    assert "--pre-tokenizer" in (caught.value.hint or "")


def test_matches_kept_and_the_rest_removed_is_the_same_cut() -> None:
    assert recognise(changed(behavior="Removed", invert=True), {}).name == "qwen2"


def test_the_user_may_insist() -> None:
    strange = {"model": {}, "pre_tokenizer": {"type": "Whitespace"}}
    assert recognise(strange, {}, "stablelm2").name == "stablelm2"
    with pytest.raises(BadRecipe) as caught:
        recognise(strange, {}, "qwen-2")
    assert "qwen2" in (caught.value.hint or "")
    assert {"default", "qwen2", "llama-bpe"} <= NAMES


@pytest.mark.parametrize(
    "broken", [{"model": 5}, {"model": {}, "pre_tokenizer": []}, {"model": {}, "normalizer": 1}]
)
def test_a_broken_file_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="not an object"):
        recognise(broken, {})
