"""Runs one model in qconvert's decoder, in transformers and in llama.cpp, behind one interface.

Each runner reads tokens and drops the logits, as its own fast path computes them. What is not
installed here says so and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from evals.random_models import weight_bytes
from qconvert.checkpoint.by_role import EXACT, Activations, CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import load_decoder
from qconvert.runtime.scoring import score_hidden


@dataclass(frozen=True, slots=True)
class Runner:
    """A loaded model. `token_bytes` are the bytes of weights that one token reads.

    `start(prompt)` forgets everything and reads a prompt; `step(token)` reads one more token and
    computes the logits of the next; `read(tokens)` reads a text from the start for its perplexity:
    to the losses of all positions, llama.cpp to their logits. What is `ours` has parts that can be timed.
    """

    name: str
    token_bytes: int
    start: Callable[[Sequence[int]], None]
    step: Callable[[int], None]
    read: Callable[[Sequence[int]], None]
    ours: bool = False


def ours(
    name: str, folder: Path, room: int, *, head_bits: int | None = None, activations: Activations = EXACT
) -> Runner:
    """A checkpoint in the built-in decoder, in the layout and dtype that it takes for speed."""
    checkpoint = open_checkpoint(folder)
    weights = CheckpointWeights(checkpoint, activations=activations)
    decoder = load_decoder(
        DecoderConfig.of(checkpoint.architecture),
        weights,
        dtype=None,
        layout=Layout.AUTO,
        head_bits=head_bits,
        inputs=weights.inputs,
    )
    cache = decoder.cache(1, room)

    def start(prompt: Sequence[int]) -> None:
        cache.length = 0
        decoder.prefill(torch.tensor([prompt]), cache)

    def read(tokens: Sequence[int]) -> None:
        """What an evaluation does with a window: hidden states, then the losses of all tokens."""
        ids_1T = torch.tensor([tokens])
        h_ND = decoder.hidden(ids_1T)[0, :-1]
        score_hidden([decoder.outputs(h_ND)], ids_1T[0, 1:])

    def step(token: int) -> None:
        decoder.decode(torch.tensor([token]), cache)

    return Runner(name, weight_bytes(decoder), start, step, read, ours=True)


def transformers_bf16(folder: Path) -> Runner:
    """The same checkpoint in transformers, bfloat16, with its own growing cache."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.eval()
    state: dict[str, Any] = {}

    @torch.inference_mode()
    def forward(ids: Sequence[int], cache: Any) -> None:
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        state["cache"] = out.past_key_values

    @torch.inference_mode()
    def read(tokens: Sequence[int]) -> None:
        ids_1T = torch.tensor([tokens])
        model(ids_1T, labels=ids_1T, use_cache=False)

    return Runner(
        "transformers bf16",
        sum(parameter.nbytes for parameter in model.parameters()),
        lambda prompt: forward(prompt, None),
        lambda token: forward([token], state["cache"]),
        read,
    )


def llama_cpp(name: str, gguf: Path, room: int, threads: int) -> Runner:
    """A GGUF file in llama.cpp, through the cyllama package."""
    from cyllama.llama import llama_cpp as api  # type: ignore[import-untyped]

    api.disable_logging()
    model_params, params = api.LlamaModelParams(), api.LlamaContextParams()
    model = api.LlamaModel(str(gguf), model_params, verbose=False)
    params.n_ctx = params.n_batch = room
    params.n_threads = params.n_threads_batch = threads
    context = api.LlamaContext(model, params, verbose=False)
    position = [0]

    def feed(tokens: Sequence[int], everywhere: bool) -> None:
        batch = api.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for offset, token in enumerate(tokens):
            batch.add(token, position[0] + offset, [0], everywhere or offset == len(tokens) - 1)
        context.decode(batch)
        position[0] += len(tokens)

    def restart(tokens: Sequence[int], everywhere: bool) -> None:
        context.kv_cache_clear()
        position[0] = 0
        feed(tokens, everywhere)

    return _runner_of(name, gguf, feed, restart)


Feed = Callable[[Sequence[int], bool], None]
"""Reads tokens; makes the logits of all of them, or of the last."""


def _runner_of(name: str, gguf: Path, feed: Feed, restart: Feed) -> Runner:
    """A GGUF file in a library that reads tokens after those before (`feed`), or as the first (`restart`)."""
    return Runner(
        name,
        gguf.stat().st_size,
        lambda prompt: restart(prompt, False),
        lambda token: feed([token], False),
        lambda tokens: restart(tokens, True),
    )


def llama_cpp_native(name: str, gguf: Path, room: int, threads: int) -> Runner:
    """A GGUF file in a llama.cpp that was built here, through the llama-cpp-python package."""
    import llama_cpp as api  # type: ignore[import-not-found]

    params = api.llama_model_default_params()
    return _through_ctypes(
        api, params, lambda context: api.llama_memory_clear(api.llama_get_memory(context), True)
    )(name, gguf, room, threads)


def ik_llama_cpp(name: str, gguf: Path, room: int, threads: int) -> Runner:
    """A GGUF file in ik_llama.cpp, repacked at load, through the ik-llama-cpp-python package."""
    from ik_llama_cpp import _ctypes_api as api  # type: ignore[import-not-found]

    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.use_mmap, params.repack_tensors = False, True
    return _through_ctypes(api, params, api.llama_kv_cache_clear)(name, gguf, room, threads)


def instruction_sets(package: str) -> str:
    """What llama.cpp says that a package's build of it uses of this processor; empty where it is silent."""
    module = import_module("ik_llama_cpp._ctypes_api" if package == "ik_llama_cpp" else package)
    said = getattr(module, "llama_print_system_info", lambda: b"")()
    return ", ".join(re.findall(r"(\w+) = 1", said.decode()))


def _through_ctypes(
    api: Any, model_params: Any, clear: Callable[[Any], object]
) -> Callable[[str, Path, int, int], Runner]:
    """Makes runners of a package that shows llama.cpp's C functions and structures as they are."""

    def made(name: str, gguf: Path, room: int, threads: int) -> Runner:
        model = api.llama_model_load_from_file(str(gguf).encode(), model_params)
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = room
        params.n_threads = params.n_threads_batch = threads
        context = api.llama_init_from_model(model, params)
        position = [0]

        def feed(tokens: Sequence[int], everywhere: bool) -> None:
            batch = api.llama_batch_init(len(tokens), 0, 1)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, position[0] + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = everywhere or i == len(tokens) - 1
            batch.n_tokens = len(tokens)
            failed = api.llama_decode(context, batch)
            api.llama_batch_free(batch)
            if failed:
                raise RuntimeError(f"{name}: llama_decode gave {failed}")
            position[0] += len(tokens)

        def restart(tokens: Sequence[int], everywhere: bool) -> None:
            clear(context)
            position[0] = 0
            feed(tokens, everywhere)

        return _runner_of(name, gguf, feed, restart)

    return made
