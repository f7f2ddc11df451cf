"""Says how far the time left that --events tells was from what a run then took."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qconvert.report.tables import table


@click.command("time-left")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def time_left(files: tuple[Path, ...]) -> None:
    """Print the largest error of the time left from a tenth of each run on, as a part of the whole run.

    FILES are what --events has written of runs of at least half a minute.
    """
    rows = []
    for path in files:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        whole = lines[-1]["seconds"]
        said = [line for line in lines if line["event"] == "progress" and line["seconds_left"] is not None]
        errors = [(line["seconds"] + line["seconds_left"] - whole) / whole for line in said]
        late = [error for line, error in zip(said, errors, strict=True) if line["seconds"] >= whole / 10]
        worst = max(late, key=abs)
        rows.append([path.name, f"{whole:.1f} s", str(len(late)), f"{worst:+.1%}"])
    click.echo("\n".join(table(["run", "took", "estimates", "largest error"], rows)))
