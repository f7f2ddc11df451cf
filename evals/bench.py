"""Times calls on a device, and writes every figure to a file as it comes, and the file as tables."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.core.dtypes import Json

if TYPE_CHECKING:
    import torch

GB, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(slots=True)
class Bench:
    """A device, the end of the run, and the file that records go to."""

    device: torch.device
    end: float
    path: Path
    dry: bool
    section: str = ""
    ceilings: dict[str, float] = field(default_factory=dict)

    def add(self, **fields: object) -> None:
        """Write a record, at once."""
        record = {"section": self.section}
        for key, value in fields.items():
            # To four digits, which is more than repeats; what is no number as null.
            finite = isinstance(value, float) and math.isfinite(value)
            record[key] = float(f"{value:.4g}") if finite else None if isinstance(value, float) else value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        click.echo("  ".join(str(each) for each in record.values()))

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Measure, or write why not: memory that ran out and what a version lacks cost one figure."""
        import torch

        if time.monotonic() > self.end:
            self.add(note=f"{what}: no time left")
            return
        try:
            measure()
        except Exception as error:  # whatever a peer or a driver raises
            first = (str(error).strip() or "no message").splitlines()[0]
            self.add(note=f"{what}: {type(error).__name__}: {first[:200]}")
            self.synchronize()  # a device that no longer answers ends the run here
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device; raises what a kernel has done wrong."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, calls: Sequence[Callable[[], object]], *, graphed: bool = True) -> float:
        """Seconds per call of calls that follow one another, replayed as a graph on a GPU."""

        def run() -> None:
            for call in calls:
                call()

        if self.device.type != "cuda":
            return self.wall(run) / len(calls)
        from triton.testing import do_bench, do_bench_cudagraph

        bench = do_bench_cudagraph if graphed else do_bench
        return float(bench(run, rep=20, return_mode="median")) / 1e3 / len(calls)

    def wall(self, call: Callable[[], object]) -> float:
        """Seconds from an idle device to an idle device."""
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    def copies(self, nbytes: int) -> int:
        """How many weights of a size are three times the cache, so that none is found in it."""
        import torch

        if self.device.type != "cuda":
            return 1
        return 1 + 3 * int(torch.cuda.get_device_properties(self.device).L2_cache_size) // nbytes


def load(path: Path) -> list[Json]:
    """All records of a file; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def markdown(records: Sequence[Json]) -> str:
    """A table for every section and every kind of record in it; notes below."""
    blocks: list[str] = ["# The decoder on one GPU"]
    for section in dict.fromkeys(record["section"] for record in records):
        mine = [record for record in records if record["section"] == section]
        blocks.append(f"## {section}")
        for head in dict.fromkeys(tuple(record)[1:] for record in mine if "note" not in record):
            lines = [
                "| " + " | ".join(each.replace("_", " ") for each in head) + " |",
                "|" + "---|" * len(head),
            ]
            for record in (each for each in mine if tuple(each)[1:] == head):
                cells = ("" if record[key] is None else str(record[key]) for key in head)
                lines.append("| " + " | ".join(cells) + " |")
            blocks.append("\n".join(lines))
        blocks += [f"- {record['note']}" for record in mine if "note" in record]
    return "\n\n".join(blocks) + "\n"
