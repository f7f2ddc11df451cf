"""Runs `qconvert check`: whether a loader will take a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from qconvert.cli.checking import end_checks
from qconvert.cli.exit_codes import tell_with_errors
from qconvert.cli.options import (
    NearestChoice,
    examples,
    json_option,
    keep_going_option,
    models_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.passed_over import PassedOver
from qconvert.core.layout_traits import LOADERS
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.check.subject import Problem
    from qconvert.core.dtypes import Json


@click.command("check", epilog=examples("qconvert check ./model-int4-g128 --for vllm --tp 4"))
@models_argument()
@click.option("--for", "loader", type=NearestChoice(LOADERS), required=True, help="The loader to ask for.")
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
@keep_going_option
@json_option
@quiet_option("only errors and warnings")
@revision_option
def command(
    models: tuple[str, ...],
    loader: str,
    tp: int,
    device: str,
    keep_going: bool,
    as_json: bool,
    quiet: bool,
    revision: str | None,
) -> None:
    """Check MODEL against the rules of a loader: layout, fused groups, parallelism, names, vocabulary.

    Reads headers, config.json and tokenizer.json; nothing is loaded. A config.json alone is judged by the
    weights that it promises, so that a split over ranks can be planned before a download. Exits with 3 if
    the loader would fail or compute something else; with 0 if it loads MODEL as it is, or with the package
    or the argument that the answer names.
    """
    from qconvert.check.subject import ERROR

    failing: list[tuple[str, int]] = []
    told: list[Json] = []
    passed = PassedOver(models, keep_going, as_json)
    tell_with_errors("models", told)
    for model in models:
        with passed.one(model):
            found = _checked(model, loader, tp, device, revision)
            told.append(_to_json(model, found, {"for": loader, **_conditions(loader, tp, device)}))
            errors = sum(problem.severity == ERROR for problem in found)
            if errors:
                failing.append((model, errors))
            if not as_json:
                _print(model, loader, found, quiet=quiet, several=len(models) > 1)
    failure = _failure(failing, loader, "`problems`" if as_json else "the list above")
    end_checks(told, failure, passed)


def _failure(failing: Sequence[tuple[str, int]], loader: str, where: str) -> CheckFailed | None:
    """What to say of models that do not load, each with the number of its errors, listed in `where`."""
    from qconvert.report.tables import count

    if not failing:
        return None
    model, errors = failing[0]
    more = f"; {count(len(failing) - 1, 'other model')} too" if len(failing) > 1 else ""
    return CheckFailed(
        f"{model}: {count(errors, 'problem')} for {loader}{more}",
        f"fix what {where} names, or ask for another loader with --for",
    )


def _conditions(loader: str, tp: int, device: str) -> Json:
    """What was asked for besides, of those who are judged by it: ranks, and where they compute."""
    from qconvert.check.subject import FUSING

    return ({"tp": tp} if loader in FUSING else {}) | ({"device": device} if loader == "vllm" else {})


def _checked(model: str, loader: str, tp: int, device: str, revision: str | None) -> list[Problem]:
    """The problems of a model; of a config.json alone those of the weights that it promises, and a note."""
    from qconvert.check.loader_rules import lint
    from qconvert.check.subject import NOTE, Problem
    from qconvert.check.subjects import subject_of
    from qconvert.checkpoint.assumed import refuse_quantized, without_weights
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import require_weights
    from qconvert.checkpoint.resolved import open_found

    resolved = resolve(model, revision=revision, weights=False)
    assumed = None if resolved.repo_id or resolved.adapter else without_weights(resolved.path)
    checkpoint = assumed or open_found(resolved)
    refuse_quantized(checkpoint, model)
    require_weights(checkpoint, model, headers=True)
    problems = lint(subject_of(checkpoint, loader, tp, device))
    if assumed is None:
        return problems
    only = f"judged from {assumed.assumed} only: names and shapes are what it promises"
    return [*problems, Problem(NOTE, "weights", only)]


def _needs(problems: Sequence[Problem]) -> list[str]:
    """The packages and arguments that the loader does not bring itself."""
    from qconvert.check.subject import NEEDS

    return list(dict.fromkeys(problem.needs for problem in problems if problem.severity == NEEDS))


def _to_json(model: str, problems: Sequence[Problem], asked: Json) -> Json:
    from qconvert.check.subject import ERROR

    ok, needs = all(problem.severity != ERROR for problem in problems), _needs(problems)
    verdict = ("loads only with" if needs else "loads") if ok else "fails"
    found = [asdict(problem) for problem in problems]
    return {"ok": ok, "model": model, **asked, "verdict": verdict, "needs": needs, "problems": found}


def _print(model: str, loader: str, problems: Sequence[Problem], *, quiet: bool, several: bool) -> None:
    """The problems of a model, one below the other, and whether it loads; of several models, each by name."""
    from qconvert.check.subject import ERROR, NOTE

    listed = [problem for problem in problems if not (quiet and problem.severity == NOTE)]
    if several and (listed or not quiet):
        click.echo(f"{model}:")
    for problem in listed:
        click.echo(f"{problem.severity}: {problem.subject}: {problem.fact}")
        if problem.hint:
            click.echo(f"  {problem.hint}")
    if not quiet and all(problem.severity != ERROR for problem in problems):
        needs = _needs(problems)
        beside = f", but only with {' and '.join(needs)}" if needs else ""
        click.echo(f"OK: {loader} should load this{beside}")
