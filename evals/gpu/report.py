"""A run in Markdown: ceilings, failed checks, tables against the floor, targets, what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from evals.gpu.models import MODELS, named_shapes
from evals.gpu.rows import (
    OURS,
    Ceiling,
    Check,
    Crossing,
    Decoding,
    Fact,
    Note,
    Product,
    Reading,
    Row,
    of_kind,
)
from evals.gpu.schedule import Outcome
from evals.gpu.targets import Target, ceiling, targets, wikitext_seconds
from qconvert.report.tables import size

KINDS = {"int4": "int4-mma", "int8": "int8-mma", "bf16": "dense"}
"""How the decoder's tuning calls the forms."""
TIE = 1.02
"""Splits within that factor of the fastest are as good; the fewest of them is taken."""
Names = Mapping[tuple[int, int], str]
UNITS = {"bytes/s": ("GB/s", 1e-9), "FLOP/s": ("TFLOP/s", 1e-12), "s": ("us", 1e6)}


def markdown(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    device = next((fact.text for fact in of_kind(rows, Fact) if fact.name == "device"), "no device")
    blocks = [f"# The decoder on one GPU: {device}", machine(rows), correctness(rows)]
    blocks += [decoding(rows), kernels(rows), crossings(rows), reading(rows), asked(rows)]
    return "\n\n".join([*blocks, left_out(rows, outcomes)]) + "\n"


def machine(rows: Sequence[Row]) -> str:
    """Facts in a line, and the ceilings that everything else is a fraction of."""
    facts = ", ".join(f"{fact.name} {fact.text}" for fact in of_kind(rows, Fact))
    cells = []
    for each in of_kind(rows, Ceiling):
        unit, factor = UNITS[each.unit]
        cells.append([each.name, f"{each.value * factor:.4g} {unit}"])
    return f"{facts}.\n\n{_grid(['ceiling', 'measured'], cells)}"


def correctness(rows: Sequence[Row]) -> str:
    """The worst of every subject; failures case by case, in capitals."""
    checks = of_kind(rows, Check)
    failed = [_failure(check) for check in checks if not check.passed]
    cells = []
    for subject in dict.fromkeys(check.subject for check in checks):
        mine = [check for check in checks if check.subject == subject]
        worst = max(mine, key=_badness)
        verdict = "yes" if all(check.passed for check in mine) else "NO"
        cells.append(
            [subject, str(len(mine)), f"{worst.error:.1e}", f"{worst.limit:.1e}", worst.case, verdict]
        )
    head = ["what", "cases", "worst error", "its limit", "where", "passed"]
    return "\n\n".join(["## Correctness", *failed, _grid(head, cells)])


def _badness(check: Check) -> float:
    """How far beyond its limit; a NaN is as far as can be."""
    return math.inf if math.isnan(check.error) else check.error / max(check.limit, 1e-300)


def _failure(check: Check) -> str:
    again = "" if check.stable else ", NOT THE SAME BITS AGAIN"
    where = f"{check.case}, error {check.error:.2e}, limit {check.limit:.1e}{again}"
    return f"**{check.subject.upper()} FAILED**: {where}"


def decoding(rows: Sequence[Row]) -> str:
    """Tokens per second against the floor: bytes over the copy bandwidth, and a launch per kernel."""
    cells = [_decoding_cells(row, rows) for row in of_kind(rows, Decoding)]
    head = ["model", "via", "context", "tokens/s", "us/token", "bytes/token", "kernels", "floor us"]
    text = "The floor: bytes over the copy bandwidth, and a launch per kernel; peers' are not counted."
    return f"## Decoding at batch 1\n\n{text}\n\n{_grid([*head, 'fraction'], cells, left=2)}"


def floor_seconds(row: Decoding, rows: Sequence[Row]) -> float | None:
    """What a token must take: its bytes at the copy bandwidth, and the kernels' launches."""
    copy, launch = ceiling(rows, "copy"), ceiling(rows, "launch")
    if copy is None or launch is None:
        return None
    return (row.weight_bytes + row.kv_bytes) / copy + (row.launches or 0) * launch


def _decoding_cells(row: Decoding, rows: Sequence[Row]) -> list[str]:
    floor = floor_seconds(row, rows)
    return [
        f"{row.model}, {row.encoding}",
        row.via,
        str(row.context),
        f"{1 / row.seconds_per_token:.1f}",
        f"{row.seconds_per_token * 1e6:.0f}",
        size(row.weight_bytes + row.kv_bytes),
        "" if row.launches is None else str(row.launches),
        "" if floor is None else f"{floor * 1e6:.0f}",
        "" if floor is None else f"{floor / row.seconds_per_token:.2f}",
    ]


def kernels(rows: Sequence[Row]) -> str:
    """Every shape with its best splits, beside peers; and the splits as the decoder's tuning holds them."""
    found, copy = of_kind(rows, Product), ceiling(rows, "copy")
    names = named_shapes(MODELS)
    head = [
        "product",
        "shape",
        "form",
        "via",
        "us by splits",
        "splits",
        "us",
        "GB/s",
        "of copy",
        "in a graph",
    ]
    blocks = ["## Matmul kernels"]
    for count in dict.fromkeys(row.rows for row in found):
        mine = [row for row in found if row.rows == count]
        best = list(_best_products(mine, copy))
        blocks.append(f"{count} row{'s' if count > 1 else ''} of x:")
        blocks.append(_grid(head, [_product_cells(row, mine, names, copy) for row in best], left=4))
        if count == 1:
            blocks.append(_literal(best, names))
    return "\n\n".join(blocks)


def _product_cells(row: Product, found: Sequence[Product], names: Names, copy: float | None) -> list[str]:
    rate = row.nbytes / row.seconds
    by_splits = [f"{each.splits}: {each.seconds * 1e6:.2f}" for each in found if _key(each) == _key(row)]
    return [
        names.get((row.out, row.width), ""),
        f"{row.out} x {row.width}",
        row.encoding,
        row.via,
        "" if row.splits is None else ", ".join(by_splits),
        "" if row.splits is None else str(row.splits),
        f"{row.seconds * 1e6:.2f}",
        f"{rate / 1e9:.0f}",
        "" if copy is None else f"{rate / copy:.2f}",
        "yes" if row.graphed else "no",
    ]


def _key(row: Product) -> tuple[object, ...]:
    return row.out, row.width, row.encoding, row.via


def _best_products(found: Sequence[Product], copy: float | None) -> Iterator[Product]:
    """Of every shape, form and library, the fewest splits that are as fast as any.

    A split's results are read again by the next kernel, which is charged to it.
    """

    def cost(row: Product) -> float:
        return row.seconds + (4 * (row.splits or 0) * row.rows * row.out / copy if copy else 0.0)

    for key in dict.fromkeys(map(_key, found)):
        mine = [row for row in found if _key(row) == key]
        least = min(map(cost, mine))
        yield min((row for row in mine if cost(row) <= TIE * least), key=lambda row: row.splits or 0)


def _literal(best: Sequence[Product], names: Names) -> str:
    lines = [
        f'    ("{KINDS[row.encoding]}", {row.out}, {row.width}): {row.splits},'
        f"  # {names.get((row.out, row.width), '')}"
        for row in best
        if row.via == OURS
    ]
    text = "\n".join(["SPLITS = {", *lines, "}"])
    return f"For `qconvert/runtime/cuda/tuning.py`:\n\n```python\n{text}\n```"


def crossings(rows: Sequence[Row]) -> str:
    """Microseconds of both ways by rows, and the last number of rows at which the kernel is not behind."""
    found, cells, last = of_kind(rows, Crossing), [], dict[str, int]()
    for encoding, out, width in dict.fromkeys((row.encoding, row.out, row.width) for row in found):
        mine = [row for row in found if (row.encoding, row.out, row.width) == (encoding, out, width)]
        until = ahead_until(mine)
        last[encoding] = min(until, last.get(encoding, until))
        both = "; ".join(f"{row.rows}: {_us(row.few_seconds)} / {_us(row.many_seconds)}" for row in mine)
        cells.append([f"{out} x {width}", encoding, str(until), both])
    head = ["shape", "form", "kernel ahead to", "rows: kernel / dequantize and multiply, us"]
    literal = "\n".join(f"# {KINDS[encoding]}: {rows}" for encoding, rows in last.items())
    return (
        f"## Few rows or many\n\n{_grid(head, cells, left=4)}\n\n"
        f"Rows to which the kernel is ahead on every shape:\n\n```python\n{literal}\n```"
    )


def ahead_until(sweep: Sequence[Crossing]) -> int:
    """The rows up to which the kernel is not behind, at this number and all below it; 0 for none."""
    until = 0
    for row in sorted(sweep, key=lambda row: row.rows):
        if row.few_seconds is None or row.few_seconds > row.many_seconds:
            break
        until = row.rows
    return until


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def reading(rows: Sequence[Row]) -> str:
    """Tokens per second and operations per second, and what wikitext-2 takes."""
    matmul = ceiling(rows, "matmul")
    cells = [_reading_cells(row, matmul) for row in of_kind(rows, Reading)]
    head = ["model", "via", "tokens", "tokens/s", "TFLOP/s", "of matmul", "wikitext-2 s", ""]
    text = (
        "Quantized weights are dequantized at every visit of a layer here. Where memory allows, an evaluation"
        " holds a dense copy of them, and reads as bf16 does."
    )
    return f"## Reading for perplexity, windows of 2048\n\n{text}\n\n{_grid(head, cells, left=2)}"


def _reading_cells(row: Reading, matmul: float | None) -> list[str]:
    rate = row.flops / row.seconds
    return [
        f"{row.model}, {row.encoding}",
        row.via,
        f"{row.tokens:,}",
        f"{row.tokens / row.seconds:,.0f}",
        f"{rate / 1e12:.1f}",
        "" if matmul is None else f"{rate / matmul:.2f}",
        f"{wikitext_seconds(row):.2f}",
        "measured" if row.whole else "extrapolated",
    ]


def asked(rows: Sequence[Row]) -> str:
    """The targets, which are set for an H200."""
    cells = [_target_cells(target) for target in targets(rows)]
    return f"## Targets, set for an H200\n\n{_grid(['target', 'asked', 'measured', 'unit', 'met'], cells)}"


def _target_cells(target: Target) -> list[str]:
    measured = "" if target.measured is None else f"{target.measured:.4g}"
    met = {True: "yes", False: "NO", None: "not measured"}[target.met]
    return [target.what, f"{'<' if target.most else '>='} {target.asked:.4g}", measured, target.unit, met]


def left_out(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """How the sections ended, and every note."""
    cells = [[each.section, each.status, f"{each.seconds:.0f}", each.message] for each in outcomes]
    notes = "\n".join(f"- {note.text}" for note in of_kind(rows, Note)) or "- nothing"
    return f"## Sections\n\n{_grid(['section', 'ended', 'seconds', 'why'], cells)}\n\nNotes:\n\n{notes}"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table of Markdown; all but the first `left` columns are flush right."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])
