"""Writes adapters as PEFT and mlx-lm save them, and computes what they make of weights, in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import Checkpoint
from qconvert.checkpoint.resolved import open_found
from qconvert.core.values import DenseRows

Arrays = dict[str, np.ndarray]
PREFIX = "base_model.model."


def lora_arrays(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int = 0) -> Arrays:
    """Matrices A and B for modules with weights of these shapes, by PEFT's names."""
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    for module, (rows, width) in shapes.items():
        found[f"{PREFIX}{module}.lora_A.weight"] = rng.normal(0, 0.3, (rank, width)).astype(np.float32)
        found[f"{PREFIX}{module}.lora_B.weight"] = rng.normal(0, 0.3, (rows, rank)).astype(np.float32)
    return found


def write_peft(
    folder: Path, arrays: Arrays, base: object, rank: int = 4, alpha: float = 8, **more: Any
) -> Path:
    """A folder as `PeftModel.save_pretrained` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))
    save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def as_mlx(arrays: Arrays, modules: Sequence[str]) -> Arrays:
    """The same matrices by mlx-lm's names, which multiplies inputs by a [in, r] and b [r, out]."""
    found = {}
    for module in modules:
        found[f"{module}.lora_a"] = np.ascontiguousarray(arrays[f"{PREFIX}{module}.lora_A.weight"].T)
        found[f"{module}.lora_b"] = np.ascontiguousarray(arrays[f"{PREFIX}{module}.lora_B.weight"].T)
    return found


def merged_f64(weight: np.ndarray, arrays: Arrays, module: str, scale: float) -> np.ndarray:
    """A weight with its product added, in float64."""
    left = arrays[f"{PREFIX}{module}.lora_B.weight"].astype(np.float64)
    right = arrays[f"{PREFIX}{module}.lora_A.weight"].astype(np.float64)
    return weight.astype(np.float64) + scale * (left @ right)


def numbers(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor of a checkpoint in float32."""
    tensor = checkpoint.tensors[name]
    value = checkpoint.reader.read(tensor, 0, tensor.rows)
    assert isinstance(value, DenseRows) and value.rows_RI.dtype == np.float32
    return value.rows_RI


def opened(model: object) -> Checkpoint:
    """A model, or an adapter with its base."""
    return open_found(resolve(str(model)))
