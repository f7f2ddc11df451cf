"""An adapter may be one of several files or folders that a training left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.adapters import as_mlx, lora_arrays, merged_f64, write_peft
from tests.support.commands import qconvert
from tests.support.models import tiny

MODULE = "model.layers.0.self_attn.q_proj"
ARRAYS = lora_arrays({MODULE: (256, 256)}, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("base") / "base", dtype="f32")


def test_one_of_the_steps_that_mlx_lm_saved(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"fine_tune_type": "lora", "lora_parameters": {"scale": 2.0}, "model": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    arrays = as_mlx(ARRAYS, [MODULE])
    save_file(arrays, folder / "adapters.safetensors")
    save_file({name: array / 2 for name, array in arrays.items()}, folder / "0000100_adapters.safetensors")
    before = load_file(base / "model.safetensors")[f"{MODULE}.weight"]
    for model, name, scale in (
        (folder, "mine", 2.0),
        (folder / "adapters.safetensors", "mine", 2.0),
        (folder / "0000100_adapters.safetensors", "mine-step100", 0.5),
        (f"{base}+{folder / '0000100_adapters.safetensors'}", "mine-step100", 0.5),
    ):
        out = tmp_path / "out"
        ran = qconvert("merge", model, "-o", out, "--overwrite")
        assert ran.code == 0 and ran.out.startswith(f"{name} merged into base  ->  "), ran.err
        found = load_file(out / "model.safetensors")[f"{MODULE}.weight"]
        np.testing.assert_allclose(found, merged_f64(before, ARRAYS, MODULE, scale), rtol=0, atol=3e-6)
        assert qconvert("merge", model, "-o", out, "--skip-existing").code == 0


def test_a_folder_of_adapters_says_which_there_are(base: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-20", "checkpoint-100"):
        lora = write_peft(tmp_path / "run" / name, ARRAYS, base)
    ran = qconvert("merge", tmp_path / "run", "-o", tmp_path / "out")
    assert ran.code == 1 and "but 2 folders with models: checkpoint-20, checkpoint-100" in ran.err
    assert f"Hint: name one of them: {lora}" in ran.err
    ran = qconvert("merge", lora, "-o", tmp_path / "out")
    assert ran.code == 0 and ran.out.startswith("run-checkpoint100 merged into base  ->  "), ran.err


def test_the_hint_names_the_adapter_as_it_was_written(base: Path, tmp_path: Path) -> None:
    lora = write_peft(tmp_path / "lora", ARRAYS, tmp_path / "gone")
    ran = qconvert("merge", lora, "-o", tmp_path / "out")
    assert ran.code == 1 and f"Hint: write the base before it: BASE+{lora}" in ran.err
    shutil.copytree(base, tmp_path / "gone")
    assert qconvert("merge", lora, "-o", tmp_path / "out").code == 0


def test_a_quantized_base_is_told(base: Path, tmp_path: Path) -> None:
    assert qconvert("quantize", base, "--bits", "8", "-o", tmp_path / "int8", "-q").code == 0
    ran = qconvert(
        "to-gguf", write_peft(tmp_path / "lora", ARRAYS, tmp_path / "int8"), "--type", "q8_0", "--dry-run"
    )
    assert "1 weight; its base is quantized: compressed-tensors (int8-g128)" in ran.out, ran.out + ran.err
