"""Runs `qconvert check`: whether a loader will take a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.options import examples, json_option, model_argument, quiet_option, revision_option
from qconvert.core.layout_traits import LOADERS
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint

_TOKENIZER = "tokenizer.json"


@click.command("check", epilog=examples("qconvert check ./model-int4-g128 --for vllm --tp 4"))
@model_argument()
@click.option("--for", "loader", type=click.Choice(LOADERS), required=True, help="The loader to ask for.")
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    metavar="N",
    default=1,
    show_default=True,
    help="Ranks of tensor parallelism.",
)
@json_option
@quiet_option("errors and warnings alone")
@revision_option
def command(model: str, loader: str, tp: int, as_json: bool, quiet: bool, revision: str | None) -> None:
    """Hold MODEL against the rules of a loader: layout, fused groups, parallelism, names, vocabulary.

    Reads headers, config.json and tokenizer.json; nothing is loaded. Exits with 3 if the loader would
    fail or compute something else.
    """
    from qconvert.check.loader_rules import lint
    from qconvert.check.subject import ERROR, NOTE, Subject
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.formats.layouts.config_checks import dtype_of
    from qconvert.report.tables import count

    resolved = resolve(model, revision=revision, weights=False)
    checkpoint = open_checkpoint(resolved.path, headers=resolved.headers)
    subject = Subject(
        checkpoint.tensors,
        checkpoint.architecture,
        checkpoint.layout.name,
        loader,
        tp,
        dtype_of(checkpoint.config),
        _tokens(checkpoint),
        checkpoint.bind(allow_unknown=True).unknown,
    )
    problems = lint(subject)
    errors = [problem for problem in problems if problem.severity == ERROR]
    if as_json:
        found = [asdict(problem) for problem in problems]
        click.echo(json.dumps({"schema": 1, "model": model, "for": loader, "tp": tp, "problems": found}))
        raise click.exceptions.Exit(CheckFailed.exit_code if errors else 0)
    for problem in problems:
        if quiet and problem.severity == NOTE:
            continue
        click.echo(f"{problem.severity}: {problem.subject}: {problem.fact}")
        if problem.hint:
            click.echo(f"  {problem.hint}")
    if errors:
        refused = count(len(errors), "problem")
        raise CheckFailed(
            f"{model}: {refused} for {loader}",
            "fix what the list above names, or ask for another loader with --for",
        )
    if not quiet:
        click.echo(f"OK: {loader} should load this")


def _tokens(checkpoint: Checkpoint) -> int | None:
    """One more than the largest token of tokenizer.json; None where there is none, or of another shape."""
    from qconvert.formats.io.strict_json import read_json_object

    path: Path = checkpoint.path / _TOKENIZER
    if not path.is_file():
        return None
    found = read_json_object(path, max_bytes=1 << 28)
    added = found.get("added_tokens") or []
    model = found.get("model") or {}
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [entry.get("id") for entry in added if isinstance(entry, dict)]
    numbers = [number for number in ids if isinstance(number, int)]
    return max(numbers) + 1 if numbers else None
