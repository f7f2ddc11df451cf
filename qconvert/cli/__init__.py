"""Words: the `qconvert` command. Parses flags, calls the library, prints; nothing else.

stdout carries data, stderr carries talk. Exit codes: 0 done, 1 failed, 2 usage, 3 a check failed,
130 interrupted.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from qconvert import __version__
from qconvert.cli.boundary import report_errors

# Command name -> module that defines it under `command`; the order is the order of the help page.
COMMANDS = {
    "inspect": "qconvert.cli.inspect",
    "quantize": "qconvert.cli.quantize",
    "fuse-qkv": "qconvert.cli.rearrange:fuse_qkv",
    "fuse": "qconvert.cli.rearrange:fuse",
    "unfuse": "qconvert.cli.rearrange:unfuse",
    "tie": "qconvert.cli.rearrange:tie",
    "untie": "qconvert.cli.rearrange:untie",
    "dequantize": "qconvert.cli.rearrange:dequantize",
    "convert": "qconvert.cli.convert_command",
    "to-gguf": "qconvert.cli.gguf",
    "from-gguf": "qconvert.cli.from_gguf",
    "check": "qconvert.cli.lint_command",
    "verify": "qconvert.cli.check:verify",
    "diff": "qconvert.cli.check:diff",
    "generate": "qconvert.cli.generate",
    "eval": "qconvert.cli.evaluate",
    "demo": "qconvert.cli.demo",
    "env": "qconvert.cli.env",
}


class Commands(click.Group):
    """The command group: each command's module is imported when the command is used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

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
)
@click.version_option(__version__, prog_name="qconvert")
def cli() -> None:
    """Any language-model checkpoint in, any quantized checkpoint out.

    MODEL is a local folder, a Hugging Face Hub id (org/name[@revision]), or `embedded` for the small
    model that comes with qconvert. Nothing from a checkpoint is ever executed.
    """


def main(args: list[str] | None = None, **extra: Any) -> None:
    """The entry point of the console script."""
    report_errors(cli, args, **extra)
