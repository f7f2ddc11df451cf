"""Every console block in README.md and docs/ prints what it says it prints, and the pages make a site."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES, README, ROOT, blocks, comparable, transcript, with_adapter
from tests.support.warm_commands import warm_qconvert

WITH_BLOCKS = [name for name, page in PAGES.items() if any(blocks(page.read_text(encoding="utf-8")))]


@pytest.fixture(scope="module")
def warm() -> Iterator[Path]:
    with warm_qconvert() as folder:
        yield folder


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_console_blocks_are_real_output(name: str, warm: Path, tmp_path: Path) -> None:
    with_adapter(tmp_path)
    for block in blocks(PAGES[name].read_text(encoding="utf-8")):
        printed = transcript(block, tmp_path, warm)
        assert comparable(block, printed) == comparable(block, block.body), block.commands


def test_every_command_is_shown() -> None:
    from qconvert.cli import COMMANDS

    shown = {
        word
        for name in WITH_BLOCKS
        for block in blocks(PAGES[name].read_text(encoding="utf-8"))
        for command in block.commands
        for word in re.findall(r"qconvert ([a-z-]+)", command)
    }
    assert shown >= set(COMMANDS), f"no page shows {sorted(set(COMMANDS) - shown)}"


def test_readme_is_one_short_page() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", f"{tmp_path}/site"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "qconvert to-gguf" in commands and "--split-max-size" in commands
