"""Adapters on the Hub: the adapter is downloaded, its base is read by ranges while it is converted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qconvert.checkpoint import network
from tests.support.adapters import lora_arrays, write_peft
from tests.support.commands import made, qconvert
from tests.support.fake_hub import COMMIT, FakeHub, known, running
from tests.support.models import tiny

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000, "num_hidden_layers": 4}
MODULES = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(4)}
QUANTIZE = ("--bits", 4, "--group-size", 32, "--min-max", "-j", 2)


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
    base = tiny(here / "local" / "m", "qwen3", shards=4, **SIZES)
    lora = write_peft(here / "local" / "lora", lora_arrays(MODULES, 8), "org/m", rank=8)
    with running() as fake, known(fake, here / "cache"):
        fake.add("org/m", base)
        fake.add("me/lora", lora)
        yield fake


def test_base_and_adapter_are_found_on_the_hub(hub: FakeHub, here: Path) -> None:
    made("quantize", f"{here / 'local/m'}+{here / 'local/lora'}", *QUANTIZE, "-o", "local-int4")
    hub.log.clear()
    made("quantize", "me/lora", *QUANTIZE, "-o", "streamed")
    name = "model.safetensors"
    assert (here / "streamed" / name).read_bytes() == (here / "local-int4" / name).read_bytes()
    of_base = sum(len(blob) for file, blob in hub.repos["org/m"].items() if file.endswith(".safetensors"))
    of_lora = len(hub.repos["me/lora"]["adapter_model.safetensors"])
    assert of_base <= hub.sent() <= 1.02 * of_base + of_lora
    source = json.loads((here / "streamed" / "qconvert.json").read_text())["source"]
    assert (source["name"], source["base"]) == ("lora", "org/m")
    assert (source["repo_id"], source["commit"]) == ("org/m", COMMIT)
    card = (here / "streamed" / "README.md").read_text()
    assert "base_model: org/m" in card


def test_what_is_there_is_left_until_the_adapter_changes(hub: FakeHub, here: Path) -> None:
    lora = here / "local" / "lora"
    made("quantize", lora, *QUANTIZE, "-o", "out")
    assert qconvert("quantize", lora, *QUANTIZE, "-o", "out", "--skip-existing").code == 0
    write_peft(lora, lora_arrays(MODULES, 8, seed=1), "org/m", rank=8)
    ran = qconvert("quantize", lora, *QUANTIZE, "-o", "out", "--skip-existing")
    assert ran.code == 1 and "it was made with another adapter" in ran.err


def test_only_headers_of_the_base_are_fetched_for_a_dry_run(hub: FakeHub, here: Path) -> None:
    for words in (("quantize", "me/lora", *QUANTIZE, "--dry-run"), ("inspect", "org/m+me/lora")):
        hub.log.clear()
        made(*words)
        assert hub.sent() < 500_000
