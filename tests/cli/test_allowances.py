"""What is refused until it is asked for, and then let pass, by every command that writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.commands import made, qconvert, strict_json
from tests.support.models import tiny

Q = "model.layers.0.self_attn.q_proj.weight"


def edited(source: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of a model in which the first number of an array is another."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "qconvert.json").unlink(missing_ok=True)
    arrays = load_file(source / "model.safetensors")
    arrays[name].view(-1)[0] = value
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with one NaN, in a weight and in a scale, and one with a scale near 0."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    plain = tiny(root / "sound", **sizes)
    four = made("quantize", plain, "--scheme", "int4-g32", "-o", root / "sound-int4")
    edited(plain, root / "nan", Q, np.nan)
    edited(four, root / "nan-int4", f"{Q}_scale", np.nan)
    edited(four, root / "tiny-int4", f"{Q}_scale", 1e-9)
    made("fuse", root / "nan", "-o", root / "nan-fused", "--allow-nonfinite")
    made("untie", plain, "-o", root / "sound-untied")
    edited(root / "sound-untied", root / "nan-untied", Q, np.nan)
    made("to-gguf", root / "nan", "--type", "f16", "-o", root / "nan.gguf", "--allow-nonfinite")
    return root


NONFINITE = [
    "quantize nan --scheme int8-channel",
    "quantize nan --bits 4 --group-size 32 --layout gptq",
    "fuse nan",
    "fuse-qkv nan",
    "unfuse nan-fused",
    "tie nan-untied",
    "untie nan",
    "dequantize nan-int4",
    "convert nan --to bf16",
    "convert nan --to gguf",
    "convert nan --to gguf --scheme q8_0",
    "convert nan --to bitsandbytes",
    "convert nan-int4 --to gptq",
    "convert nan-int4 --to gguf",
    "from-gguf nan.gguf",
    "to-gguf nan --type f16",
    "to-gguf nan --type q8_0",
    "to-gguf nan --type q4_0",
    "to-gguf nan --type q5_1",
    "to-gguf nan --type iq4_nl",
    "to-gguf nan-int4 --type keep",
]
REQUANTIZED = [
    "convert tiny-int4 --to gptq",
    "convert tiny-int4 --to gguf",
    "to-gguf tiny-int4 --type keep",
]


@pytest.mark.parametrize(
    ("command", "flag", "refusal"),
    [(command, "--allow-nonfinite", "NaN or Inf") for command in NONFINITE]
    + [(command, "--allow-requantize", "move a weight by") for command in REQUANTIZED],
)
def test_every_command_lets_pass_what_it_is_told_to(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, flag: str, refusal: str
) -> None:
    monkeypatch.chdir(models)
    out = tmp_path / ("m.gguf" if "to gguf" in command or "to-gguf" in command else "out")
    words = [*command.split(), "-o", out]
    refused = qconvert(*words)
    assert refused.code == 1 and refusal in refused.err and flag in refused.err, refused.err
    assert not list(tmp_path.iterdir())
    passed = qconvert(*words, flag, "--json")
    assert passed.code == 0 and passed.json["dry_run"] is False, passed.err
    assert list(tmp_path.iterdir()) == [out]
    if out.is_dir():
        strict_json((out / "qconvert.json").read_text())
