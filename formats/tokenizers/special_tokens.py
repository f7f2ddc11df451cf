"""Converts special tokens and chat templates of a Hugging Face tokenizer to GGUF keys.

Three files that may disagree name the tokens that begin or end a text. Their precedence is that of
gguf.SpecialVocab (llama.cpp's converter), so that the same keys are written in the same order: the
post-processor's template first, then tokenizer_config.json, then config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from string import ascii_letters, digits

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.errors import shown
from qconvert.formats.tokenizers import huggingface_files as files

# GGUF has no key for a classification token; it writes "seperator".
ID_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
}
ADD_KEYS = {kind: f"tokenizer.ggml.add_{kind}_token" for kind in ("bos", "eos", "sep")}
_NAME_CHARACTERS = frozenset(ascii_letters + digits)


@dataclass
class SpecialTokens:
    """The special tokens found so far: their texts, their ids, and which are added around a text."""

    texts: dict[str, str] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    added: dict[str, bool] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def keys(self, tokens: int) -> Iterator[KV]:
        """Yields the GGUF keys; an id outside the vocabulary is left out with a warning."""
        for kind, token in self.ids.items():
            if not 0 <= token < tokens:
                self.warnings.append(f"{kind}_token_id is {token}, outside the {tokens} tokens; left out")
            elif kind in ID_KEYS:
                yield KV.u32(ID_KEYS[kind], token)
        for kind, value in self.added.items():
            if kind in ADD_KEYS:
                yield KV.flag(ADD_KEYS[kind], value)


def find_special_tokens(tokenizer: Json, settings: Json, config: Json) -> SpecialTokens:
    """Finds the special tokens of tokenizer.json, tokenizer_config.json and config.json (any may be {})."""
    found = SpecialTokens()
    found.texts = {
        kind: text
        for kind in files.SPECIAL_KINDS
        if (text := files.token_text(settings.get(f"{kind}_token")))
    }
    for kind, stand_in in (("bos", "cls"), ("eos", "sep")):
        if kind not in found.texts and stand_in in found.texts:
            found.texts[kind] = found.texts[stand_in]
    record = files.expect_object(tokenizer.get("post_processor"), "post_processor")
    for step in files.expect_list(record.get("processors", [record]), "processors"):
        _apply_processor(found, files.expect_object(step, "processors"))
    entries = tokenizer.get("added_tokens") or []
    by_text = {entry["content"]: entry["id"] for entry in reversed(entries)}
    for kind in (*files.SPECIAL_KINDS, "eot"):
        flag = settings.get(f"add_{kind}_token")
        if isinstance(flag, bool):
            found.added.setdefault(kind, flag)
        if settings and kind in found.texts and found.texts[kind] in by_text:
            found.ids[kind] = by_text[found.texts[kind]]
    for kind in files.SPECIAL_KINDS:
        token = config.get(f"{kind}_token_id")
        if isinstance(token, int) and not isinstance(token, bool):
            found.ids.setdefault(kind, token)
    return found


def _apply_processor(found: SpecialTokens, step: Json) -> None:
    kind = step.get("type")
    if kind == "ByteLevel":
        found.added.setdefault("bos", False)
        found.added.setdefault("eos", False)
    elif kind == "RobertaProcessing":
        found.added.update(bos=True, eos=True, sep=True)
        for name, default in (("cls", "bos"), ("sep", "eos")):
            pair = step.get(name)
            text = pair[0] if isinstance(pair, list) and pair else found.texts.get(default)
            if isinstance(text, str):
                found.texts.setdefault(name, text)
    elif kind == "TemplateProcessing":
        _apply_template(found, _template(step.get("single")), _template(step.get("pair")))


def _template(spec: object) -> list[str | None]:
    """Returns the special tokens of a template in order, None for a text."""
    names: list[str | None] = []
    for entry in files.expect_list(spec, "template"):
        token = files.expect_object(
            files.expect_object(entry, "template").get("SpecialToken"), "SpecialToken"
        )
        name = token.get("id")
        names.append(name if isinstance(name, str) else None)
    return names


def _apply_template(found: SpecialTokens, single: list[str | None], pair: list[str | None]) -> None:
    first = single[0] if len(single) > 1 else None
    last = single[-1] if len(single) > 1 else None
    texts = found.texts
    if first is not None:
        texts.setdefault("bos", first)
        texts.setdefault("cls", first)
        found.added["bos"] = first in (texts["bos"], texts["cls"])
    if last is not None:
        if "eos" in texts and texts["eos"] != last:
            texts["eot"] = texts["eos"]  # the model's end of turn, no longer the end of text
        texts["eos"] = last
        found.added["eos"] = True
    if first is not None and pair[:1] == [first]:
        pair = pair[1:]
    if last is not None and pair[-1:] == [last]:
        pair = pair[:-1]
    if len(pair) > 2 and pair[0] is None and pair[-1] is None:  # text A, separators, text B
        between, ends = pair[1:-1], {texts.get("sep"), texts.get("eos")} - {None}
        after_first = last is None and between[0] in ends
        found.added["sep"] = after_first or (len(between) == 2 and between[1] in ends)


def chat_template_keys(template: object, warnings: list[str]) -> Iterator[KV]:
    """Yields the keys of a chat template: one text, or a list of named ones with the main one "default"."""
    if isinstance(template, str):
        if template:
            yield KV.text("tokenizer.chat_template", template)
        return
    if not isinstance(template, list):
        if template is not None:
            warnings.append(f"chat_template is {shown(template)}, neither text nor a list; left out")
        return
    named = {}
    for entry in template:
        known = isinstance(entry, dict) and (entry.get("name"), entry.get("template"))
        if known and all(isinstance(text, str) for text in known):
            named["".join(c if c in _NAME_CHARACTERS else "_" for c in entry["name"])] = entry["template"]
    main = named.pop("default", None)
    for name, text in named.items():
        yield KV.text(f"tokenizer.chat_template.{name}", text)
    if named:
        yield KV.texts("tokenizer.chat_templates", list(named))
    if main:
        yield KV.text("tokenizer.chat_template", main)
