"""Parses the name of a layout; where another thing is named, the error says what to type for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from qconvert.cli.options import NearestChoice
from qconvert.core.layout_traits import LOADERS
from qconvert.core.scheme_names import layout_named, named_scheme, unwritten
from qconvert.core.schemes import is_integers
from qconvert.errors import BadUsage
from qconvert.formats.layouts import registry

_GGUF = "`qconvert to-gguf MODEL --type q4_k_m`"


def _refuse_other_words(value: str, param: click.Parameter | None, names: tuple[str, ...]) -> None:
    """Raise BadUsage with what to type for a loader, a scheme or a GGUF type where a layout is asked for."""
    option, name, other = param.opts[0] if param else "layout", value.lower(), unwritten(value)
    what = f"{option} {value}: not a layout"
    if name == "gguf":
        raise BadUsage(f"{what} of this command", _GGUF)
    if name in LOADERS:
        read = [each for each in registry.all_traits() if name in each.readers and each.name in names]
        if not read:
            raise BadUsage(f"{what} but a loader, which reads GGUF files", _GGUF)
        best = next(each.name for each in read if name in each.first_choice_of)
        listed = ", ".join(each.name for each in read)
        raise BadUsage(f"{what} but a loader, which reads {listed}", f"{option} {best}")
    if name in registry.read_only():
        raise BadUsage(f"{option} {value}: can be read, but not written", registry.traits_of(name).instead)
    if named_scheme(value) or is_integers(value):
        raise BadUsage(f"{what} but a scheme", f"`qconvert quantize MODEL --scheme {value}`")
    if other:
        raise BadUsage(f"{what}; {other.fact}", other.hint)


class LayoutChoice(click.ParamType):  # type: ignore[type-arg]
    """One of the names that a function gives when they are asked for, as `click.Choice` takes fixed ones."""

    name = "layout"

    def __init__(self, names: Callable[[], tuple[str, ...]]) -> None:
        self.names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return click.Choice(self.names()).get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = NearestChoice(self.names(), case_sensitive=False)
        name = str(value).lower()
        if name not in names.choices:
            name = layout_named(name) or name
        if name not in names.choices:
            _refuse_other_words(str(value), param, self.names())
        return str(names.convert(name, param, ctx))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]
