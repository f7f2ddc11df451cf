"""What the last lines of `quantize` say of an embedding and a head that are left in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import qconvert
from tests.support.models import tiny


def note(*command: object) -> str:
    ran = qconvert("quantize", *command)
    assert ran.code == 0, ran.err
    return next((line for line in ran.err.splitlines() if line.startswith("note: the ")), "")


def written(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_of_an_untied_model_rules_are_named_with_what_they_save(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "llama", tied=False)
    wish = ("--bits", 4, "--group-size", 32)
    said = note(model, *wish, "-o", tmp_path / "plain")
    assert "embedding and head stay bf16" in said and "% of the bytes" in said
    assert "--rule lm_head=int8 saves" in said and "(vLLM and transformers load it)" in said
    assert "--rule embed=int8 saves" in said and "(vLLM loads it, transformers does not)" in said
    saved = said.split("--rule lm_head=int8 saves ")[1].split(" (")[0]
    assert note(model, *wish, "--rule", "lm_head=int8-g32", "-o", tmp_path / "head").startswith(
        "note: the embedding stays"
    )
    less = written(tmp_path / "plain") - written(tmp_path / "head")
    number, unit = saved.split()
    assert abs(float(number) * {"KB": 1e3, "MB": 1e6}[unit] - less) < 0.1 * less


def test_of_a_tied_model_the_loaders_are_named_that_take_it(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen3", tied=True)
    said = note(model, "--bits", 4, "--group-size", 32, "-o", tmp_path / "plain")
    assert "embedding, also the head, stays bf16" in said
    assert "--layout mlx --rule embed=int8 saves" in said


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (("--layout", "awq", "--group-size", 32), "loaders of awq load such tables unquantized only"),
        (("--rule", "embed=int8-g32", "--rule", "lm_head=int8-g32", "--group-size", 32), ""),
    ],
)
def test_other_layouts_and_rules(tmp_path: Path, wish: tuple[object, ...], says: str) -> None:
    said = note(tiny(tmp_path / "m", "llama", tied=False), "--bits", 4, *wish, "-o", tmp_path / "out")
    assert says in said if says else not said
