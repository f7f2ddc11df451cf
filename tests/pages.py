"""The console blocks of README.md and docs/: runs them, compares them, and rewrites them when asked.

`python -m tests.pages [PAGE...]` replaces every output in the pages with what the commands print now.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qconvert.cli.progress import COMPILING
from tests.support.adapters import lora_arrays, write_peft
from tests.support.warm_commands import warm_qconvert

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = {str(page.relative_to(ROOT)): page for page in (README, *sorted(ROOT.glob("docs/**/*.md")))}
"""Every page, by its path."""
_BLOCK = re.compile(r"```console\n(?P<body>\$ [^\n]*qconvert .*?)```", re.DOTALL)
ADAPTED = (("q_proj", (256, 256)), ("v_proj", (128, 256)))
"""Linears of the embedded model, and their shapes."""
# Commands whose figures depend on the machine or on its Python version.
_VARIABLE = ("eval", "demo", "bench")


@dataclass(frozen=True)
class Block:
    """One console block: the commands in it and all they print, in order."""

    commands: tuple[str, ...]
    body: str


def blocks(text: str) -> Iterator[Block]:
    """The console blocks that run qconvert."""
    for match in _BLOCK.finditer(text):
        lines = match["body"].splitlines()
        yield Block(tuple(line[2:] for line in lines if line.startswith("$ ")), match["body"])


def with_adapter(folder: Path) -> Path:
    """The folder, with the adapter `my-lora` of the embedded model that some pages convert."""
    modules = {
        f"model.layers.{layer}.self_attn.{name}": shape for layer in range(4) for name, shape in ADAPTED
    }
    write_peft(folder / "my-lora", lora_arrays(modules, 16), "embedded", rank=16, alpha=32)
    return folder


def transcript(block: Block, folder: Path, warm: Path) -> str:
    """What a terminal shows when the block's commands run in `folder`, stdout and stderr together.

    They find the `qconvert` of `warm_qconvert` in `warm`, unless they are about the memory of a process.
    """
    shown = []
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in block.commands:
        path = python if "--max-memory" in command else f"{warm}:{python}"
        done = subprocess.run(
            ["sh", "-c", f"( {command} ) 2>&1"],
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = "Error: " in done.stdout
        assert (done.returncode != 0) == failed, f"{command}: exit code {done.returncode}\n{done.stdout}"
        shown.append(f"$ {command}\n{done.stdout}")
    return "".join(shown)


def comparable(block: Block, text: str) -> str:
    """The text without what differs between machines and between first and later runs."""
    text = text.replace(f"{COMPILING}\n", "")
    text = re.sub(r"\d+\.\d s\b", "# s", text)
    text = re.sub(r"(error|tokens|->) 0\.\d+", r"\g<1> #", text)  # of sums that processors round differently
    names = {command.split()[1] for command in block.commands}
    text = re.sub(r"\d[\d,]*\.\d tokens/s", "# tokens/s", text)
    if "env" in names:  # what is installed differs; what is told about it does not
        return "\n".join(line.partition(" ")[0] for line in text.splitlines())
    if names & set(_VARIABLE):
        text = re.sub(r"[0-9a-f]{12,}", "#", text)
        text = re.sub(r"\d[\d.,e-]*", "#", text)
        text = re.sub(r"(?m)^environment .*$|^arithmetic .*$", "", text)
        text = re.sub(r" +", " ", text)
    return text


def rewrite(page: Path, warm: Path) -> None:
    """Run every block of a page in one folder and put what it printed into the page."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        with_adapter(Path(folder))
        for block in list(blocks(text)):
            printed = transcript(block, Path(folder), warm).replace(f"{COMPILING}\n", "")
            text = text.replace(block.body, printed)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    with warm_qconvert() as found:
        for name in sys.argv[1:] or PAGES:
            rewrite(PAGES[name], found)
