"""Runs `qconvert completion`: the script by which a shell completes its words."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from qconvert.cli.options import examples

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    epilog=examples(
        "qconvert completion bash >> ~/.bashrc",
        "qconvert completion zsh >> ~/.zshrc",
        "qconvert completion fish > ~/.config/fish/completions/qconvert.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script that makes SHELL complete commands, options, models, types and schemes.

    Models are those in folders, GGUF files, and what the Hub's cache has. Start a new shell afterwards.
    """
    from qconvert.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    # Not its own `source`, which asks the shell's version by starting it.
    click.echo(ShellComplete.source(kind(cli, {}, "qconvert", "_QCONVERT_COMPLETE")))
