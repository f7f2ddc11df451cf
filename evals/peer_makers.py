"""Writes a calibrated checkpoint with a peer: `PYTHON evals/peer_makers.py PEER MODEL TOKENS.npy OUT`.

PYTHON is an interpreter that has the peer; nothing of this project is imported. TOKENS.npy holds windows of
tokens, int64 [W, T], so that every tool reads the same. The last line of stdout is JSON, versions and what
was asked; after `--said FILE` it is written there too.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


def llm_compressor_gptq(model: str, tokens_WT: np.ndarray, out: Path) -> dict[str, Any]:
    """GPTQ of llm-compressor in its preset W4A16: symmetric groups of 128, activation order static."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    return _oneshot(model, tokens_WT, out, recipe) | {"scheme": "W4A16, GPTQ"}


def _oneshot(model: str, tokens_WT: np.ndarray, out: Path, recipe: Any) -> dict[str, Any]:
    from datasets import Dataset
    from llmcompressor import oneshot

    rows = {"input_ids": tokens_WT.tolist(), "attention_mask": np.ones_like(tokens_WT).tolist()}
    oneshot(
        model=model,
        dataset=Dataset.from_dict(rows),
        recipe=recipe,
        num_calibration_samples=len(tokens_WT),
        max_seq_length=tokens_WT.shape[1],
        shuffle_calibration_samples=False,
        output_dir=str(out),
    )
    return {"llmcompressor": version("llmcompressor")}


def auto_round(model: str, tokens_WT: np.ndarray, out: Path, iterations: str = "200") -> dict[str, Any]:
    """SignRound of AutoRound in its preset W4A16: symmetric groups of 128."""
    import torch
    from auto_round import AutoRound

    ids_WT, size = torch.from_numpy(tokens_WT), 8
    batches = [ids_WT[first : first + size] for first in range(0, len(ids_WT), size)]
    windows, length = ids_WT.shape
    tuned = AutoRound(
        model,
        scheme="W4A16",
        dataset=[{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches],
        iters=int(iterations),
        nsamples=windows,
        seqlen=length,
        device_map="cpu",
        enable_torch_compile=False,
    )
    tuned.quantize_and_save(str(out), format="auto_gptq")
    written = next(out.rglob("config.json")).parent  # a folder in it since 0.16
    for file in written.iterdir() if written != out else ():
        file.rename(out / file.name)
    return {"auto-round": version("auto-round"), "scheme": "W4A16", "iterations": int(iterations)}


def mlx_dwq(
    model: str, tokens_WT: np.ndarray, out: Path, rate: str = "1e-6", plain: str = ""
) -> dict[str, Any]:
    """DWQ of mlx-lm with its own defaults: 4 bits and minima in groups of 64, scales and minima tuned.

    The embedding is kept as it is, as all others here keep it. Numbers are float32, because products of bf16
    on a CPU take mlx minutes for 2,048 tokens. `plain` leaves the tuning out.
    """
    import copy

    import mlx.core as mx
    from mlx import nn, optimizers
    from mlx_lm.quant.dwq import dwq_quantize
    from mlx_lm.utils import load, quantize_model, save

    mx.set_default_device(mx.cpu)
    teacher, tokenizer, config = load(model, return_config=True)
    teacher.set_dtype(mx.float32)

    def chosen(path: str, module: Any) -> bool:
        return isinstance(module, nn.Linear)

    student, config = quantize_model(copy.deepcopy(teacher), config, 64, 4, quant_predicate=chosen)
    rows = [(ids.tolist(), 0) for ids in tokens_WT]
    if not plain:
        adam = optimizers.Adam(learning_rate=float(rate), bias_correction=True)
        longest = tokens_WT.shape[1] + 1
        dwq_quantize(
            student, lambda ids, at, split: teacher(ids), adam, rows, rows[:4], 4, longest, 123, mx.float32
        )
    student.set_dtype(mx.bfloat16)
    save(out, model, student, tokenizer, config)
    return {"mlx-lm": version("mlx-lm"), "mlx": version("mlx"), "scheme": "affine g64", "rate": float(rate)}


MAKERS = {
    "llm-compressor-gptq": llm_compressor_gptq,
    "auto-round": auto_round,
    "mlx-dwq": mlx_dwq,
}


def main(peer: str, model: str, tokens: str, out: str, *more: str) -> None:
    """Write a checkpoint, and what was asked to the file that follows `--said`."""
    options, said = (more[:-2], Path(more[-1])) if "--said" in more else (more, None)
    began = time.perf_counter()
    made = MAKERS[peer](model, np.load(tokens), Path(out), *options)
    seconds, usage = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cost = {"seconds": round(seconds, 1), "user_seconds": round(usage.ru_utime, 1)}
    found = json.dumps(made | cost | {"peak_bytes": usage.ru_maxrss * 1024})
    if said is not None:
        said.write_text(found + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
