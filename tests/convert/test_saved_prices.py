"""Prices in a file: many targets cost one run of the text, and outputs stay what they are without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.support.commands import made, qconvert
from tests.support.models import tiny

SCHEMES = ("--schemes", "int3-g64,int4-g64,int8-g64")
TYPES = ("--types", "q4_0,q5_0,q8_0")
READ = ("--text", "text.txt", "--tokens", 512, "--window", 64, "-j", 2)


@pytest.fixture
def model(here: Path) -> Path:
    """Two layers of an untied Llama, and a text beside it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (here / "text.txt").write_text("A text of many words, which nobody needs to understand. " * 40)
    return tiny(here / "model", "llama", tied=False, max_position_embeddings=128, **sizes)


def planned(*words: object) -> Any:
    """What a dry run says of its target."""
    ran = qconvert(*words, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    return ran.json["target"]


def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qconvert.calibrate.measure_sensitivity.sensitivities_of", None)


@pytest.mark.parametrize(
    ("command", "choices", "first", "second"),
    [("quantize", SCHEMES, "6.5bpw", "9bpw"), ("to-gguf", TYPES, "4.9bpw", "6bpw")],
)
@pytest.mark.parametrize("method", ["nearest", "feedback"])
def test_a_second_target_runs_no_text_and_writes_the_same_bytes(
    command: str, choices: tuple[str, str], first: str, second: str, method: str, model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    suffix = ".gguf" if command == "to-gguf" else ""
    asked = (command, model, *READ, *choices, "--method", method, "--target-size")
    want = planned(*asked, second)
    made(*asked, second, "-o", f"plain{suffix}")
    kept = ("--prices", "prices.safetensors")
    assert planned(*asked, first, *kept) == planned(*asked, first)
    never_run(monkeypatch)
    assert planned(*asked, second, *kept) == want
    assert planned(*asked, first, *kept)["expected_kl"] > want["expected_kl"]
    made(*asked, second, *kept, "-o", f"same{suffix}")
    files = [
        path for path in (Path(f"plain{suffix}"), *Path("plain").glob("*.safetensors")) if path.is_file()
    ]
    assert files
    for path in files:
        assert path.read_bytes() == Path(str(path).replace("plain", "same", 1)).read_bytes()
    told = qconvert(*asked, second, *kept, "--dry-run").out
    assert f"prices of {choices[1].replace(',', ', ')} are those in prices.safetensors" in told


def test_an_encoding_more_is_priced_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("quantize", model, *READ, "--target-size", "8bpw", "--schemes")
    fewer, all_of = "int3-g64,int8-g64", "int3-g64,int4-g64,int8-g64"
    want = planned(*asked, all_of)
    planned(*asked, fewer, "--prices", "prices.safetensors")
    before = safetensors.numpy.load_file("prices.safetensors")
    found = planned(*asked, all_of, "--prices", "prices.safetensors")
    assert found == want
    after = safetensors.numpy.load_file("prices.safetensors")
    assert len(after) == len(before) + 1
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    never_run(monkeypatch)
    assert planned(*asked, all_of, "--prices", "prices.safetensors") == want


def changed(path: Path, what: str) -> None:
    """Spoil the file in one respect."""
    with safetensors.safe_open(path, "np") as file:
        metadata = dict(file.metadata())
    arrays = safetensors.numpy.load_file(path)
    name = next(name for name in arrays if name.startswith("prices.") == (what != "squares"))
    if what == "short":
        arrays[name] = arrays[name][:-1]
    elif what == "version":
        metadata["of"] = json.dumps(json.loads(metadata["of"]) | {"version": "0.0.1, numerics 1"})
    elif what == "format":
        metadata["format"] = "other"
    else:
        arrays[name] = -arrays[name] - 1
    safetensors.numpy.save_file(arrays, path, metadata)


@pytest.mark.parametrize(
    ("what", "fact"),
    [
        ("short", "prices.safetensors: prices."),
        ("negative", "has numbers below 0"),
        ("squares", "has numbers below 0"),
        ("version", "holds prices of another version (0.0.1, numerics 1)"),
        ("format", "prices.safetensors: is other 1, not qconvert-prices 1"),
        ("text", "holds prices of another text"),
        ("method", "holds prices of another method (nearest)"),
        ("model", "holds prices of another model"),
        ("calibration", "--prices: with --calibration"),
        ("folder", "there is no folder nowhere"),
    ],
)
def test_prices_of_something_else_are_refused(what: str, fact: str, model: Path) -> None:
    words: list[object] = ["quantize", model, *READ, *SCHEMES, "--target-size", "8bpw"]
    kept: tuple[object, ...] = ("--prices", "prices.safetensors")
    planned(*words, *kept)
    if what == "text":
        Path("text.txt").write_text("Another text that nobody understands, of words, and longer. " * 40)
    elif what == "method":
        words += ["--method", "feedback"]
    elif what == "model":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        more = {"max_position_embeddings": 128, "seed": 1}
        words[1] = tiny(Path("other").absolute(), "llama", tied=False, **more, **sizes)
    elif what == "calibration":
        made("calibrate", model, *READ[:-2], "-o", "stats")
        words += ["--calibration", "stats"]
    elif what == "folder":
        kept = ("--prices", "nowhere/prices.safetensors")
    else:
        changed(Path("prices.safetensors"), what)
    ran = qconvert(*words, *kept, "--dry-run")
    assert ran.code == 1 and not ran.out and ran.err.startswith("Error: ") and "Hint: " in ran.err, ran
    assert fact in ran.err


def test_prices_need_a_target(model: Path) -> None:
    ran = qconvert("quantize", model, "--bits", 4, "--prices", "prices.safetensors")
    assert ran.code == 2 and "--prices: given without a target" in ran.err
