r"""Finds the llama.cpp pre-tokenizer that splits text as a tokenizer.json does.

llama.cpp does not read the splitting rules of a tokenizer: a GGUF names one of the rule sets compiled into it
(`tokenizer.ggml.pre`), and a wrong name silently changes the tokens of every prompt. The name is found here
by structure: the regular expressions, digit and punctuation rules of the pre-tokenizer, the normaliser, and
whether whole words bypass the merges. No text is encoded, so added words, another vocabulary or a BOS
template do not matter. A structure outside the table is refused, and the error lists it.

Sources: the rule sets are those of `llm_tokenizer_bpe` and the names those of `llama_vocab::impl::load` in
llama.cpp's src/llama-vocab.cpp (commit 0c1e57098), whose comments quote the expressions of many
tokenizer.json files; the others are those of the models in the comments here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe, UnsupportedModel, shown
from qconvert.formats.tokenizers import pretokenizer_patterns as patterns
from qconvert.formats.tokenizers.huggingface_files import expect_list, expect_object, steps_of

Normaliser = Literal["none", "NFC"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule set of llama.cpp and the tokenizers it is for.

    `splits` are the steps in order; `normaliser` is that of the models the name was made for, while llama.cpp
    itself never normalises. `whole_words` is True if a word that is a token bypasses the merges
    (`ignore_merges`); None where the vocabulary makes both the same. `cleans` is True if llama.cpp drops the
    space before punctuation when it decodes tokens. A rule with `model_types` is for these only.
    """

    name: str
    splits: tuple[str, ...]
    normaliser: Normaliser = "none"
    whole_words: bool | None = False
    cleans: bool = False
    model_types: tuple[str, ...] = ()


RULES = (
    Rule("qwen2", patterns.QWEN2, "NFC"),
    Rule("qwen35", patterns.QWEN35, "NFC"),
    Rule(
        "glm4",
        patterns.LLAMA3,
        whole_words=True,
        model_types=("chatglm", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    ),
    Rule("chatglm-bpe", patterns.LLAMA3, model_types=("chatglm", "glm")),
    Rule("llama-bpe", patterns.LLAMA3, whole_words=True, cleans=True),
    Rule("smaug-bpe", patterns.LLAMA3, cleans=True),
    Rule("phi-2", patterns.GPT2, cleans=True, model_types=("phi",)),
    Rule("gpt-2", patterns.GPT2, cleans=True),
    Rule("mpt", patterns.GPT2, "NFC", cleans=True, model_types=("mpt",)),
    Rule("olmo", patterns.GPT2, "NFC", cleans=True),  # and GPT-NeoX
    Rule("refact", patterns.DIGITS_GPT2, cleans=True, model_types=("gpt_refact",)),
    Rule("command-r", patterns.DIGITS_GPT2, "NFC"),
    Rule("starcoder", patterns.DIGITS_GPT2, cleans=True),
    Rule("smollm", patterns.DIGITS_GPT2),
    Rule("falcon", patterns.FALCON, cleans=True),
    Rule("deepseek-llm", patterns.DEEPSEEK_LLM),  # and DeepSeek-V2
    Rule("deepseek-coder", patterns.DEEPSEEK_CODER),
    Rule("deepseek-v3", patterns.DEEPSEEK_V3),
    Rule("tekken", patterns.TEKKEN, whole_words=True),  # Mistral-Nemo
    Rule("gpt-4o", patterns.O200K, whole_words=None),  # gpt-oss; its merges reach every token
    Rule("tiny_aya", patterns.TINY_AYA),  # Cohere2
    Rule("bloom", patterns.BLOOM, cleans=True),
    Rule("bailingmoe", patterns.BAILING),  # and LLaDA
    Rule("seed-coder", patterns.SEED_CODER),
    Rule("exaone-moe", patterns.EXAONE_MOE, cleans=True),
    Rule("jais-2", patterns.JAIS2, cleans=True),
    Rule("minicpm5", patterns.MINICPM5, whole_words=True, cleans=True),
    Rule("spark2_5", patterns.SPARK),
)

# Names that llama.cpp accepts besides those in the table, for `--pre-tokenizer`.
OTHER_NAMES = """
    a.x-4.0 afmoe bailingmoe2 chameleon codeshell cohere2moe dbrx deepseek-r1-qwen default exaone exaone4
    f2llmv2 falcon-h1 falcon3 gemma4 gigachat glm5 gpt3-finnish granite-docling granite-embed-multi-311m
    granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jina-de jina-es jina-v1-en jina-v2-code
    jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-v3 llama3
    llama4 megrez mellum mellum2 midm-2.0 minerva-7b minimax-m2 modern-bert pixtral poro-chat roberta-bpe
    sarvam-moe solar-open stablelm2 superbpe talkie trillion ufakzeka viking whitespace youtu
""".split()  # noqa: SIM905  (a list of strings would take 70 lines)
NAMES = frozenset(OTHER_NAMES) | {rule.name for rule in RULES}

# These make llama.cpp prepend BOS unless the file says otherwise.
ADDS_BOS = frozenset({"llama-bpe", "tekken"})


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A name for `tokenizer.ggml.pre`, and warnings about it."""

    name: str
    warnings: tuple[str, ...] = ()


def recognise(tokenizer: Json, config: Json, override: str | None = None) -> PreTokenizer:
    """Returns the pre-tokenizer of a byte-level BPE tokenizer.json, or the user's `override`.

    `config` is config.json: its model_type chooses between names of one rule set. Raises UnsupportedModel,
    listing the structure found, when llama.cpp has no such rule set; BadRecipe for an unknown override.
    """
    if override is not None:
        return PreTokenizer(known_pre_tokenizer(override))
    model = expect_object(tokenizer.get("model"), "model")
    splits = tuple(_steps(tokenizer.get("pre_tokenizer")))
    normaliser = _normaliser(tokenizer.get("normalizer"))
    whole_words = bool(model.get("ignore_merges"))
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    found = [
        rule
        for rule in RULES
        if rule.splits == splits
        and rule.whole_words in (None, whole_words)
        and (not rule.model_types or config.get("model_type") in rule.model_types)
    ]
    if not found or normaliser not in ("none", "NFC") or affixes:
        described = [
            *map(shown, splits),
            f"normaliser {normaliser}",
            f"ignore_merges {whole_words}",
            *affixes,
        ]
        raise UnsupportedModel(
            f"tokenizer.json: llama.cpp has no pre-tokenizer of this structure: {'; '.join(described)}",
            "if you know an equivalent one, name it with --pre-tokenizer",
        )
    best = max(found, key=lambda rule: (bool(rule.model_types), rule.normaliser == normaliser))
    return PreTokenizer(best.name, tuple(_doubts(best, normaliser)))


def prefer_cleaning(name: str, *, cleans: bool) -> str:
    """Returns the rule set that splits like `name` and cleans up spaces as asked, if there is one."""
    rule = next((r for r in RULES if r.name == name), None)
    if rule is None or rule.cleans == cleans or rule.model_types:
        return name
    same = (rule.splits, rule.normaliser, rule.whole_words)
    twins = [r for r in RULES if (r.splits, r.normaliser, r.whole_words) == same and not r.model_types]
    return next((r.name for r in twins if r.cleans == cleans), name)


def _doubts(rule: Rule, normaliser: str) -> Iterator[str]:
    if normaliser == rule.normaliser:
        return
    if normaliser == "none":
        yield (
            f"tokenizer.json: no normaliser, while the tokenizers llama.cpp calls {rule.name} use "
            f"{rule.normaliser}; its rules fit, but check that this is the model's own tokenizer"
        )
    else:
        yield (
            f"tokenizer.json: normalises to {normaliser}, which llama.cpp does not do for {rule.name}: "
            "text in another form (letters with separate accents) gets other tokens there"
        )


def known_pre_tokenizer(name: str) -> str:
    """Returns the name if llama.cpp has a pre-tokenizer of that name; raises BadRecipe otherwise."""
    if name in NAMES:
        return name
    near = get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(NAMES))}"
    raise BadRecipe(f"--pre-tokenizer {name!r}: llama.cpp has none of this name", hint)


def _normaliser(spec: object) -> str:
    record = expect_object(spec, "normalizer")
    if not record:
        return "none"
    if record.get("type") == "Sequence":
        parts = [_normaliser(part) for part in expect_list(record.get("normalizers"), "normalizers")]
        return "+".join(part for part in parts if part != "none") or "none"
    return shown(record.get("type"))


def _steps(spec: object) -> Iterator[str]:
    """Yields the steps of a pre-tokenizer as `pretokenizer_patterns` writes them.

    The last byte-level step is implied; one before other steps is listed, because those see bytes.
    """
    leaves = list(steps_of(spec, "pre_tokenizer"))
    for i, leaf in enumerate(leaves):
        yield from _step(leaf, last=i == len(leaves) - 1)


def _step(leaf: Json, *, last: bool) -> Iterator[str]:
    kind = leaf.get("type")
    if kind == "Split":
        yield _split(leaf)
    elif kind == "Digits":
        yield r"\p{N}" if leaf.get("individual_digits") else r"\p{N}+"
    elif kind == "Punctuation":
        yield patterns.PUNCTUATION.format(leaf.get("behavior", "Isolated"))
    elif kind == "ByteLevel":
        if leaf.get("add_prefix_space"):
            yield "a space before the first word"
        if leaf.get("use_regex", True):
            yield from patterns.GPT2
        if not last:
            yield "bytes"
    else:
        yield f"{shown(kind)} step"


def _split(leaf: Json) -> str:
    """Returns the expression whose matches, and the text between them, become pieces.

    Keeping only the matches (Removed, inverted) is the same for an expression that matches all text, as those
    in the table do.
    """
    pattern = expect_object(leaf.get("pattern"), "pattern")
    behaviour = (leaf.get("behavior"), bool(leaf.get("invert")))
    expression = pattern.get("Regex")
    if not isinstance(expression, str) or behaviour not in (("Isolated", False), ("Removed", True)):
        return f"Split {shown(pattern)} {behaviour[0]}{' inverted' if behaviour[1] else ''}"
    return expression.replace("\r", r"\r").replace("\n", r"\n")
