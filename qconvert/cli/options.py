"""Options that several commands share, declared once so that their names and help agree."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qconvert.cli import candidates
from qconvert.cli.launchers import rank_option
from qconvert.core.scheme_names import bits_in, named_scheme, unwritten
from qconvert.core.schemes import is_integers
from qconvert.core.sizes import parse_size
from qconvert.errors import BadUsage

F = TypeVar("F", bound=Callable[..., Any])
DTYPES = ("bf16", "f16", "f32")
DEFAULT_MAX_MEMORY = "1GB"
DEFAULT_SHARD_SIZE = "5GB"
ALL = "all"
CONNECTIONS, PATIENCE = 16, 600  # those of checkpoint.network, which is not imported for a help page


class SizeType(click.ParamType):  # type: ignore[type-arg]  # no generic class before click 8.4
    """A number of bytes written like 500MB, 5GB or 2GiB."""

    name = "size"

    def __init__(self, least: str = "0B") -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            nbytes = parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if nbytes < parse_size(self.least):
            self.fail(f"{value} is too little; at least {self.least}", param, ctx)
        return nbytes


class NearestChoice(click.Choice):  # type: ignore[type-arg]  # no generic class before click 8.2
    """One of a few words; an error has the nearest of them, whatever its case."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            from difflib import get_close_matches

            near = get_close_matches(str(value).lower(), list(self.choices), n=1)
            if not near:
                raise
            said = f"{error.message.rstrip('.')}; did you mean {near[0]!r}?"
            raise click.BadParameter(said, ctx, param) from None


class TokensType(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens written like 4096, 32k or 1M (k is 1,024), or `all`: None, as many as there are."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([1-9]\d{0,11})([kKmM]?)", str(value))
        if match is None and value != ALL:
            self.fail(f"{value!r} is not a number of tokens; write 4096, 32k, 1M or {ALL}", param, ctx)
        return None if match is None else int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


class ShareType(click.ParamType):  # type: ignore[type-arg]
    """A share of 0 or more, written 0.05 or 5%."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        with contextlib.suppress(ValueError):
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
            if 0 <= share < math.inf:
                return share
        self.fail(f"{value!r} is not a share; write 0.05 or 5%", param, ctx)


class DeviceType(click.ParamType):  # type: ignore[type-arg]
    """The name of a device to compute on; whether it is there is found out later."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
            self.fail(f"{value!r} is not a device; write cpu, cuda or cuda:1", param, ctx)
        return str(value)


class BitsType(click.ParamType):  # type: ignore[type-arg]
    """A number of bits from 2 to 8; of another word, the error says what to type."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not re.fullmatch(r"[-+\d.]+", text):
            number, other, option = bits_in(text), unwritten(text), f"--bits {text}"
            if number:
                raise BadUsage(f"{option}: not a number from 2 to 8", f"--bits {number}")
            if named_scheme(text) or is_integers(text):
                raise BadUsage(f"{option}: a scheme, not a number from 2 to 8", f"--scheme {text}")
            if other:
                raise BadUsage(f"{option}: not a number from 2 to 8; {other.fact}", other.hint)
            self.fail(f"{value!r} is not a number from 2 to 8", param, ctx)
        return int(click.IntRange(2, 8).convert(value, param, ctx))


SIZE = SizeType(least="1KB")
MEMORY = SizeType(least="1MB")


def available_cores() -> int:
    """The number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def examples(*lines: str) -> str:
    """The end of a help page: commands as they may be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def model_argument(name: str = "model") -> Callable[[F], F]:
    """A positional argument that takes a local folder or a Hub id."""
    return click.argument(name, metavar=name.upper(), shell_complete=candidates.models)


def models_argument(metavar: str = "MODEL...", *, required: bool = True) -> Callable[[F], F]:
    """A positional argument that takes several local folders or Hub ids."""
    return click.argument(
        "models", metavar=metavar, nargs=-1, required=required, shell_complete=candidates.models
    )


def _silencing(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """The value; if it is true, the bars of huggingface_hub are switched off, too."""
    if value:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # which is read when it is imported
    return value


revision_option = click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub model.")
json_option = click.option(
    "--json", "as_json", is_flag=True, callback=_silencing, help="Print one JSON object on stdout."
)


def quiet_option(product: str) -> Callable[[F], F]:
    """-q of a command whose stdout then holds `product` alone: messages go, warnings and errors stay."""
    return click.option(
        "-q", "--quiet", is_flag=True, callback=_silencing, help=f"Hide messages: print {product}."
    )


unknown_option = click.option(
    "--allow-unknown",
    is_flag=True,
    help="Copy unknown tensors, and guess which tensors of an unknown model are linears.",
)
device_option = click.option(
    "--device",
    type=DeviceType(),
    default="cpu",
    show_default=True,
    help="Where to compute: cpu, cuda, cuda:1.",
)


def activations_option(default: str) -> Callable[[F], F]:
    """Whether inputs of linears are rounded, as loaders do or for speed."""
    return click.option(
        "--activations",
        type=click.Choice(["as-loaded", "exact", "int8"]),
        default=default,
        show_default=True,
        help="Inputs of linears: rounded as loaders do for this checkpoint (W8A8, W4A4), exact, or for fast "
        "reading on a CPU rounded to 8 bits per 32 columns where weights are quantized.",
    )


dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="Type of plain float tensors and of scales in the output."
)

pad_option = click.option(
    "--pad-to-tp",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Pad the MLPs with zeros so that each of N ranks holds whole groups.",
)

only_option = click.option(
    "--only",
    type=click.Choice(["qkv", "gate_up", "experts"]),
    help="Only these linears, or stacks of experts.",
)
statistics_option = click.option(
    "--calibration",
    "--imatrix",
    "statistics",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Weigh errors by statistics of `qconvert calibrate`, or an importance matrix (GGUF or .dat).",
)

# What every command that writes takes, in the order of its help page: what becomes of the output, how the
# work is done, and what is let pass.
STORES = ("s3", "gs", "az")
out_option = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    show_default="derived",
    help="Output folder, or s3://, gs://, az:// address; of several models, the folder of their outputs.",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an earlier output of qconvert.")
skip_option = click.option(
    "--skip-existing",
    is_flag=True,
    help="Leave an output that is there and complete, of the same recipe and source; its own weights are "
    "not read. With --overwrite, one that is cut or another is written again.",
)
verify_existing_option = click.option(
    "--verify-existing",
    is_flag=True,
    help="As --skip-existing, and read the output: it must have the SHA-256 that its manifest records.",
)
keep_going_option = click.option(
    "--keep-going",
    is_flag=True,
    help="Of several models, continue after one that fails; the exit code then says so.",
)
restart_option = click.option(
    "--restart", is_flag=True, help="Discard the work of an interrupted run, instead of resuming it."
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print what would be written, and write nothing."
)
written_option = quiet_option("only the path of the output")
events_option = click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Append what happens to a file as JSON lines: start, progress with the time left, files, end.",
)
verify_option = click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Re-read and hash the output before it gets its final name.",
)
jobs_option = click.option(
    "-j", "--jobs", type=click.IntRange(1, 256), metavar="N", show_default="all cores", help="Threads."
)

memory_option = click.option(
    "--max-memory",
    type=MEMORY,
    show_default=f"{DEFAULT_MAX_MEMORY} to work in",
    help="Most memory that the process takes, such as 500MB or 2GiB; what needs more is refused.",
)
process_memory_option = click.option(
    "--max-memory",
    type=MEMORY,
    show_default="most of what is free",
    help="Memory of the process, such as 2GB; a model that needs more is refused.",
)
nonfinite_option = click.option(
    "--allow-nonfinite", is_flag=True, help="Convert NaN and Inf instead of stopping."
)

_HUB = (
    revision_option,
    click.option(
        "--keep-source",
        is_flag=True,
        help="Download a Hub model into the cache first; otherwise only what is needed is read.",
    ),
    click.option(
        "--connections",
        type=click.IntRange(1, 256),
        default=CONNECTIONS,
        show_default=True,
        metavar="N",
        help="Connections to read a Hub model with.",
    ),
    click.option(
        "--patience",
        type=click.IntRange(1),
        default=PATIENCE,
        show_default=True,
        metavar="SECONDS",
        help="How long the Hub may send nothing; what was done by then is kept.",
    ),
)

_PUSHING = (
    click.option(
        "--push-to",
        metavar="ORG/NAME[@BRANCH]",
        help="Send the output to a repository on the Hub: file by file, made visible by one commit.",
    ),
    click.option("--private", is_flag=True, help="Create that repository as a private one."),
    click.option(
        "--drop-pushed",
        is_flag=True,
        help="Keep no local output: at most two of its weight files are on the disk at a time.",
    ),
)

_WRITING = (
    out_option,
    overwrite_option,
    skip_option,
    verify_existing_option,
    keep_going_option,
    restart_option,
    dry_run_option,
    json_option,
    written_option,
    events_option,
    verify_option,
    jobs_option,
    rank_option,
    memory_option,
    click.option(
        "--shard-size",
        type=SIZE,
        default=DEFAULT_SHARD_SIZE,
        show_default=True,
        help="Largest weight file, such as 500MB or 2GiB.",
    ),
    click.option(
        "--hash-sources", is_flag=True, help="Record the SHA-256 of whole source files in the manifest."
    ),
    dtype_option,
    *_HUB,
    *_PUSHING,
    unknown_option,
    nonfinite_option,
)


def url_of(path: Path) -> str | None:
    """The address in an object storage that was given as a path, which has folded its two slashes."""
    scheme, colon, rest = path.as_posix().partition(":/")
    return f"{scheme}://{rest}" if colon and scheme in STORES and rest else None


def writing_options(command: F) -> F:
    """Add the options that every writing command takes."""
    return _with(_WRITING, command)


def hub_options(command: F) -> F:
    """Add the options on how a Hub model is read."""
    return _with(_HUB, command)


def pushing_options(command: F) -> F:
    """Add the options on where an output is sent."""
    return _with(_PUSHING, command)


def _with(options: Sequence[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
