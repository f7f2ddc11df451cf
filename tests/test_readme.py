"""Every console block in README.md prints what it says it prints."""

from __future__ import annotations

from pathlib import Path

from tests.readme import README, blocks, comparable, transcript


def test_console_blocks_are_real_output(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    found = list(blocks(text))
    assert len(found) >= 8, "README.md shows too few commands"
    for block in found:
        printed = transcript(block, tmp_path)
        assert comparable(block, printed) == comparable(block, block.body), block.commands


def test_every_command_is_shown() -> None:
    from qconvert.cli import COMMANDS

    shown = {
        command.split()[1]
        for block in blocks(README.read_text(encoding="utf-8"))
        for command in block.commands
    }
    assert shown >= set(COMMANDS), f"README.md does not show {sorted(set(COMMANDS) - shown)}"
