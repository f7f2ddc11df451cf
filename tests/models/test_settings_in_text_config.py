"""Models that read pictures and keep their quantization settings in `text_config`, as Kimi-K2.5 does.

The settings are those of a model that has them on top: every command sees them, and what is written has them
on top alone, where transformers looks and vLLM looks first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gguf.test_gguf_vision import seeing
from tests.support.commands import made, qconvert
from tests.support.models import stored

KEY = "quantization_config"


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Kimi-K2.5 with int4 experts whose settings are on top, and the same with them in `text_config`."""
    folder = tmp_path_factory.mktemp("kimi")
    seeing(folder / "plain", "kimi-k2.5")
    top = made(
        "quantize", folder / "plain", "--bits", "4", "--group-size", "32", "-o", folder / "top" / "kimi"
    )
    within = folder / "within" / "kimi"
    within.mkdir(parents=True)
    for file in top.iterdir():
        if file.name != "qconvert.json":
            (within / file.name).write_bytes(file.read_bytes())
    config = config_of(top)
    config["text_config"][KEY] = config.pop(KEY)
    (within / "config.json").write_text(json.dumps(config))
    return top, within


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "--to", "gptq"),
        ("convert", "--to", "compressed-tensors"),
        ("dequantize",),
        ("to-gguf", "--type", "q8_0", "--allow-requantize"),
    ],
)
def test_outputs_are_those_of_settings_on_top(
    pair: tuple[Path, Path], tmp_path: Path, command: tuple[str, ...]
) -> None:
    name, *flags = command
    for each in ("top", "within"):
        (tmp_path / each).mkdir()
    made_name = "out.gguf" if name == "to-gguf" else "out"
    places = [tmp_path / each / made_name for each in ("top", "within")]
    outs = [made(name, folder, *flags, "-o", place) for folder, place in zip(pair, places, strict=True)]
    if name == "to-gguf":
        assert outs[0].read_bytes() == outs[1].read_bytes()
        return
    assert qconvert("verify", outs[1], "--against", pair[1]).code == 0
    assert stored(outs[0]) == stored(outs[1])
    assert config_of(outs[0]) == config_of(outs[1])
    assert KEY not in config_of(outs[1])["text_config"]
    assert (KEY in config_of(outs[1])) == (name == "convert")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("inspect",), "quantization: compressed-tensors (int4-g32"),
        (("check", "--for", "vllm"), "W4A16"),
        (("check", "--for", "transformers"), "reads compressed-tensors weights"),
    ],
)
def test_answers_are_those_of_settings_on_top(
    pair: tuple[Path, Path], command: tuple[str, ...], said: str
) -> None:
    found = []
    for folder in pair:
        ran = qconvert(command[0], folder, *command[1:])
        assert ran.code == 0 and said in ran.out
        found.append(ran.out.replace(str(folder), "MODEL"))
    assert found[0] == found[1]


def test_settings_on_top_count_where_both_are_there(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As in vLLM; none of the others stay behind in what is written."""
    top, _ = pair
    for file in top.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = config_of(top)
    config["text_config"][KEY] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = made("dequantize", tmp_path, "-o", tmp_path / "out")
    assert stored(out) == stored(made("dequantize", top, "-o", tmp_path / "other"))
    assert KEY not in config_of(out) and KEY not in config_of(out)["text_config"]
