"""Commands that several processes share, and what one process makes of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qconvert.formats.io import shared_folder
from tests.support.commands import made
from tests.support.crashes import tree
from tests.support.models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 500, "num_hidden_layers": 2}
QUANTIZE = ("quantize", "m", "--bits", 4, "--group-size", 32)
CONVERT = ("convert", "m", "--to", "compressed-tensors")
KINDS: dict[str, tuple[tuple[object, ...], str]] = {
    "shards": ((*QUANTIZE, "--shard-size", "20KB"), "out"),
    "one file": (QUANTIZE, "out"),
    "gptq": ((*QUANTIZE, "--layout", "gptq", "--shard-size", "20KB"), "out"),
    # Its weights share scales, across files.
    "nvfp4": (
        ("convert", "m", "--to", "compressed-tensors", "--scheme", "nvfp4", "--shard-size", "8KB"),
        "out",
    ),
    "gguf": (("to-gguf", "m", "--type", "q8_0"), "m.gguf"),
    "parts": (("to-gguf", "m", "--type", "q4_0", "--split-max-size", "20KB"), "m.gguf"),
}
HOW = ("-j", 1, "-q")


@contextmanager
def within(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def with_whole(root: Path, kinds: Collection[str]) -> Path:
    """The folder, with a model and what one process makes of it."""
    tiny(root / "m", "qwen3", **SIZES)
    with within(root):
        for kind in kinds:
            command, name = KINDS[kind]
            (root / "whole" / kind).mkdir(parents=True)
            made(*command, "-o", root / "whole" / kind / name)
    return root


def impatient(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the folder of the model: claims that are stale soon, and no process that waits for long."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(shared_folder, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(shared_folder, "TOUCH_SECONDS", 0.1)
    monkeypatch.setattr(shared_folder, "WAIT_SECONDS", (0.02, 0.1))
    yield
    shutil.rmtree(root / "made", ignore_errors=True)


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that is not touched is stale at once: of processes that work in turn, none is only slow."""
    monkeypatch.setattr(shared_folder, "STALE_SECONDS", 0.2)


def rank(kind: str, number: int, world: int) -> tuple[object, ...]:
    """The words of the command as one of several processes."""
    command, name = KINDS[kind]
    Path("made").mkdir(exist_ok=True)
    return (*command, *HOW, "--rank", f"{number}/{world}", "-o", f"made/{name}")


def same(kind: str) -> bool:
    """Whether what was made is what one process makes, and nothing else."""
    return tree(Path("made")) == tree(Path("whole") / kind)
