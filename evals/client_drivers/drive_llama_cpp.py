"""Loads GGUF files with llama.cpp: `python drive_llama_cpp.py JOBS.json` (see `driving.py`).

llama.cpp shows no weights; it computes with inputs rounded to 8 bits where weights are quantized.
"""

from __future__ import annotations

import numpy as np
from cyllama.llama import llama_cpp
from driving import Answer, Windows, drive, of_tokens


class _Model(llama_cpp.LlamaModel):
    @property
    def n_vocab(self) -> int:
        """What the binding's get_logits_ith asks the model for, which lacks it."""
        return self.get_vocab().n_vocab


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    loaded = _Model(model, llama_cpp.LlamaModelParams(), verbose=False)
    found = []
    for window in tokens:
        params = llama_cpp.LlamaContextParams()
        params.n_ctx, params.n_threads = max(256, len(window)), 1
        running = llama_cpp.LlamaContext(loaded, params, verbose=False)
        batch = llama_cpp.LlamaBatch(n_tokens=len(window), embd=0, n_seq_max=1, verbose=False)
        batch.set_batch(window, 0, True)
        if running.decode(batch) != 0:
            raise RuntimeError("llama.cpp does not decode the window")
        found.append(of_tokens([running.get_logits_ith(i) for i in range(len(window))], window))
    return Answer(np.array(found), {}, "auto")


drive(_compute)
