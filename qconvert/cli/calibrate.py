"""Runs `qconvert calibrate`: statistics of what every linear reads, on a text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.events import stage_to
from qconvert.cli.exit_codes import after_the_work, typed
from qconvert.cli.options import (
    TokensType,
    device_option,
    events_option,
    examples,
    json_option,
    model_argument,
    overwrite_option,
    process_memory_option,
    quiet_option,
    revision_option,
)
from qconvert.cli.progress import layers_passed
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.calibrate.statistics_file import StoredStatistics
    from qconvert.calibrate.text import CalibrationText
    from qconvert.calibrate.transformers_engine import TransformersModel
    from qconvert.checkpoint.open import Checkpoint

PROTOCOLS = ("packed", "whole")
ENGINES = ("auto", "transformers")
_CPU_TOKENS, _GPU_TOKENS = 32 << 10, 128 << 10


@click.command(
    "calibrate",
    epilog=examples(
        "qconvert calibrate ./model -o stats",
        "qconvert calibrate ./model --text default --text my-chats.jsonl --tokens 128k -o stats",
        "qconvert calibrate ./model --text cal.txt --tokens all --imatrix imatrix.gguf",
        "qconvert calibrate ./model --engine transformers -o stats",
        "qconvert calibrate ./model --merge stats-a --merge stats-b -o stats",
    ),
)
@model_argument()
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=("default",),
    show_default="the bundled text",
    metavar="default|FILE|FOLDER|hub:ID",
    help="Text to run on; given again, they share the tokens equally.",
)
@click.option(
    "--tokens",
    type=TokensType(),
    show_default="32k on a CPU, 128k on a GPU",
    help="How many tokens to run on, such as 64k, or `all`.",
)
@click.option(
    "--window",
    type=click.IntRange(16, 1 << 20),
    metavar="N",
    show_default="2048; 512 of `whole` texts",
    help="Tokens that are read together.",
)
@click.option(
    "--protocol",
    type=click.Choice(PROTOCOLS),
    show_default="packed; whole with only --imatrix",
    help="Pieces in random order, EOS between them; or files from their beginning, as llama-imatrix reads.",
)
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", default=0, show_default=True, help="Seed of that order."
)
@device_option
@process_memory_option
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="What runs the model: qconvert (auto), or transformers, if installed, the whole model in memory.",
)
@click.option(
    "--sensitivities",
    is_flag=True,
    help="Run the text backwards too: what an error costs, which `--target-size` then need not measure.",
)
@click.option(
    "--merge",
    "merged",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="STATS",
    help="Run nothing: add up these statistics of earlier runs.",
)
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path),
    metavar="FILE.gguf",
    help="Write an importance matrix for llama-quantize.",
)
@click.option("--process-output", is_flag=True, help="Include an untied head in the importance matrix.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    show_default="derived, unless --imatrix",
    help="Folder of the statistics, or a file ending in .safetensors.",
)
@overwrite_option
@json_option
@quiet_option("only the paths of the outputs")
@events_option
@revision_option
def command(model: str, **flags: Any) -> None:
    """Measure what every linear of MODEL reads, by running it on text.

    The means of the squares weigh rounding errors: give them to `quantize` or `to-gguf` as --calibration.
    One layer is in memory at a time; activations are kept beside the output, or where TMPDIR points. Texts
    are UTF-8; a line of a .jsonl file has a "text", or "messages" for the model's own chat template;
    `default` is a mixture of prose, code, languages and chats that comes with qconvert.
    """
    with typed():
        _check_words(flags)
    from qconvert.calibrate.statistics_file import check_model, merge, read_statistics
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.resolved import open_found

    targets = Targets.of(model, flags)
    targets.check()
    resolved = resolve(model, revision=flags["revision"])
    checkpoint = open_found(resolved)
    started = time.perf_counter()
    if flags["merged"]:
        stored = merge([read_statistics(path) for path in flags["merged"]])
        check_model(stored, checkpoint.architecture)
    else:
        scratch = targets.statistics.parent if targets.statistics and flags["sensitivities"] else None
        stored = _run(checkpoint, resolved.name, targets.paths[0], scratch, flags)
    seconds = time.perf_counter() - started
    targets.write(stored, checkpoint, head=flags["process_output"])
    with after_the_work():
        _print(stored, targets, seconds, flags)


def _check_words(flags: dict[str, Any]) -> None:
    """Raise BadRecipe for options that do not go together, whatever the files hold."""
    imatrix, out = flags["imatrix"], flags["out"]
    if imatrix is not None and imatrix.suffix != ".gguf":
        raise BadRecipe(f"{imatrix}: does not end in .gguf", f"write --imatrix {imatrix}.gguf")
    if out is not None and out.suffix == ".gguf":
        raise BadRecipe(
            f"{out}: -o names a folder of statistics, not a file",
            f"--imatrix {out} writes llama.cpp's importance matrix",
        )
    if flags["process_output"] and imatrix is None:
        raise BadRecipe("--process-output: no importance matrix is written", "add --imatrix FILE.gguf")
    context = click.get_current_context()
    given = [
        name
        for name in ("texts", "tokens", "window", "protocol", "seed", "engine", "sensitivities")
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if flags["merged"] and given:
        name = "text" if given[0] == "texts" else given[0]
        raise BadRecipe(f"--{name}: nothing is run with --merge", "leave out one of the two")
    if flags["sensitivities"] and flags["engine"] != "auto":
        raise BadRecipe(
            f"--sensitivities: --engine {flags['engine']} runs no model backwards", "leave out one of the two"
        )
    if flags["sensitivities"] and out is None and imatrix is not None:
        raise BadRecipe("--sensitivities: an importance matrix has none", "add -o for the statistics")
    if out is not None and out == imatrix:
        raise BadRecipe(f"{out}: both outputs have this name", "choose another one")


@dataclass(frozen=True, slots=True)
class Targets:
    """The files to write: the statistics, llama.cpp's importance matrix, or both."""

    statistics: Path | None
    imatrix: Path | None
    overwrite: bool

    @staticmethod
    def of(model: str, flags: dict[str, Any]) -> Targets:
        """The files that are asked for; without any, statistics in a folder named after the model."""
        from qconvert.calibrate.statistics_file import FILE_NAME

        out, imatrix = flags["out"], flags["imatrix"]
        if out is None and imatrix is None:
            out = Path(f"{model.rstrip('/').rsplit('/', 1)[-1].partition('@')[0]}-statistics")
        if out is not None and out.suffix != ".safetensors":
            out = out / FILE_NAME
        return Targets(out, imatrix, flags["overwrite"])

    @property
    def paths(self) -> list[Path]:
        """The files, those of the statistics first."""
        return [path for path in (self.statistics, self.imatrix) if path is not None]

    def check(self) -> None:
        """Raise OutputExists for a file that is there, QConvertError for one that cannot be written."""
        from qconvert.formats.gguf.writer import check_target
        from qconvert.formats.io.local_file import explained, require_writable

        for path in self.paths:
            check_target(path, overwrite=self.overwrite)
            with explained(f"{path.parent}: cannot be created"):
                path.parent.mkdir(parents=True, exist_ok=True)
            require_writable(path)

    def write(self, stored: StoredStatistics, checkpoint: Checkpoint, *, head: bool) -> None:
        """Write what was asked for."""
        from qconvert.calibrate.imatrix import imatrix_entries
        from qconvert.calibrate.statistics_file import write_statistics
        from qconvert.formats.gguf.imatrix import write_imatrix

        if self.imatrix is not None:
            entries = imatrix_entries(stored.statistics.by_linear, checkpoint.architecture, head=head)
            write_imatrix(
                self.imatrix,
                entries,
                datasets=stored.datasets,
                window=stored.window,
                overwrite=self.overwrite,
            )
        if self.statistics is not None:
            write_statistics(self.statistics, stored)


def _run(
    checkpoint: Checkpoint, name: str, out: Path, scratch: Path | None, flags: dict[str, Any]
) -> StoredStatistics:
    """Read the texts and run the model on them; backwards too where there is a folder for that."""
    from qconvert.calibrate.activation_file import scratch_folder
    from qconvert.calibrate.run import calibrate, calibrate_elsewhere, own_config, read_text
    from qconvert.calibrate.transformers_engine import TransformersModel

    model = TransformersModel.of(checkpoint) if flags["engine"] == "transformers" else None
    positions = own_config(checkpoint).max_positions if model is None else model.positions
    talks = not flags["quiet"] and not flags["as_json"]
    tokens, asked = flags["tokens"], click.get_current_context().get_parameter_source("tokens")
    if asked is click.core.ParameterSource.DEFAULT:
        tokens = _CPU_TOKENS if flags["device"] == "cpu" else _GPU_TOKENS
    alone = flags["imatrix"] is not None and flags["out"] is None
    protocol = flags["protocol"] or PROTOCOLS[alone]
    how: dict[str, Any] = {"protocol": protocol, "seed": flags["seed"], "positions": positions}
    text = read_text(checkpoint, flags["texts"], tokens, flags["window"], **how)
    if tokens is not None and text.tokens < tokens - tokens % text.window:
        note = f"note: the text has {text.tokens:,} tokens in whole windows, fewer than {tokens:,}"
        click.echo(note, err=True) if talks else None
    if talks:
        for line in _told_before(text, checkpoint, model, backwards=scratch is not None):
            click.echo(line, err=True)
    with (
        stage_to(flags["events"], "calibrate", [name], "pass") as lines,
        layers_passed(text.tokens, talks=talks, also=lines.tell) as progress,
    ):
        if model is not None:
            _check_memory(model, flags["max_memory"])
            return calibrate_elsewhere(model, name, text, device=flags["device"], progress=progress)
        return calibrate(
            checkpoint,
            name,
            text,
            device=flags["device"],
            max_memory=flags["max_memory"],
            folder=scratch_folder(out),
            progress=progress,
            scratch=scratch,
        )


def _check_memory(model: TransformersModel, asked: int | None) -> None:
    """Raise BadRecipe where transformers, which holds the whole model, cannot keep within what was asked."""
    from qconvert.calibrate.memory_limit import memory_limit

    if asked is not None:
        memory_limit(asked).check(model.nbytes, "transformers, which holds the whole model,")


def _told_before(
    text: CalibrationText, checkpoint: Checkpoint, model: TransformersModel | None, *, backwards: bool
) -> Iterator[str]:
    """What is going to be run, and what runs it if that is not qconvert."""
    from qconvert.report.tables import count, size

    if model is not None:
        yield f"transformers' {model.class_name} runs, whole in memory: {size(model.nbytes)} in float32"
        if model.own_code:
            yield "note: the code that comes with the checkpoint (auto_map) is not run"
    layers, windows = checkpoint.architecture.layers, count(len(text.tokens_BT), "window")
    way = ", forwards and backwards" if backwards else ""
    yield (
        f"running {text.tokens:,} tokens, {windows} of {text.window:,}, through {count(layers, 'layer')}{way}"
    )


def _print(stored: StoredStatistics, targets: Targets, seconds: float, flags: dict[str, Any]) -> None:
    """The report on stdout and the time on stderr; or one JSON object, or the paths alone."""
    from qconvert.report.tables import table

    found = stored.statistics
    unrouted, experts = found.unrouted, {(k.layer, k.expert) for k in found.inputs if k.expert is not None}
    if flags["as_json"]:
        record = {
            "schema": 1,
            "ok": True,
            "outputs": [str(path) for path in targets.paths],
            "model": dict(stored.model),
            "texts": list(stored.texts),
            "tokens": found.tokens,
            "inputs": len(found.inputs),
            "linears": len(found.by_linear),
            "experts": len(experts),
            "experts_never_chosen": [list(pair) for pair in unrouted],
            "seconds": seconds,
            **({"left_out": list(stored.left_out)} if stored.left_out else {}),
            **({"sensitivity_tokens": stored.gradients.tokens} if stored.gradients else {}),
        }
        click.echo(json.dumps(record))
        return
    if flags["quiet"]:
        click.echo("\n".join(map(str, targets.paths)))
        return
    rows = [["text", ", ".join(stored.datasets)]]
    rows.append(["tokens", f"{found.tokens:,} in windows of {stored.window:,}"])
    rows.append(["inputs", f"{len(found.inputs):,}, read by {len(found.by_linear):,} linears"])
    if experts:
        rows.append(["experts", f"{len(experts):,}, of which {len(unrouted):,} were never chosen"])
    if stored.gradients is not None:
        rows.append(["sensitivities", f"of {stored.gradients.tokens:,} tokens"])
    rows += [["written", str(path)] for path in targets.paths]
    click.echo("\n".join(table(["model", stored.model.get("name", "")], rows, left=2)))
    if stored.left_out:
        click.echo(f"note: {_told_left_out(stored.left_out)}", err=True)
    click.echo(f"done in {seconds:.1f} s", err=True)


def _told_left_out(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"transformers did not show what these weights read: {shown} ({len(names)} in all). These inputs are"
        " left out, and errors of these weights will not be weighed"
    )
