"""Makes checkpoints of real models' shapes with seeded random weights, for measuring speed and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.io.planned_files import FileSink
from qconvert.models import Architecture

_QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16",
         "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
         "max_position_embeddings": 32768}  # fmt: skip

_QWEN3 = {**_QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128,
          "attention_bias": False, "max_position_embeddings": 40960}  # fmt: skip

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip
# From the models' own config.json files.
SHAPES: dict[str, Json] = {
    name: {**family, **dict(zip(_SIZES, sizes, strict=True))}
    for name, family, *sizes in (
        ("qwen2.5-0.5b", _QWEN, 896, 4864, 24, 14, 2, 151936, True),
        ("qwen2.5-1.5b", _QWEN, 1536, 8960, 28, 12, 2, 151936, True),
        ("qwen2.5-7b", _QWEN, 3584, 18944, 28, 28, 4, 152064, False),
        ("qwen3-0.6b", _QWEN3, 1024, 3072, 28, 16, 8, 151936, True),
        ("qwen3-8b", _QWEN3, 4096, 12288, 36, 32, 8, 151936, False),
    )
}

SHARD_BYTES = 2_000_000_000
_BLOCK_ROWS = 2048


def make_checkpoint(folder: Path, shape: str, *, layer_factor: int = 1, seed: int = 0) -> Path:
    """Write a bf16 checkpoint of a named shape into `folder`, with `layer_factor` times the layers.

    Weights are normal with standard deviation 0.02, norms around 1; a folder that already holds
    the same config is left as it is. Returns the folder.
    """
    config = {**SHAPES[shape], "num_hidden_layers": SHAPES[shape]["num_hidden_layers"] * layer_factor}
    text = json.dumps(config, indent=2) + "\n"
    marker = folder / "config.json"
    if marker.is_file() and marker.read_text(encoding="utf-8") == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    architecture = Architecture.of(config)
    tied = architecture.tied
    places = [p for p in architecture.parameters.values() if not (tied and p.role == "lm_head")]
    specs = [TensorSpec(p.name, DType.BF16, p.shape) for p in places]
    sink = FileSink(folder, plan_files(specs, SHARD_BYTES, {"format": "pt"}))
    rng = np.random.default_rng(seed)
    for place, spec in zip(places, specs, strict=True):
        center = np.float32(1.0 if place.kind == "norm" else 0.0)
        for start in range(0, spec.rows, _BLOCK_ROWS):
            shape_RI = (min(_BLOCK_ROWS, spec.rows - start), spec.width)
            x = rng.standard_normal(shape_RI, dtype=np.float32) * np.float32(0.02) + center
            # Truncation to bf16 is exact enough for random weights and needs no kernel.
            sink.write(spec.name, start, (x.view(np.uint32) >> 16).astype("<u2"))
    sink.commit()
    marker.write_text(text, encoding="utf-8")
    return folder


def converted(source: Path, out: Path, command: str, *options: str) -> Path:
    """What a command of qconvert makes of a checkpoint, unless it is there."""
    if not out.exists():
        words = [sys.executable, "-m", "qconvert", command, str(source), *options, "-q", "--no-verify"]
        subprocess.run([*words, "-o", str(out)], check=True, stdout=subprocess.DEVNULL)
    return out
