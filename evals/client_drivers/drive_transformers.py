"""Loads checkpoints with transformers: `python drive_transformers.py JOBS.json` (see `driving.py`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}

import numpy as np
import torch
import transformers
from driving import Answer, Windows, drive, of_tokens
from linears import effective_weights


def _options(model: str, way: str) -> dict[str, Any]:
    """Arguments that a layout needs here: kernels of torch alone, where others would be compiled first.

    The way "dequantize" decodes compressed-tensors before anything is computed.
    """
    if way == "dequantize":
        return {
            "dtype": "float32",
            "quantization_config": transformers.CompressedTensorsConfig(dequantize=True),
        }
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    kernels = {
        "gptq": lambda: transformers.GPTQConfig(bits=4, backend="torch"),
        "awq": lambda: transformers.AwqConfig(backend="torch_awq"),
        "auto-round": lambda: transformers.AutoRoundConfig(backend="torch"),
    }
    method = (config.get("quantization_config") or {}).get("quant_method")
    return {"dtype": way} | ({"quantization_config": kernels[method]()} if method in kernels else {})


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    options = _options(model, way)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, device_map="cpu", **options).eval()
    with torch.no_grad():
        logits_WTV = [loaded(torch.tensor([window])).logits[0].float().numpy() for window in tokens]
    rows = [of_tokens(logits, window) for logits, window in zip(logits_WTV, tokens, strict=True)]
    return Answer(np.array(rows), effective_weights(loaded), str(loaded.dtype))


drive(_compute)
