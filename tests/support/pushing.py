"""Runs commands that send models to the local Hub of the tests."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint import network
from tests.support.fake_hub import FakeHub, known, running

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "num_hidden_layers": 2}
QUANTIZE = ("quantize", "m", "--bits", 4, "--group-size", 32, "--min-max", "-j", 2, "--shard-size", "150KB")
PUSH = (*QUANTIZE, "-o", "out", "--push-to", "org/new")
TOKEN = "hf_verysecrettokenverysecret"
DROPS = pytest.mark.parametrize("drop", [(), ("--drop-pushed",)], ids=["kept", "dropped"])


@contextmanager
def writable_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that can be written, without xet and without waiting between attempts."""
    from huggingface_hub import constants

    monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Its address says http: to read the authorities of a client that is made took a tenth of a fork's time.
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *files, **named: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running() as fake, known(fake, cache):
        yield fake


def pushed(hub: FakeHub, repo: str = "org/new", branch: str = "main") -> dict[str, bytes]:
    """The files that are visible, but for those of the Hub itself."""
    found = hub.repos[repo] if branch == "main" else hub.written.branches[repo, branch]
    return {name: blob for name, blob in sorted(found.items()) if name != ".gitattributes"}


def uploads(hub: FakeHub) -> list[str]:
    return [asked.path for asked in hub.log if asked.method == "PUT" and asked.status == 200]


def counted(hub: FakeHub) -> tuple[int, int]:
    """How many files were uploaded so far, and how many commits main has."""
    return len(uploads(hub)), sum(ref == "main" for _, ref, _ in hub.written.commits)


def answering(status: int, message: str = "", headers: dict[str, str] | None = None) -> Any:
    body = json.dumps({"error": message}).encode()
    return status, {"Content-Type": "application/json", **(headers or {})}, body
