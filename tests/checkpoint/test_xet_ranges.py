"""Weights that come through xet, by its own client, from a folder that stands for its servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qconvert.checkpoint import hub_ranges, network
from qconvert.errors import SourceUnavailable
from tests.support.commands import made, qconvert
from tests.support.fake_hub import Answer, FakeHub, known, running
from tests.support.models import tiny

pytest.importorskip("hf_xet")

GGUF = ("to-gguf", "org/m", "--type", "q8_0", "-j", 2)
FILE = "model.safetensors"


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
    with running() as fake, known(fake, here / "cache"):
        files = fake.add("org/m", tiny(here / "m", "qwen3"))
        fake.add_to_xet(FILE, files[FILE], here / "chunks")
        yield fake


def test_what_http_refuses_comes_through_xet(hub: FakeHub, here: Path) -> None:
    made(*GGUF, "-o", "by-http.gguf")
    assert hub.sent() > 0
    hub.log.clear()
    hub.fault = lambda number: Answer(400, body=b"too large")
    ran = qconvert(*GGUF, "-o", "by-xet.gguf", "--max-memory", "1MB")
    assert ran.code == 0, ran.err
    assert "refuses a new address too (HTTP 400: too large); reading through xet" in ran.err
    assert (here / "by-xet.gguf").read_bytes() == (here / "by-http.gguf").read_bytes()
    assert not [asked for asked in hub.log if asked.server == "cdn" and asked.status == 206]
    assert len([asked for asked in hub.log if "xet-read-token" in asked.path]) == 1


def test_files_that_are_too_large_for_http_are_not_asked_for_so(
    hub: FakeHub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_ranges, "LARGEST_BY_HTTP", 1000)
    made(*GGUF, "-o", "by-xet.gguf")
    assert not [asked for asked in hub.log if asked.server == "cdn"]


def test_where_xet_is_forbidden_the_refusal_stands(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.fault = lambda number: Answer(400, body=b"too large")
    ran = qconvert(*GGUF, "-o", "out.gguf")
    assert ran.code == 1
    assert "org/m/model.safetensors: refuses a new address too (HTTP 400: too large)" in ran.err


def test_a_stream_that_ends_early_is_an_error(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from qconvert.checkpoint.hub_file import HubFile
    from qconvert.checkpoint.xet_ranges import XetRanges

    hub.in_xet[FILE] = "1" * 64  # of which the folder has nothing
    file = HubFile("org/m", "main", FILE, network.Network(2, 1.0))
    with pytest.raises(SourceUnavailable, match=r"xet .*; no byte has come for 1 s"):
        XetRanges(file).read(memoryview(bytearray(100)), 0)
