"""Loads checkpoints with GPTQModel: `python drive_gptqmodel.py JOBS.json` (see `driving.py`)."""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}

import numpy as np
import torch
from driving import Answer, Windows, drive, of_tokens
from linears import effective_weights


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    # Only here, in the process of the job: threads that the import starts do not outlive a fork.
    from gptqmodel import BACKEND, GPTQModel

    options = {"device": "cpu", "backend": BACKEND.TORCH, "dtype": getattr(torch, way)}
    loaded = GPTQModel.load(model, **options).model.eval()
    with torch.no_grad():
        logits_WTV = [loaded(torch.tensor([window])).logits[0].float().numpy() for window in tokens]
    rows = [of_tokens(logits, window) for logits, window in zip(logits_WTV, tokens, strict=True)]
    return Answer(np.array(rows), effective_weights(loaded), way)


drive(_compute)
