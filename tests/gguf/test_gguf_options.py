"""What `to-gguf` and its neighbours say to options that cannot be met, or that another option means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import qconvert, refused
from tests.support.gguf_models import transformers_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with a tokenizer."""
    return transformers_model(tmp_path_factory.mktemp("model") / "small", "qwen2")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--type", "keep", "--tensor-type", "ffn_down=q8_0"],
            "--tensor-type: given together with --type keep",
        ),
        (
            ["--type", "keep", "--output-tensor-type", "q8_0"],
            "--output-tensor-type: given together with --type keep",
        ),
        (["--type", "keep", "--token-embedding-type", "f16"], "--token-embedding-type: given together with"),
        (["--type", "keep", "--pure"], "--pure: given together with --type keep"),
        (
            ["--type", "keep", "--imatrix", "IMATRIX"],
            "--imatrix, --calibration: given together with --type keep",
        ),
        (["--type", "f16", "--tensor-type", "ffn_down=q8_0"], "--tensor-type: a file of type f16 mixes no"),
        (["--type", "q4_0", "--pure", "--output-tensor-type", "q8_0"], "its embedding, which --pure decides"),
        (["--type", "f16", "--output-tensor-type", "q8_0"], "its embedding, which --type f16 decides"),
    ],
)
def test_no_option_is_dropped_silently(assets: Path, tmp_path: Path, flags: list[str], says: str) -> None:
    measured = str(assets / "fixtures" / "gguf" / "imatrix.gguf")
    given = [measured if flag == "IMATRIX" else flag for flag in flags]
    assert says in refused(tmp_path, assets / "models" / "tiny-qwen3", *given)


def test_a_pattern_that_meant_the_head_is_told(assets: Path) -> None:
    asked = ("to-gguf", assets / "models" / "tiny-qwen3", "--type", "q8_0", "--dry-run", "--tensor-type")
    assert "the head's is --output-tensor-type" in qconvert(*asked, "output.weight=q6_k").err
    assert "the head's" not in qconvert(*asked, "attn_output=q6_k").err


def test_a_type_that_needs_a_matrix_is_named_with_the_one_asked_for(assets: Path, tmp_path: Path) -> None:
    said = refused(tmp_path, assets / "models" / "tiny-qwen3", "--type", "iq3_xxs")
    assert "iq2_s needs an importance matrix (--type iq3_xxs)" in said


def test_ollama_is_told_of_the_modelfile(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "My-F16.gguf"
    ran = qconvert("to-gguf", model, "--type", "f16", "-o", out, "--card", "--modelfile")
    assert ran.err.endswith(f"next: ollama create my-f16 -f {tmp_path / 'My-F16.Modelfile'}\n")
    card = (tmp_path / "My-F16.md").read_text()
    assert "ollama create my-f16 -f My-F16.Modelfile\n" in card and "> Modelfile" not in card


def test_what_is_no_model_is_told_apart(assets: Path, tmp_path: Path) -> None:
    ran = qconvert("inspect", assets / "fixtures" / "gguf" / "imatrix.gguf")
    assert ran.code == 1 and "imatrix.gguf: an importance matrix, not a model" in ran.err
    ran = qconvert("inspect", tmp_path / "none.gguf")
    assert (
        ran.code == 1 and ran.err == f"Error: {tmp_path / 'none.gguf'}: no such file\nHint: check the path\n"
    )


def test_a_mix_is_named_after_its_target(assets: Path) -> None:
    """And the head's type is that of a tied embedding."""
    asked = ("to-gguf", assets / "models" / "tiny-qwen3", "--target-size", "5.5bpw", "--tokens", 512)
    asked += ("--window", 256)
    ran = qconvert(*asked, "--types", "q4_0,q5_0", "--output-tensor-type", "q8_0", "--dry-run", "--json")
    assert ran.code == 0, ran.err
    assert Path(ran.json["out"]).name == "Tiny-Qwen3-7.3M-5.5BPW.gguf"
    assert "q8_0" in {row["type"] for row in ran.json["types"]}


def test_words_of_other_commands_are_pointed_to() -> None:
    for option in ("--type", "--scheme"):
        ran = qconvert("quantize", "nowhere", option, "q4_k_m")
        assert ran.code == 2 and "Hint: `qconvert to-gguf MODEL --type q4_k_m`" in ran.err
    ran = qconvert("check", "nowhere", "--for", "llamacpp")
    assert ran.code == 2 and "did you mean 'llama.cpp'?" in ran.err
