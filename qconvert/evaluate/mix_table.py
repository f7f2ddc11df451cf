"""Shows what a target (`--target-size`, `--target-kl`) made of a model's weights, and why.

The record is that of a manifest or of a GGUF file's key, made by `convert.target`.
"""

from __future__ import annotations

import re

from qconvert.core.dtypes import Json
from qconvert.report.page import Grid
from qconvert.report.tables import size

_LAYER = re.compile(r"\.(\d+)\.")


def mix_grid(label: str, target: Json) -> Grid | None:
    """A row for every group of weights: its encoding, bytes and price, and the price of the next smaller one.

    None for a record that is not understood.
    """
    try:
        rows = tuple(_row(group) for group in target["groups"])
        asked = f"--target-size {target['size']}" if target["size"] else f"--target-kl {target['kl']:g}"
        title = f"What {asked} gave the weights of {label} (expected KL {target['expected_kl']:.3g})"
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    head = ("layer", "weights", "encoding", "bytes", "expected KL", "the next smaller would save", "and cost")
    return Grid(title, head, rows, left=3)


def _row(group: Json) -> tuple[str, ...]:
    names, choice = group["weights"], group["choice"]
    options = {label: (int(nbytes), float(nats)) for label, (nbytes, nats) in group["options"].items()}
    nbytes, nats = options[choice]
    smaller = {label: option for label, option in options.items() if option[0] < nbytes}
    saved, cost = "", ""
    if smaller:
        label = max(smaller, key=lambda label: smaller[label][0])
        saved, cost = f"{size(nbytes - smaller[label][0])} ({label})", f"{smaller[label][1] - nats:+.2g}"
    layer = _LAYER.search(names[0])
    said = _listed(list(dict.fromkeys(_kind(name) for name in names)))
    return ("" if layer is None else layer[1], said, choice, size(nbytes), f"{nats:.2g}", saved, cost)


def _listed(kinds: list[str]) -> str:
    """Names with what they share written once: `self_attn.q_proj, k_proj, v_proj`."""
    parents = {kind.rpartition(".")[0] for kind in kinds}
    first, *rest = kinds
    return ", ".join([first, *(kind.rpartition(".")[2] if len(parents) == 1 else kind for kind in rest)])


def _kind(name: str) -> str:
    """A weight's name within its layer, without `.weight`."""
    layer = _LAYER.search(name)
    rest = name if layer is None else name[layer.end() :]
    return re.sub(r"\.\d+\.", ".N.", rest.removesuffix(".weight"))
