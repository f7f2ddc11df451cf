"""Loads checkpoints with vLLM on a CPU: `python drive_vllm.py JOBS.json` (see `driving.py`)."""

from __future__ import annotations

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads of so small a model wait for one another
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all else
}

import numpy as np
import torch
from driving import Answer, Windows, drive
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

_LARGEST = 448.0  # of E4M3: as the largest of a row it is rounded to itself, at a scale of 1


def _probe(module: torch.nn.Module) -> float:
    """What stands for 1 in the identity: a number that survives as an input, where inputs become FP8.

    They do where a row of the weight has one scale; weights in blocks are multiplied by 16-bit inputs.
    """
    fp8 = any(each.dtype == torch.float8_e4m3fn for each in module.parameters())
    scale = getattr(module, "weight_scale", None)
    by_rows = scale is not None and scale.numel() in (1, sum(getattr(module, "logical_widths", ())))
    return _LARGEST if fp8 and by_rows else 1.0


def _weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What each linear and the head make of the rows of the identity, and all rows of the embedding."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase | ParallelLMHead):
            columns = module.embedding_dim if isinstance(module, ParallelLMHead) else module.input_size
            eye = _probe(module) * torch.eye(columns, dtype=module.params_dtype)
            found[name] = module.quant_method.apply(module, eye).T.float().numpy()
        elif isinstance(module, VocabParallelEmbedding):
            rows = torch.arange(module.num_embeddings)
            found[name] = module.quant_method.embedding(module, rows).float().numpy()
    return found


def _probes(model: torch.nn.Module) -> dict[str, float]:
    """The linears that were asked with another number than 1."""
    found = {name: _probe(module) for name, module in model.named_modules() if isinstance(module, LinearBase)}
    return {name: probe for name, probe in found.items() if probe != 1}


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
    computing = str(llm.llm_engine.model_config.dtype)
    return Answer(np.array(rows), llm.apply_model(_weights)[0], computing, llm.apply_model(_probes)[0])


drive(_compute)
