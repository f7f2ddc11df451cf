"""Names of schemes that other tools have: what `quantize` writes under them, and what it says of the rest."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

from qconvert.core.scheme_names import WRITTEN
from tests.support.commands import made, qconvert
from tests.support.models import tiny

COMPARED = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
PRESETS = [name for name in WRITTEN if name not in ("nf4", "fp4")]


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("named") / "m", intermediate_size=384)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_compressed_tensors_means_by_it(model: Path, tmp_path: Path, name: str) -> None:
    """Bits, type, groups and what happens to inputs; not the observer, which is how scales were found."""
    out = made("quantize", model, "--scheme", name, "-o", tmp_path / "q")
    settings = config(out)["quantization_config"]
    (group,) = QuantizationConfig.model_validate(settings).config_groups.values()
    preset = preset_name_to_scheme(name, ["Linear"])
    for own, theirs in ((group.weights, preset.weights), (group.input_activations, preset.input_activations)):
        assert (own is None) == (theirs is None), name
        if own is not None and theirs is not None:
            for field in COMPARED:
                assert getattr(own, field) == getattr(theirs, field), (name, field)


@pytest.mark.parametrize("name", ["nf4", "NF4", "fp4"])
def test_names_of_bitsandbytes_are_its_types(model: Path, tmp_path: Path, name: str) -> None:
    out = made("quantize", model, "--scheme", name, "-o", tmp_path / "q")
    assert config(out)["quantization_config"]["bnb_4bit_quant_type"] == name.lower()


@pytest.mark.parametrize("name", ["w4a16", "fp8-dynamic", "Fp8_Block", "w8a8"])
def test_case_and_dashes_do_not_matter(model: Path, tmp_path: Path, name: str) -> None:
    out = made("quantize", model, "--scheme", name, "-o", tmp_path / "a")
    same = made("quantize", model, "--scheme", name.upper().replace("-", "_"), "-o", tmp_path / "b")
    assert (out / "config.json").read_bytes() == (same / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("--scheme FP8", "--scheme FP8_DYNAMIC"),
        ("--scheme nvfp4", "--scheme NVFP4A16"),
        ("--scheme MXFP4", "--scheme MXFP4A16"),
        ("--scheme W4A8", "--scheme W4A16"),
        ("--scheme mxfp8", "--scheme FP8_DYNAMIC"),
        ("--scheme INT8", "--scheme W8A8"),
        ("--scheme q4_k_m", "qconvert to-gguf MODEL --type q4_k_m"),
        ("--scheme awq", "--bits 4 --method awq"),
        ("--scheme bf16", "qconvert convert MODEL --to bf16"),
        ("--scheme 4bit", "--bits 4"),
        ("--bits fp8", "--scheme FP8_DYNAMIC"),
        ("--bits w4a16", "--scheme w4a16"),
        ("--bits int4", "--bits 4"),
        ("--bits 4,q4_k_m", "qconvert to-gguf MODEL --type q4_k_m"),
        ("--layout nf4", "qconvert quantize MODEL --scheme nf4"),
        ("--bits 4 --rule mlp.down=FP8_DYNAMIC", "qconvert quantize MODEL --scheme FP8_DYNAMIC"),
        ("--scheme W8A8 --layout gptq", "write --layout int-quantized"),
        ("--scheme FP8_DYNAMIC --rule mlp.down=int8", "--keep"),
        ("--scheme FP8_DYNAMIC --asym", "--keep"),
    ],
)
def test_what_is_not_written_has_one_error_with_what_to_type(model: Path, asked: str, hint: str) -> None:
    ran = qconvert("quantize", model, *shlex.split(asked), "--dry-run")
    first, second = ran.err.splitlines()
    assert ran.code == 2 and first.startswith("Error: ") and second.startswith("Hint: ")
    assert hint in second, ran.err


def test_other_commands_know_the_names(model: Path) -> None:
    for words, hint in (
        (("to-gguf", "--type", "int4"), "'q4_k_m'"),
        (("to-gguf", "--type", "FP8"), "--scheme FP8_DYNAMIC"),
        (("convert", "--to", "W4A16"), "qconvert quantize MODEL --scheme W4A16"),
        (("convert", "--to", "q4_k_m"), "qconvert to-gguf MODEL --type q4_k_m"),
    ):
        ran = qconvert(words[0], model, *words[1:], "--dry-run")
        assert ran.code == 2 and hint in ran.err, ran.err
    for words in (("--to", "BitsAndBytes", "--scheme", "NF4"), ("--to", "int-quantized", "--scheme", "W8A8")):
        assert qconvert("convert", model, *words, "--dry-run").code == 0


def test_weights_can_be_kept_beside_a_table(model: Path, tmp_path: Path) -> None:
    out = made("quantize", model, "--scheme", "FP8_DYNAMIC", "--keep", "mlp.down", "-o", tmp_path / "q")
    ignored = config(out)["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignored and "model.layers.0.mlp.up_proj" not in ignored
    ran = qconvert("quantize", model, "--scheme", "FP8_DYNAMIC", "--keep", "attn.q", "--dry-run")
    assert ran.code == 1 and "layers.0.attn.qkv selects them, attn.qkv those of all layers" in ran.err
