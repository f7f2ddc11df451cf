r"""Lists the splitting rules of tokenizer.json files, each a tuple of steps.

A step is a regular expression whose matches are split off ("Isolated"); `\p{N}` alone is also the Digits
step, and GPT-2's expression also a byte-level step with its own ("use_regex"). Data, not code: two rule sets
are equal exactly when their texts are. See `formats.tokenizers.pretokenizers` for sources.
"""

# ruff: noqa: E501

from __future__ import annotations

Splits = tuple[str, ...]

PUNCTUATION = "punctuation, {}"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2: Splits = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
DIGITS_GPT2: Splits = (r"\p{N}", *GPT2)
FALCON: Splits = (PUNCTUATION.format("Contiguous"), *GPT2, "bytes", r"\p{N}+", "[0-9][0-9][0-9]")

_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN2: Splits = (_CONTRACTIONS + _WORD + r"|\p{N}" + _SYMBOLS + _REST,)
LLAMA3: Splits = (_CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _REST,)
MINICPM5: Splits = (r"\p{N}{1,3}", _CONTRACTIONS + _WORD + r"|\p{N}+" + _SYMBOLS + _REST)
QWEN35: Splits = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _REST,
)
JAIS2: Splits = (
    _CONTRACTIONS
    + _WORD
    + r"|\p{N}{1,3}"
    + _SYMBOLS
    + r"|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    + r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
)
SEED_CODER: Splits = (_CONTRACTIONS + _WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _REST,)
EXAONE_MOE: Splits = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    + r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
BAILING: Splits = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_CAPITALS = r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN: Splits = (_CAPITALISED + _CAPITALS + r"|\p{N}" + _PATHS + _REST,)
O200K: Splits = (
    f"{_CAPITALISED}{_CONTRACTIONS}?{_CAPITALS}{_CONTRACTIONS}?" + r"|\p{N}{1,3}" + _PATHS + _REST,
)
TINY_AYA: Splits = (r"\d{1,3}(?=(?:\d{3})*\b)", *O200K)

_DSV3_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_DSV3_START = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")
DEEPSEEK_V3: Splits = (*_DSV3_START, _DSV3_WORDS + r"[\r\n]*" + _REST)
SPARK: Splits = (*_DSV3_START, _DSV3_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_CODER: Splits = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM: Splits = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
BLOOM: Splits = (" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",)
