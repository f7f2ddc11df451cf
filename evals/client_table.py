"""Writes what clients made of our files as tables for the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from qconvert.core.dtypes import Json

OTHER_NUMBERS = 0.5
"""A mean difference of log-probabilities, in nats, that no rounding of inputs or sums explains.

Inputs of experts that one side alone rounds to FP8 make 0.1; random weights were seen to make 3.
"""
LACKING = frozenset(
    {"a llama.cpp that has the type Q2_0", "gptqmodel's ExLlamaV2 on CUDA", "mslk", "--dtype float32"}
)
"""What `check` says that clients need beside them, and those that were run did not have."""
AMX = "a CPU with AMX"
"""What some machines lack: then their rows name it."""
_FAILS = "fails"
_SHOWN = 160


def holds(row: Json) -> bool:
    """Whether the client loaded the checkpoint and computed what it holds."""
    return "error" not in row and row["mean"] < OTHER_NUMBERS


def agrees(row: Json) -> bool:
    """Whether `qconvert check` said what happened; true where it was not asked."""
    lacking = LACKING.union(row.get("lacks", ())).intersection(row.get("needs", ()))
    return "check" not in row or (row["check"] != _FAILS and not lacking) == holds(row)


def tables(figures: Json) -> list[str]:
    """Versions, a line for each output with a cell for each client, and their own words where they fail."""
    rows: list[Json] = figures["rows"]
    clients = [name for name in figures["versions"] if any(row["client"] == name for row in rows)]
    reasons: list[str] = []
    told = [row for row in rows if "check" in row]
    lines = ["| client | versions |", "|---|---|"]
    for name in clients:
        known = ", ".join(f"{package} {version}" for package, version in figures["versions"][name].items())
        lines.append(f"| {name} | {known} |")
    lines += ["", f"| output | {' | '.join(clients)} |", "|---" * (len(clients) + 1) + "|"]
    for subject in dict.fromkeys(row["subject"] for row in rows):
        found = {row["client"]: row for row in rows if row["subject"] == subject}
        cells = [_cell(found[name], reasons) if name in found else "" for name in clients]
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    right = sum(map(agrees, told))
    lines += [
        "",
        f"`qconvert check` foretells {right} of the {len(told)} cells whose loader it knows.",
    ]
    if right < len(told):
        lines.append("The others are marked with what it says.")
    lines.append("")
    lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return lines


def _cell(row: Json, reasons: list[str]) -> str:
    """Weights bit-equal and the largest difference, or the number of the reason why there is none."""
    if "error" in row:
        reason = _reason(row["error"])
        if reason not in reasons:
            reasons.append(reason)
        said = f"no ({reasons.index(reason) + 1})"
    else:
        equal = "" if "equal" not in row else f"{_share(row['equal'])}, "
        said = f"{equal}{row['largest']:.2g}"
        if row["way"] == "dequantize":
            said = f"dequantized: {said}"
        if not holds(row):
            said = f"**other numbers**: {said}"
    return said if agrees(row) else f"{said}; check: {row['check']}"


def _share(share: float) -> str:
    """In percent; 100 % is every weight."""
    return "100 %" if share == 1 else f"{min(99.9, 100 * share):.1f} %"


def _reason(error: str) -> str:
    """A client's own words, shortened, and safe in a list of Markdown."""
    words = " ".join(error.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")").split())
    return f"`{words if len(words) <= _SHOWN else words[: _SHOWN - 3] + '...'}`"


def failures(figures: Json) -> Sequence[Json]:
    """The rows where `check` was wrong."""
    return [row for row in figures["rows"] if not agrees(row)]
