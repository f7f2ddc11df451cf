"""Runs our commands as a user would type them, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import click

from qconvert.core.dtypes import Json


def qconvert(*words: object) -> Json:
    """Run a command with one thread; what it says as JSON. ClickException where it fails."""
    threads = () if words[0] == "calibrate" else ("-j", 1)
    command = [sys.executable, "-m", "qconvert", *map(str, (*words, "--json", *threads))]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode != 0:
        raise click.ClickException(f"{' '.join(command)}: {ran.stderr.strip()}")
    said: Json = json.loads(ran.stdout)
    return said
