"""Five thousand changed files, the same ones on every run; `make fuzz` reads a million others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.ggml_types import IN_MEMORY_ALONE
from qconvert.errors import QConvertError
from qconvert.formats.layouts import registry
from tests.fuzz import hunt as fuzz
from tests.fuzz.commands import folders, ggufs
from tests.fuzz.kinds import SIZES, Kind
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.support.commands import qconvert
from tests.support.process_memory import freed_memory_given_back

INPUTS = 5_000  # 250 of each of thirteen kinds; 1,000 and 750 of layouts and types of GGML


@pytest.fixture(autouse=True)
def _growth_is_seen() -> Iterator[None]:
    with freed_memory_given_back():
        yield


def test_no_changed_file_does_harm() -> None:
    """Our own errors alone, within 5 s and 500 MB."""
    harms = [f"{harm.kind} {harm.number}: {harm.why}" for harm in fuzz.hunt(INPUTS, seed=15)]
    assert not harms, "\n".join(harms)


def test_what_the_commands_are_given_is_sound_before_it_is_changed(tmp_path: Path) -> None:
    """Every layout and every type of GGML, but the ones that no file holds."""
    layouts = list(folders(tmp_path / "layouts", {**SIZES, "intermediate_size": 64}))
    assert {open_checkpoint(each, undecoded=True).layout.name for each in layouts} >= {
        *registry.written()
    } - {
        "int-quantized",
        "gptq_v2",
    }
    (tmp_path / "types").mkdir()
    refused = {path.stem for path in ggufs(tmp_path / "types") if qconvert("inspect", path).code}
    assert refused == {kind.name for kind in IN_MEMORY_ALONE}


def test_harm_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "BYTES", 50_000_000)
    (tmp_path / "f").write_bytes(b"sound")

    def endless(path: Path) -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    def large(path: Path) -> None:
        assert len(bytes(range(256)) * 1_000_000)

    def refuses(path: Path) -> None:
        raise QConvertError("fact", "hint")

    def told(read: object) -> str:
        found = Kind((tmp_path / "f",), changed_bytes, read)  # type: ignore[arg-type]
        monkeypatch.setattr("tests.fuzz.kinds.kinds", lambda folder: {"kind": found})
        return " ".join(harm.why for harm in fuzz.hunt(1, seed=0))

    assert "ran over 0.2 s" in told(endless)
    monkeypatch.setattr(fuzz, "SECONDS", 5.0)
    assert "grew by" in told(large)
    assert "ValueError" in told(lambda path: int("x"))
    assert told(refuses) == told(lambda path: None) == ""
    assert (tmp_path / "f").read_bytes() == b"sound"


def test_changes_are_the_same_for_a_seed_and_mostly_changes() -> None:
    raw = json.dumps({"a": [1, 2, {"b": "c"}], "d": None}).encode()
    for change in (changed_bytes, changed_json):
        made = [change(raw, random.Random(seed)) for seed in range(200)]
        assert made == [change(raw, random.Random(seed)) for seed in range(200)]
        assert len(set(made)) > 100
