"""Runs `qconvert generate`: a checkpoint continues a prompt."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import typed
from qconvert.cli.options import (
    activations_option,
    device_option,
    examples,
    jobs_option,
    json_option,
    model_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.progress import compiling_explained
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qconvert.checkpoint.hub import ResolvedModel
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.core.dtypes import Json
    from qconvert.formats.tokenizers.prompts import Dialogue
    from qconvert.runtime.model import Decoder


_SLOW = (
    "note: weights of this form have no kernel on {device}, so every token decodes them; integers of"
    " compressed-tensors, GPTQ and AWQ have one (`qconvert convert`)"
)


def _a_number(ctx: click.Context, parameter: click.Parameter, value: float) -> float:
    """The value; `nan` passes every range."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number", ctx, parameter)
    return value


@click.command(
    "generate",
    epilog=examples(
        'qconvert generate ./Qwen2.5-0.5B-Instruct-int4-g128 --chat -p "Name three rivers."',
        "qconvert generate ./Qwen2.5-0.5B-Instruct-int4-g128 --chat",
        "qconvert generate embedded -p 'def add(a, b):' --stop 'def '",
    ),
)
@model_argument()
@click.option("-p", "--prompt", metavar="TEXT", help="What to continue; - reads stdin.")
@click.option(
    "--chat",
    is_flag=True,
    help="Put the prompt as a user's message into the model's chat template. Without -p, a conversation: "
    "each line of stdin is a message, until its end (Ctrl-D).",
)
@click.option("--system", metavar="TEXT", help="A system message before it, with --chat.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    default=128,
    show_default=True,
    help="Stop after this many tokens.",
)
@click.option(
    "--stop", "stops", multiple=True, metavar="TEXT", help="Stop before this text; repeat for several."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    callback=_a_number,
    metavar="X",
    default=0.0,
    show_default=True,
    help="How freely to sample; 0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    callback=_a_number,
    metavar="X",
    default=1.0,
    show_default=True,
    help="Sample among the likeliest tokens that together reach this probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the random numbers.",
)
@device_option
@activations_option("exact")
@click.option(
    "--backend",
    type=click.Choice(["auto", "reference"]),
    default="auto",
    show_default=True,
    help="Arithmetic: the device's fastest kernels and dtype (on a CPU, inputs of 16 bits per block of 128),"
    " or float32 in plain torch.",
)
@click.option(
    "--head",
    type=click.Choice(["stored", "int8", "int4"]),
    default="stored",
    show_default=True,
    help="The output head as it is stored, or rounded to 8 or 4 bits on loading, for speed.",
)
@jobs_option
@json_option
@quiet_option("only the text")
@revision_option
def command(
    model: str, prompt: str | None, jobs: int | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Continue a prompt with MODEL, quantized or not; text on stdout as it comes; or converse: --chat.

    Quantized weights are multiplied by as they are stored, never unpacked as a whole. Generation
    ends at the model's end-of-text token, before a --stop, or after --max-tokens.
    """
    with typed():
        _check_words(prompt, options, as_json=as_json)
    from qconvert.checkpoint.dialogue import dialogue_of
    from qconvert.runtime.generate import decodes_weights, warm_up
    from qconvert.runtime.run_info import use_threads

    use_threads(jobs)
    clock = _Clock()
    resolved, checkpoint, decoder, activations = _open(model, options)
    clock.tick()
    dialogue = dialogue_of(checkpoint)
    ids = [] if prompt is None else _prompt(dialogue, prompt, options)
    if decodes_weights(decoder) and not quiet and options["backend"] == "auto":
        click.echo(_SLOW.format(device=decoder.device.type), err=True)
    if activations.startswith("exact, ") and not quiet:
        click.echo(f"note: inputs of linears are {activations}; see --activations", err=True)
    with compiling_explained(talks=not quiet and not as_json):
        warm_up(decoder, len(ids))
    if prompt is None:
        _talk(decoder, dialogue, options, clock)
        return
    pieces = []
    for piece in _texts(decoder, dialogue, ids, options, clock):
        pieces.append(piece)
        if not as_json:
            _show(piece)
    count = clock.tokens
    full = len(ids) + count >= decoder.config.max_positions
    if as_json:
        record = {
            "schema": 1,
            "ok": True,
            "text": "".join(pieces),
            "prompt_tokens": len(ids),
            "tokens": count,
            **clock.figures(len(ids)),
            "context_full": full,
            **_conditions(resolved, checkpoint, decoder, options, activations),
        }
        click.echo(json.dumps(record))
        return
    _show("\n")
    if not quiet:
        _say(len(ids), count, clock)
        if full:
            click.echo(f"the model's {decoder.config.max_positions} positions are full", err=True)


class _Clock:
    """Times of loading and between tokens: the first token closes the prompt, the others are decoding."""

    def __init__(self) -> None:
        self.ticks = [time.perf_counter()]
        self.loading = 0.0

    def start(self) -> None:
        """Begin to time tokens; what was timed before was loading."""
        self.loading = self.ticks[-1] - self.ticks[0]
        self.ticks = [time.perf_counter()]

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    @property
    def tokens(self) -> int:
        """How many have come since the start."""
        return len(self.ticks) - 1

    def figures(self, prompt_tokens: int) -> dict[str, float | None]:
        """Seconds, and tokens per second of prompt and decoding; None where there was nothing to time."""
        start, *ticks = self.ticks
        reading = ticks[0] - start if ticks else None
        decoding = ticks[-1] - ticks[0] if len(ticks) > 1 else None
        return {
            "loading_seconds": self.loading,
            "prompt_seconds": reading,
            "decoding_seconds": decoding,
            "prompt_tokens_per_second": prompt_tokens / reading if reading else None,
            "tokens_per_second": (len(ticks) - 1) / decoding if decoding else None,
        }


def _conditions(
    resolved: ResolvedModel,
    checkpoint: Checkpoint,
    decoder: Decoder,
    options: dict[str, Any],
    activations: str,
) -> Json:
    """What the same text and figures would take: the model's files, what was asked, what computed."""
    from qconvert.convert.manifest import source_record
    from qconvert.runtime.run_info import arithmetic, device_name, dtype_name, versions

    return {
        "model": {
            **source_record(resolved, checkpoint, hash_sources=False),
            "quantization": checkpoint.quantization,
        },
        "asked": {name: value for name, value in options.items() if name != "revision"},
        "computed": {
            "arithmetic": arithmetic(decoder, 1, activations),
            "activations": activations,
            "kv_cache": dtype_name(decoder.dtype),
            "head": _head_form(checkpoint, options["head"]),
            "step": type(decoder.step).__name__ if decoder.step else None,
            "device": device_name(decoder),
        },
        "versions": versions(),
    }


def _head_form(checkpoint: Checkpoint, asked: str) -> str:
    """What the output head was multiplied as: rounded on loading, or as it is stored."""
    if asked != "stored":
        return asked
    tables = (checkpoint.architecture.table(role) for role in ("lm_head", "embed"))
    return next(
        checkpoint.tensors[t.name].encoding.label for t in tables if t and t.name in checkpoint.tensors
    )


def _open(model: str, options: dict[str, Any]) -> tuple[ResolvedModel, Checkpoint, Decoder, str]:
    """The model, ready to run, and what its linears multiply, in words."""
    import torch

    from qconvert.checkpoint.by_role import CheckpointWeights
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.resolved import open_found
    from qconvert.runtime.config import DecoderConfig
    from qconvert.runtime.device_layout import Layout
    from qconvert.runtime.load import load_decoder

    resolved = resolve(model, revision=options["revision"])
    checkpoint = open_found(resolved)
    layout = Layout(options["backend"])
    weights = CheckpointWeights(checkpoint, activations=options["activations"])
    decoder = load_decoder(
        DecoderConfig.of(checkpoint.architecture),
        weights,
        device=options["device"],
        dtype=None if layout is Layout.AUTO else torch.float32,
        layout=layout,
        head_bits={"int8": 8, "int4": 4}.get(options["head"]),
        inputs=weights.inputs,
    )
    return resolved, checkpoint, decoder, weights.activations_in_words


def _texts(
    decoder: Decoder, dialogue: Dialogue, ids: list[int], options: dict[str, Any], clock: _Clock
) -> Iterator[str]:
    """The text that follows a prompt, in pieces as it comes."""
    from qconvert.formats.tokenizers.prompts import Detokenizer
    from qconvert.formats.tokenizers.stop_texts import StopTexts
    from qconvert.runtime.generate import Sampler, generate

    sampler = Sampler(options["temperature"], options["top_p"], options["seed"])
    detokenizer, stops = Detokenizer(dialogue.tokenizer), StopTexts(options["stops"])
    clock.start()
    for token in generate(decoder, ids, options["max_tokens"], sampler, dialogue.stops):
        clock.tick()
        yield stops.push(detokenizer.push(token))
        if stops.found:
            return
    yield stops.push(detokenizer.rest()) + stops.rest()


def _talk(decoder: Decoder, dialogue: Dialogue, options: dict[str, Any], clock: _Clock) -> None:
    """Answer every line of stdin, each with the whole conversation before it, until stdin ends."""
    messages = _begun(options)
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        _require_utf8(line)
        messages.append({"role": "user", "content": line.removesuffix("\n")})
        pieces = []
        for piece in _texts(decoder, dialogue, dialogue.encode_chat(messages), options, clock):
            pieces.append(piece)
            _show(piece)
        _show("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _check_words(prompt: str | None, options: dict[str, Any], *, as_json: bool) -> None:
    """Raise BadRecipe for what is wrong with the words of the command alone."""
    if prompt is None and not options["chat"]:
        raise BadRecipe("generate: there is no prompt", "add -p TEXT, or --chat for a conversation")
    if prompt is None and as_json:
        raise BadRecipe("--json: prints one answer, and there is no prompt", "add -p TEXT")
    if "" in options["stops"]:
        raise BadRecipe("--stop: an empty text is everywhere", "name the text to stop before")
    _require_utf8(prompt or "")
    if options["system"] is not None:
        _require_utf8(options["system"])
        if not options["chat"]:
            raise BadRecipe("--system: there is no chat to begin", "add --chat")


def _require_utf8(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python holds stray bytes
        raise BadRecipe("prompt: not UTF-8 text", "give the prompt in UTF-8")


def _begun(options: dict[str, Any]) -> list[dict[str, str]]:
    """The messages of a chat before the user's first."""
    return [] if options["system"] is None else [{"role": "system", "content": options["system"]}]


def _prompt(dialogue: Dialogue, prompt: str, options: dict[str, Any]) -> list[int]:
    text = prompt
    if prompt == "-":
        text = sys.stdin.read().removesuffix("\n")
        _require_utf8(text)
    if not options["chat"]:
        return dialogue.encode(text)
    return dialogue.encode_chat([*_begun(options), {"role": "user", "content": text}])


def _show(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


def _say(prompt_tokens: int, count: int, clock: _Clock) -> None:
    rates = clock.figures(prompt_tokens)
    said = [
        f"{tokens} {what}" + (f" at {rate:.1f} tokens/s" if rate else "")
        for tokens, what, rate in (
            (prompt_tokens, "tokens of prompt", rates["prompt_tokens_per_second"]),
            (count, "generated", rates["tokens_per_second"]),
        )
    ]
    click.echo(", ".join(said), err=True)
