"""Loads checkpoints with transformers 4: `python drive_transformers_4.py JOBS.json` (see `driving.py`)."""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}

import numpy as np
import torch
import transformers
from driving import Answer, Windows, drive, of_tokens
from linears import effective_weights


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, device_map="cpu", dtype=way).eval()
    with torch.no_grad():
        logits_WTV = [loaded(torch.tensor([window])).logits[0].float().numpy() for window in tokens]
    rows = [of_tokens(logits, window) for logits, window in zip(logits_WTV, tokens, strict=True)]
    return Answer(np.array(rows), effective_weights(loaded), str(loaded.dtype))


drive(_compute)
