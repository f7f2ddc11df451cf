"""Converts a Hugging Face tokenizer folder to GGUF's tokenizer keys.

Five kinds are known: byte-level BPE ("gpt2" in GGUF), SentencePiece BPE ("llama"), the same by the rank of
merges ("gemma4"), unigram ("t5") and WordPiece ("bert"). Keys, values and order are those of llama.cpp's
convert_hf_to_gguf.py at commit 0c1e57098, with
three exceptions: added tokens keep their text (there they are encoded and decoded once, which damages
letters such as e acute); scores of SentencePiece vocabularies without a tokenizer.model follow from the
merges (there all are -1000, which loses their order); and the pre-tokenizer is recognised by structure.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qconvert.core.config_json import positive_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.tokenizers import token_lists
from qconvert.formats.tokenizers.huggingface_files import (
    TokenizerFolder,
    expect_list,
    expect_object,
    read_folder,
    steps_of,
)
from qconvert.formats.tokenizers.pretokenizers import ADDS_BOS, prefer_cleaning, recognise
from qconvert.formats.tokenizers.sentencepiece import PieceType
from qconvert.formats.tokenizers.special_tokens import chat_template_keys, find_special_tokens
from qconvert.models.gguf.families import find_model

_ADDS_BOS = "tokenizer.ggml.add_bos_token"
_UNNORMALISED = (
    "tokenizer.model: normalises text, which llama.cpp does not do for SentencePiece BPE: full-width "
    "letters, ligatures and fractions get other tokens there"
)
_CASED = (
    "the vocabulary distinguishes upper and lower case, and the file says so; llama.cpp's build b9190 and "
    "older ones lower all text nevertheless"
)
_NO_BYTES = (
    "tokenizer.model: spells unknown characters as bytes, which llama.cpp does not do for unigram models: "
    "they become the unknown token there"
)


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """The keys of a tokenizer in the order they are written, and warnings."""

    kv: tuple[KV, ...]
    warnings: tuple[str, ...]


def has_tokenizer(path: Path) -> bool:
    """Whether a file holds the tokens of a model."""
    return path.name in ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt") or (
        path.suffix == ".tiktoken"
    )


def read_tokenizer(
    folder: Path, vocab_rows: int, config: Json, pre_tokenizer: str | None = None
) -> GGUFTokenizer:
    """Reads the tokenizer of a model folder whose embedding has `vocab_rows` rows.

    `config` is config.json; `pre_tokenizer` overrides the recognised name. Raises CorruptCheckpoint naming a
    token whose id is beyond the rows, UnsupportedModel for a tokenizer llama.cpp has no equivalent of.
    """
    files = read_folder(folder, config)
    builder = _Builder(files, vocab_rows, config, [])
    keys = tuple(builder.keys(pre_tokenizer))
    return GGUFTokenizer(keys, tuple(builder.warnings))


@dataclass
class _Builder:
    files: TokenizerFolder
    rows: int
    config: Json
    warnings: list[str]

    @property
    def _arch(self) -> str:
        model = find_model(self.config)
        return "" if model is None else model.arch

    @property
    def _is_llama(self) -> bool:
        return self._arch == "llama"

    def keys(self, pre_tokenizer: str | None) -> Iterator[KV]:
        model = expect_object(self.files.tokenizer.get("model"), "model")
        kind = _kind(self.files, model, llama=self._is_llama)
        if pre_tokenizer is not None and kind != "gpt2":
            raise BadRecipe(
                f"--pre-tokenizer {pre_tokenizer}: this tokenizer ({kind}) has no pre-tokenizer",
                "leave out --pre-tokenizer",
            )
        if kind == "gpt2":
            return self._byte_level(model, pre_tokenizer)
        if kind == "llama" and self.files.sentencepiece is None and self._arch == "gemma4":
            return self._ranked_pieces(model)
        return {"llama": self._sentencepiece, "t5": self._unigram, "bert": self._wordpiece}[kind](model)

    def _ranked_pieces(self, model: Json) -> Iterator[KV]:
        _check_sentencepiece_normaliser(self.files.tokenizer)
        vocab = token_lists.vocabulary(model.get("vocab"))
        tokens = token_lists.ranked_tokens(vocab, self.files.added, self.rows)
        yield KV.text("tokenizer.ggml.model", "gemma4")
        yield KV.texts("tokenizer.ggml.tokens", tokens.texts)
        yield KV.f32s("tokenizer.ggml.scores", tokens.scores)
        yield KV.i32s("tokenizer.ggml.token_type", tokens.types)
        yield KV.texts("tokenizer.ggml.merges", [" ".join(pair) for pair in _merges(model)])
        yield from (entry for entry in self._special() if entry.key != _ADDS_BOS)
        yield KV.flag("tokenizer.ggml.add_space_prefix", value=False)
        yield KV.flag(_ADDS_BOS, value=True)

    def _byte_level(self, model: Json, pre_tokenizer: str | None) -> Iterator[KV]:
        found = recognise(self.files.tokenizer, self.config, pre_tokenizer)
        self.warnings += found.warnings
        name = found.name
        cleans = self.files.settings.get("clean_up_tokenization_spaces")
        if pre_tokenizer is None and isinstance(cleans, bool):
            name = prefer_cleaning(name, cleans=cleans)
        tokens = token_lists.bpe_tokens(
            token_lists.vocabulary(model.get("vocab")), self.files.added, self.rows
        )
        yield from _token_keys("gpt2", name, tokens)
        yield KV.texts("tokenizer.ggml.merges", [" ".join(pair) for pair in _merges(model)])
        yield from self._special(adds_bos=name in ADDS_BOS)

    def _sentencepiece(self, model: Json) -> Iterator[KV]:
        spec = self.files.sentencepiece
        prefix = self.files.settings.get("add_prefix_space")
        prepends = spec.add_dummy_prefix if spec else _prepends_space(self.files.tokenizer)
        if self._is_llama and isinstance(prefix, bool):
            yield KV.flag("tokenizer.ggml.add_space_prefix", prefix)
        elif not prepends:
            yield KV.flag("tokenizer.ggml.add_space_prefix", value=False)
        if spec is not None:
            if spec.charsmap:
                self.warnings.append(_UNNORMALISED)
            tokens = token_lists.sentencepiece_tokens(spec, self.files.added_beside, self.rows)
        else:
            _check_sentencepiece_normaliser(self.files.tokenizer)
            vocab, unknown = token_lists.vocabulary(model.get("vocab")), model.get("unk_token")
            tokens = token_lists.merged_tokens(
                vocab, list(_merges(model)), unknown, self.files.added, self.rows
            )
        yield from _token_keys("llama", "default", tokens, scores=True)
        yield from self._special()

    def _unigram(self, model: Json) -> Iterator[KV]:
        spec = self.files.sentencepiece
        if spec is not None:
            tokens = token_lists.sentencepiece_tokens(spec, self.files.added_beside, self.rows)
            prefix, squeeze, charsmap = spec.add_dummy_prefix, spec.remove_extra_whitespaces, spec.charsmap
            if any(piece.type is PieceType.BYTE for piece in spec.pieces):
                self.warnings.append(_NO_BYTES)
        else:
            entries = expect_list(model.get("vocab"), "vocab")
            tokens = token_lists.unigram_tokens(entries, model.get("unk_id"), self.files.added, self.rows)
            prefix, squeeze = _prepends_space(self.files.tokenizer), True
            charsmap = _charsmap(self.files.tokenizer.get("normalizer"))
        yield from _token_keys("t5", "default", tokens, scores=True)
        yield KV.flag("tokenizer.ggml.add_space_prefix", prefix)
        yield KV.flag("tokenizer.ggml.remove_extra_whitespaces", squeeze)
        if charsmap:
            yield KV.u8s("tokenizer.ggml.precompiled_charsmap", charsmap)
        yield from self._special()

    def _wordpiece(self, model: Json) -> Iterator[KV]:
        if KV.flag("tokenizer.ggml.normalizer.lowercase", value=False) in self._normaliser_flags():
            self.warnings.append(_CASED)
        tokens = token_lists.wordpiece_tokens(
            token_lists.vocabulary(model.get("vocab")), self.files.added, self.rows
        )
        types = positive_int({"type_vocab_size": 1, **self.config}, "type_vocab_size")
        yield KV.u32("tokenizer.ggml.token_type_count", types)
        yield from _token_keys("bert", "bert-bge", tokens)  # llama.cpp reads no pre-tokenizer for WordPiece
        yield from self._special()

    def _special(self, *, adds_bos: bool = False) -> Iterator[KV]:
        special = find_special_tokens(self.files.tokenizer, self.files.settings, self.config)
        if self.files.sentencepiece is not None and self.files.sentencepiece.unknown is not None:
            special.ids.setdefault("unk", self.files.sentencepiece.unknown)
        model = find_model(self.config)
        if model is not None and model.special:
            rows = {token.text: row for row, token in self.files.added.items()}
            special.ids |= {kind: rows[text] for kind, text in model.special.items() if text in rows}
            special.added.setdefault("bos", False)  # GLM's templates begin prompts with two tokens
        if self._is_llama and self.rows == 32016:  # CodeLlama
            special.ids.setdefault("eot", 32010)
        if self._is_llama and self.rows == 49152:  # Granite, SmolLM
            special.added["bos"] = False
        if adds_bos:
            special.added.setdefault("bos", False)
        yield from special.keys(self.rows)
        yield from chat_template_keys(self.files.chat_template, special.warnings)
        yield from self._normaliser_flags()
        self.warnings += special.warnings

    def _normaliser_flags(self) -> Iterator[KV]:
        """Yields WordPiece's changes to letters; llama.cpp's default is lower case."""
        flags: dict[str, object] = {}
        named = {"Lowercase": {"lowercase": True}, "StripAccents": {"strip_accents": True}}
        for step in steps_of(self.files.tokenizer.get("normalizer")):
            flags |= step if step.get("type") == "BertNormalizer" else named.get(str(step.get("type")), {})
        for key in ("lowercase", "strip_accents"):
            if isinstance(value := flags.get(key), bool):
                yield KV.flag(f"tokenizer.ggml.normalizer.{key}", value)


def _kind(files: TokenizerFolder, model: Json, *, llama: bool) -> str:
    if files.sentencepiece is not None:
        return "t5" if files.sentencepiece.is_unigram and not llama else "llama"
    kind = model.get("type")
    if kind == "Unigram" or isinstance(model.get("vocab"), list):
        return "t5"
    if kind == "WordPiece":
        return "bert"
    steps = [*steps_of(files.tokenizer.get("pre_tokenizer")), *steps_of(files.tokenizer.get("decoder"))]
    if any(step.get("type") == "ByteLevel" for step in steps):
        return "gpt2"
    if model.get("byte_fallback"):
        return "llama"
    raise UnsupportedModel(
        f"tokenizer.json: a {shown(kind)} model without bytes to fall back on",
        "keep this model in safetensors; llama.cpp has byte-level BPE, SentencePiece, unigram, WordPiece",
    )


def _token_keys(kind: str, pre: str, tokens: token_lists.Tokens, *, scores: bool = False) -> Iterator[KV]:
    yield KV.text("tokenizer.ggml.model", kind)
    yield KV.text("tokenizer.ggml.pre", pre)
    yield KV.texts("tokenizer.ggml.tokens", tokens.texts)
    if scores:
        yield KV.f32s("tokenizer.ggml.scores", tokens.scores)
    yield KV.i32s("tokenizer.ggml.token_type", tokens.types)


def _merges(model: Json) -> Iterator[tuple[str, str]]:
    """Yields the merges as pairs, a space inside a part in byte-level BPE's letter."""
    for number, entry in enumerate(expect_list(model.get("merges"), "merges")):
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
            raise CorruptCheckpoint(f"tokenizer.json: merge {number} is {shown(entry)}, not two tokens")
        left, right = (part.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}") for part in parts)
        yield left, right


def _prepends_space(tokenizer: Json) -> bool:
    """Returns whether a space is prepended to a text before it is encoded."""
    for step in (*steps_of(tokenizer.get("normalizer")), *steps_of(tokenizer.get("pre_tokenizer"))):
        if step.get("type") == "Prepend" and step.get("prepend") == token_lists.SPACE:
            return True
        if step.get("type") == "Metaspace":
            default = "always" if step.get("add_prefix_space") else "never"
            return bool(step.get("prepend_scheme", default) != "never")
    return False


def _check_sentencepiece_normaliser(tokenizer: Json) -> None:
    for step in steps_of(tokenizer.get("normalizer")):
        replaces = step.get("type") == "Replace" and step.get("content") == token_lists.SPACE
        if not replaces and step.get("type") != "Prepend":
            raise UnsupportedModel(
                f"tokenizer.json: normaliser {shown(step.get('type'))}, which llama.cpp lacks",
                "add the model's tokenizer.model to the folder",
            )


def _charsmap(normaliser: object) -> bytes:
    """Returns the compiled character map of a SentencePiece normaliser, empty when there is none."""
    for step in steps_of(normaliser):
        if step.get("type") == "Precompiled":
            try:
                return base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise CorruptCheckpoint(
                    f"tokenizer.json: precompiled_charsmap is damaged ({error})"
                ) from error
    return b""
