"""Finds what a word of the command line may become: models, file types, schemes, selectors.

Completion runs while somebody types: no model is opened, and what cannot be read is left out.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

_GROUPS = ("g128", "g64", "g32", "channel")
_SELECTORS = (
    "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down", "mlp.experts.gate",
    "mlp.experts.up", "mlp.experts.down", "embed", "lm_head", "layers.", "attention", "mlp", "experts",
)  # fmt: skip


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Models by path, and models in the Hub's cache; what the shell finds where there may be others below."""
    from qconvert.checkpoint.hub import EMBEDDED, cached_models

    local, others = _local(incomplete)
    names = [*cached_models(), EMBEDDED]
    found = [*local, *(name for name in names if name.startswith(incomplete))]
    if others or not found:  # bash would show none of its own beside ours
        return [CompletionItem(incomplete, type="file")]
    return list(map(CompletionItem, found))


def _local(incomplete: str) -> tuple[list[str], bool]:
    """Models whose paths begin like this, and whether a folder does that is none."""
    folder, _, start = incomplete.rpartition("/")
    if not folder and incomplete.startswith("/"):
        folder = "/"
    prefix = incomplete[: len(incomplete) - len(start)]
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda e: e.name)  # noqa: PTH111
    except OSError:
        return [], False
    found, others = [], False
    for entry in entries:
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        if entry.name.endswith(".gguf") or (Path(entry.path) / "config.json").is_file():
            found.append(prefix + entry.name)
        elif entry.is_dir():
            others = True
    return found, others


def file_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The file types of GGUF, with their bits; for PATTERN=TYPE those of the type."""
    from qconvert.plan.gguf.file_types import FILE_TYPES

    pattern, equals, start = incomplete.rpartition("=")
    named = {name.lower(): f"{kind.base.bits_per_weight:.2f} bits" for name, kind in FILE_TYPES.items()}
    if param.name == "file_type":
        named |= {"keep": "existing codes as they are", "list": "show all"}
    return [
        CompletionItem(f"{pattern}{equals}{name}", help=bits)
        for name, bits in named.items()
        if name.startswith(start.lower())
    ]


def element_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The types that tensors of a GGUF can get; for PATTERN=TYPE those of the type."""
    from qconvert.core.ggml_types import OF_WEIGHTS

    pattern, equals, start = incomplete.rpartition("=")
    names = (kind.label for kind in OF_WEIGHTS)
    return [CompletionItem(f"{pattern}{equals}{name}") for name in names if name.startswith(start.lower())]


def schemes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The schemes of `quantize`, and of `convert` to the layout that is named before."""
    if ctx.info_name != "convert":
        return _beginning(_integers(), incomplete)
    from qconvert.formats.layouts import registry

    layout = ctx.params.get("layout")
    if layout == "gguf":
        return file_types(ctx, param, incomplete)
    traits = [registry.traits_of(name) for name in registry.written() if layout in (None, name)]
    tables = [scheme.name for each in traits for scheme in each.codebooks]
    integers = _integers() if any(each.integers for each in traits) else []
    return _beginning([*dict.fromkeys(tables), *integers], incomplete)


def rules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """SELECTOR=SCHEME: a role first, then its scheme."""
    selector, equals, start = incomplete.rpartition("=")
    if not equals:
        return _beginning([f"{role}=" for role in _SELECTORS], incomplete)
    return [CompletionItem(f"{selector}={name}") for name in (*_integers(), "keep") if name.startswith(start)]


def selectors(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Roles of weights."""
    return _beginning(_SELECTORS, incomplete)


def _integers() -> list[str]:
    return [
        f"int{b}{kind}-{group}" for b in (4, 8, 2, 3, 5, 6, 7) for kind in ("", "-asym") for group in _GROUPS
    ]


def _beginning(names: list[str] | tuple[str, ...], start: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(start)]
