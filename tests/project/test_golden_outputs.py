"""What commands write is what they wrote when tests/golden_outputs.json was recorded.

A difference that is meant is recorded by `python -m tests.golden_commands --record`.
"""

from __future__ import annotations

import json

import pytest

from tests.golden_commands import COMMANDS, RECORDED, read_records
from tests.golden_runs import Runs, differences, needs_assets


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The commands of this process: a source is made when the first command asks for it."""
    root = tmp_path_factory.mktemp("golden")
    return Runs(root / "root", COMMANDS, texts=root / "texts")


@pytest.mark.parametrize("name", COMMANDS)
def test_output(name: str, runs: Runs, request: pytest.FixtureRequest) -> None:
    if needs_assets(name, COMMANDS):
        request.getfixturevalue("assets")
    now, command = runs.record(name), COMMANDS[name]
    if name not in read_records():
        pytest.fail(f"{name}: not recorded; python -m tests.golden_commands --record {name}", pytrace=False)
    assert runs.texts is not None
    if found := differences(read_records()[name], now, runs.texts / name):
        said = [f"qconvert {' '.join(command.words)}", f"(in {runs.root / 'runs' / name})", *found]
        pytest.fail("\n".join(said), pytrace=False)
    assert now["code"] == command.code


def test_every_command_is_recorded_as_it_stands() -> None:
    recorded = {name: record["line"] for name, record in read_records().items()}
    assert recorded == {name: command.line for name, command in COMMANDS.items()}


def test_the_record_is_in_order() -> None:
    records = read_records()
    text = json.dumps(records, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert RECORDED.read_text(encoding="utf-8") == text


def test_most_commands_need_no_fixtures() -> None:
    assert sum(not needs_assets(name, COMMANDS) for name in COMMANDS) >= 90
