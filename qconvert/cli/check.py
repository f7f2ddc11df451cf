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
    from qconvert.check.subject import Subject
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
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Where the loader computes: which kernels there are (known of vLLM).",
)
@json_option
@quiet_option("errors and warnings alone")
@revision_option
def command(
    model: str, loader: str, tp: int, device: str, as_json: bool, quiet: bool, revision: str | None
) -> None:
    """Hold MODEL against the rules of a loader: layout, fused groups, parallelism, names, vocabulary.

    Reads headers, config.json and tokenizer.json; nothing is loaded. Exits with 3 if the loader would
    fail or compute something else, with 0 if it loads MODEL, or loads it with what is named: a package
    that it does not bring itself, or an argument.
    """
    from qconvert.check.loader_rules import lint
    from qconvert.check.subject import ERROR, NEEDS, NOTE
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.report.tables import count

    resolved = resolve(model, revision=revision, weights=False)
    checkpoint = open_checkpoint(resolved.path, headers=resolved.headers)
    problems = lint(_subject(checkpoint, loader, tp, device))
    errors = [problem for problem in problems if problem.severity == ERROR]
    needs = list(dict.fromkeys(problem.needs for problem in problems if problem.severity == NEEDS))
    if as_json:
        verdict = "fails" if errors else "loads only with" if needs else "loads"
        asked = {
            "schema": 1,
            "ok": not errors,
            "model": model,
            "for": loader,
            "tp": tp,
            "device": device,
            "verdict": verdict,
            "needs": needs,
        }
        click.echo(json.dumps({**asked, "problems": [asdict(problem) for problem in problems]}))
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
        beside = f", but only with {' and '.join(needs)}" if needs else ""
        click.echo(f"OK: {loader} should load this{beside}")


def _subject(checkpoint: Checkpoint, loader: str, tp: int, device: str) -> Subject:
    """What the rules look at."""
    from qconvert.check.subject import Subject
    from qconvert.formats.layouts import registry
    from qconvert.formats.layouts.config_checks import dtype_of

    return Subject(
        checkpoint.tensors,
        checkpoint.architecture,
        registry.stored_as(checkpoint.config, checkpoint.layout.name),
        loader,
        tp,
        dtype_of(checkpoint.config),
        _tokens(checkpoint),
        checkpoint.bind(allow_unknown=True).unknown,
        tuple(checkpoint.products),
        device,
        tuple(path.name for path in checkpoint.files.sidecars.code),
        checkpoint.files.sidecars.missing,
    )


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
