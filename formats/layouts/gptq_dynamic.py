"""Reads GPTQModel's `dynamic`: modules whose settings differ from the rest's, and modules left plain.

The keys are regular expressions on the module's name: `-:EXPR` leaves it plain, `+:EXPR` or `EXPR` overrides
`bits`, `group_size`, `sym` and `desc_act`; the first that matches counts. Source: GPTQModel 7.6
(`quantization/config.py`: dynamic_get).

What can be read off the arrays is read off them. Expressions are taken literally or not at all: one from
a file may take for ever, and so is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from qconvert.core.dtypes import Json
from qconvert.core.encodings import AffineInt, Quantized
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts.config_checks import claim, most_common

# A name with its dots escaped or not, from beginning to end.
_LITERAL = re.compile(r"\^?((?:[\w-]|\\?\.)+?)(?:\$|\(\?:\\\.\|\$\))?")
# onnxruntime-genai matches names of arrays, GPTQModel those of modules.
_END = r"(?:\.|$)"


@dataclass(frozen=True)
class Claims:
    """What settings say of all modules and of some, looked up once: very many modules ask."""

    settings: Mapping[str, object]

    @cached_property
    def bits(self) -> list[object]:
        """The bits of all modules and then of some."""
        return self._claimed("bits")

    @cached_property
    def group_sizes(self) -> list[object]:
        """The group sizes of all modules (-1 if nothing is said) and then of some."""
        return self._claimed("group_size", -1)

    def _claimed(self, key: str, default: object = None) -> list[object]:
        values = [claim(self.settings, key, int, default)]
        values += [claim(own, key, int) for _, own in _overrides(self.settings) if own.get(key) is not None]
        return list(dict.fromkeys(values))

    def symmetric(self, module: str) -> bool:
        """Whether the config says that a module's zeros are all in the middle.

        False, which is never wrong as zeros are stored in any case, where only an expression could tell.
        """
        own = self._named.get(module)
        if own is not None:
            return claim(own, "sym", bool, default=self._symmetric) is True
        return self._symmetric and not self._are_some_open

    @cached_property
    def _symmetric(self) -> bool:
        return claim(self.settings, "sym", bool, default=False) is True

    @cached_property
    def _are_some_open(self) -> bool:
        """Whether an expression says otherwise of modules that are not known."""
        return any(self._is_open(pattern, own) for pattern, own in _overrides(self.settings))

    @cached_property
    def _named(self) -> dict[str, Json]:
        """The settings of single modules by name; no expression before may say otherwise of them."""
        found: dict[str, Json] = {}
        for pattern, own in _overrides(self.settings):
            literal = _LITERAL.fullmatch(pattern)
            if literal is not None:
                found.setdefault(literal[1].replace("\\.", "."), own)
            elif self._is_open(pattern, own):
                break
        return found

    def _is_open(self, pattern: str, own: Json) -> bool:
        return _LITERAL.fullmatch(pattern) is None and own.get("sym") not in (None, self._symmetric)


@dataclass(frozen=True)
class ModuleSettings:
    """The settings of modules that are not here, looked up once: very many modules ask."""

    settings: Json

    def of(self, module: str) -> Json | None:
        """Those of a module; None where `dynamic` leaves it plain.

        UnsupportedModel for an expression that is more than a name.
        """
        named, expression = self._named
        if module in named:
            own = named[module]
            return None if own is None else self.settings | own
        if expression:
            raise UnsupportedModel(
                f"config.json: dynamic: {shown(expression)!r} is an expression, which is not run here",
                "give the whole model folder, or its name on the Hub",
            )
        return self.settings

    @cached_property
    def _named(self) -> tuple[dict[str, Json | None], str]:
        """What is said of single modules by name, and the first expression, which ends what is known."""
        dynamic = self.settings.get("dynamic") or {}
        found: dict[str, Json | None] = {}
        for pattern, own in dynamic.items() if isinstance(dynamic, dict) else ():
            literal = _LITERAL.fullmatch(pattern.removeprefix("-:").removeprefix("+:"))
            if literal is None:
                return found, pattern
            said = None if pattern.startswith("-:") else own if isinstance(own, dict) else {}
            found.setdefault(literal[1].replace("\\.", "."), said)
        return found, ""


def _overrides(settings: Mapping[str, object]) -> Iterator[tuple[str, Json]]:
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CorruptCheckpoint(
            f"config.json: quantization_config: dynamic is {shown(dynamic)}, not an object",
            "correct quantization_config",
        )
    for pattern, own in dynamic.items():
        if not pattern.startswith("-:") and isinstance(own, dict):
            yield pattern.removeprefix("+:"), own


def settings_of_forms(quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
    """The settings of most modules, and `dynamic` for the others and for those left plain."""
    settings = {module: _setting(encoding) for module, encoding in quantized.items()}
    usual = most_common(settings.values())
    dynamic: Json = {
        f"+:^{_escaped(module)}{_END}": {key: value for key, value in own.items() if value != usual[key]}
        for module, own in settings.items()
        if own != usual
    }
    return {**usual, "dynamic": dynamic | left_plain(kept)}


def left_plain(kept: Iterable[str]) -> Json:
    """The entries of `dynamic` for linears of the layers that are left plain."""
    return {f"-:^{_escaped(module)}{_END}": {} for module in kept if module != "lm_head"}


def _setting(encoding: Quantized) -> Json:
    assert isinstance(encoding, AffineInt)
    return {
        "bits": encoding.bits,
        "group_size": encoding.group_size or -1,
        "desc_act": encoding.act_order,
        "sym": encoding.symmetric,
    }


def _escaped(module: str) -> str:
    return module.replace(".", "\\.")
