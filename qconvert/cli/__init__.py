"""Runs the `qconvert` command: parses flags, calls the library, prints; nothing else.

Results go to stdout, messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong command line,
3 a check failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from qconvert.cli.exit_codes import report_errors
from qconvert.cli.options import examples
from qconvert.core.version import __version__
from qconvert.core.waiting_threads import leave_cores_to_others
from qconvert.errors import BadUsage

# In the order of the help page, which is printed without importing any of them.
COMMANDS: Mapping[str, str] = {
    "inspect": "Show parameters by role, ties, fusions and quantization.",
    "calibrate": "Measure the inputs of linears, to weigh errors by them.",
    "quantize": "Quantize the linears to 2 to 8 bits, by groups.",
    "fuse-qkv": "Stack q, k, v into one linear, exactly.",
    "fuse": "Stack q, k, v and gate, up, or experts, exactly.",
    "unfuse": "Take fused linears apart again, exactly.",
    "tie": "Drop a head that equals the embedding.",
    "untie": "Store a tied head as a tensor of its own.",
    "merge": "Merge a LoRA adapter into its base model.",
    "dequantize": "Turn quantized weights back into plain numbers.",
    "convert": "Write another layout, with the codes kept.",
    "to-gguf": "Write a GGUF file of any llama.cpp type, in one step.",
    "from-gguf": "Turn a GGUF model back into safetensors, config, tokenizer.",
    "check": "Ask whether a loader can load a checkpoint.",
    "verify": "Check that a checkpoint holds what it promises.",
    "diff": "Show what differs between two checkpoints.",
    "generate": "Continue a prompt with a checkpoint.",
    "eval": "Measure what quantization costs in quality.",
    "bench": "Time reading and generating with the decoder.",
    "demo": "Run the main commands on the embedded model.",
    "completion": "Print the script that completes words in a shell.",
    "env": "Show versions and backends, for bug reports.",
}


class Commands(click.Group):
    """The command group: a command's module is imported when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "help":
            return _HELP
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"qconvert.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, does) for name, does in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and keep the words as they were typed: records of runs have them (`ctx.obj`)."""
        ctx.obj = ("qconvert", *args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            from qconvert.cli.other_tools import here

            if said := here(args[0]):
                raise BadUsage(f"No such command {args[0]!r}", said) from None
            near = get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.format_message()} Did you mean {near[0]!r}?", ctx) from None


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "QCONVERT",
        "max_content_width": 100,
    },
    epilog=examples("qconvert inspect embedded", "qconvert quantize --help"),
)
@click.version_option(__version__, "-V", "--version", prog_name="qconvert")
def cli() -> None:
    """Any language-model checkpoint in, any quantized checkpoint out.

    MODEL is a local folder, a Hugging Face Hub id (org/name[@revision]), or `embedded` for the small
    model that comes with qconvert. Nothing from a checkpoint is ever executed.

    Results go to stdout, messages to stderr; -q hides the messages. Exit codes: 0 done, 1 failed,
    2 wrong command line, 3 a check failed, 130 interrupted, 143 terminated.
    """


@click.command("help", hidden=True)
@click.argument("command", nargs=-1)
@click.pass_context
def _HELP(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the help page of a command, as `qconvert COMMAND --help` does."""
    assert context.parent is not None
    cli.main([*command, "--help"], prog_name=context.parent.command_path, standalone_mode=False)


def main(args: list[str] | None = None, **extra: Any) -> None:
    """The entry point of the console script."""
    leave_cores_to_others()
    report_errors(cli, args, **extra)
