"""Loads checkpoints with vLLM on a CPU: `python drive_vllm.py JOBS.json` (see `driving.py`)."""

from __future__ import annotations

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all else
}

import numpy as np
import torch
from driving import Answer, Windows, drive
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def _weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What each linear and the head make of the rows of the identity, and all rows of the embedding."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase | ParallelLMHead):
            columns = module.embedding_dim if isinstance(module, ParallelLMHead) else module.input_size
            eye = torch.eye(columns, dtype=module.params_dtype)
            found[name] = module.quant_method.apply(module, eye).T.float().numpy()
        elif isinstance(module, VocabParallelEmbedding):
            rows = torch.arange(module.num_embeddings)
            found[name] = module.quant_method.embedding(module, rows).float().numpy()
    return found


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    llm = LLM(
        model,
        dtype=way,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        trust_remote_code=False,
    )
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=window) for window in tokens], asked, use_tqdm=False
    )
    rows = [
        [answer.prompt_logprobs[place][token].logprob for place, token in enumerate(window) if place]
        for answer, window in zip(answers, tokens, strict=True)
    ]
    return Answer(np.array(rows), llm.apply_model(_weights)[0], str(llm.llm_engine.model_config.dtype))


drive(_compute)
