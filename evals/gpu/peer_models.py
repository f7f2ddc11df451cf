"""Whole models of others beside ours: transformers in bfloat16, and bitsandbytes' NF4 in transformers.

The same shapes with random weights, made on the device; a static cache, so that a step can be captured
as ours is. Each way of running is timed where it works and noted where it does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from evals.gpu.clock import Call, capture, wall_seconds
from evals.gpu.job import Job, attempt
from evals.gpu.models import config_of, kv_bytes, read_flops
from evals.gpu.rows import Decoding, Note, Reading, Row
from qconvert.runtime.config import DecoderConfig

NF4_FORM = "nf4, 16-bit head"
TOKENS, ROUNDS, CONTEXTS = 32, 5, (0, 2048)
EAGER_TOKENS, EAGER_ROUNDS = 16, 2
"""Launched from Python a step takes 20 ms and more, whatever the model."""
COMPILE_SECONDS = 50.0
"""Left in the section, at least, before a model is handed to torch.compile."""
READ_WINDOWS = 2
MODELS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen3-8b")


def measure(job: Job) -> Iterator[Row]:
    """Every peer that is installed, on the models that have targets."""
    if find_spec("transformers") is None:
        yield Note("transformers: not installed")
        return
    models = MODELS[:1] if job.dry else MODELS
    for model in models:
        yield from attempt(job, f"transformers {model}", partial(_transformers, job, model))
    if find_spec("bitsandbytes") is None:
        yield Note("bitsandbytes: not installed")
    else:
        for model in models[:2]:
            yield from attempt(job, f"bitsandbytes {model}", partial(_bitsandbytes, job, model))
    yield from attempt(job, f"torch.compile {models[0]}", partial(_compiled, job, models[0]))


def _model(job: Job, model: str) -> Any:
    import transformers

    api: Any = transformers
    config = dict(config_of(model, tiny=job.dry))
    config.pop("architectures")
    made = api.AutoConfig.for_model(config.pop("model_type"), **config)
    made.use_cache = True
    with torch.device(job.device):
        built = api.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    return built.eval()


def _transformers(job: Job, model: str) -> Iterator[Row]:
    built = _model(job, model)
    yield from _decoding(job, model, "bf16", "transformers", built)
    yield from attempt(job, f"transformers reading {model}", partial(_reading, job, model, built))


def _bitsandbytes(job: Job, model: str) -> Iterator[Row]:
    built = _model(job, model)
    into_nf4(built)
    yield from _decoding(job, model, NF4_FORM, "bitsandbytes", built)


def into_nf4(model: Any) -> None:
    """Put bitsandbytes' 4-bit linears in place of a model's own, but for the head, as transformers does."""
    import bitsandbytes as bnb

    api: Any = bnb
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    for name, old in linears:
        if name == "lm_head":
            continue
        parent, _, leaf = name.rpartition(".")
        with torch.device("meta"):
            new = api.nn.Linear4bit(
                old.in_features,
                old.out_features,
                bias=old.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=False,
                quant_type="nf4",
            )
        device = old.weight.device
        new.weight = api.nn.Params4bit(
            old.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=new
        )
        new.bias = old.bias
        # Quantizing happens on arrival at a device, from main memory too when it is the CPU.
        new.weight = new.weight.cpu().to(device) if device.type == "cuda" else new.weight.to(device)
        setattr(model.get_submodule(parent), leaf, new.eval())


class Stepper:
    """One token after another through a transformers model with a static cache, the likeliest first."""

    def __init__(self, model: Any, room: int, device: torch.device) -> None:
        from transformers import StaticCache

        self.model, self.device = model, device
        self.cache: Any = StaticCache(config=model.config, max_cache_len=room)
        self.token_11 = torch.full((1, 1), 7, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Read the token, and put the likeliest one after it in its place."""
        logits: Tensor = self.model(
            self.token_11, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        self.token_11.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def restart(self, context: int) -> None:
        """As if `context` tokens had been read: what they were does not matter to speed."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(context)
            layer.keys.normal_()
            layer.values.normal_()


def _decoding(job: Job, model: str, encoding: str, via: str, built: Any) -> Iterator[Row]:
    """Launched from Python, and replayed as a graph; the cache no longer than what is read."""
    for context in (0, 5) if job.dry else CONTEXTS:
        stepper = Stepper(built, context + TOKENS, job.device)
        stepper.step()  # the cache takes its memory at the first call
        timed = partial(_timed, job, model, encoding, stepper=stepper, context=context)
        yield timed(f"{via} eager", step=stepper.step, tokens=EAGER_TOKENS, rounds=EAGER_ROUNDS)
        if job.device.type == "cuda":
            try:
                graph = capture([stepper.step], job.device)
            except RuntimeError as error:
                yield Note(f"{via} {model}: cannot be captured: {str(error).splitlines()[0][:200]}")
                continue
            yield timed(f"{via} CUDA graph", step=graph.replay)


def _compiled(job: Job, model: str) -> Iterator[Row]:
    """At the start of a text only: another length of the cache is compiled for again."""
    if job.device.type != "cuda":
        yield Note("torch.compile: not in a dry run")
    elif job.left < COMPILE_SECONDS:
        yield Note(f"torch.compile: {job.left:.0f} s left of the section, and it takes {COMPILE_SECONDS:.0f}")
    else:
        built = _model(job, model)
        built.forward = torch.compile(built.forward, mode="reduce-overhead", fullgraph=True)
        stepper = Stepper(built, TOKENS, job.device)
        for _ in range(4):  # takes the cache's memory, compiles, records, replays
            stepper.step()
        yield _timed(
            job, model, "bf16", "transformers compiled", stepper=stepper, context=0, step=stepper.step
        )


def _timed(
    job: Job,
    model: str,
    encoding: str,
    via: str,
    *,
    stepper: Stepper,
    context: int,
    step: Callable[[], object],
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
) -> Decoding:
    tokens, rounds = (2, 1) if job.dry else (tokens, rounds)
    config = DecoderConfig.from_hf(config_of(model, tiny=job.dry))
    seconds = []
    for _ in range(rounds + 1):
        stepper.restart(context)
        seconds.append(wall_seconds(_times(step, tokens), job.device) / tokens)
    return Decoding(
        model,
        via,
        encoding,
        context,
        statistics.median(seconds[1:]),
        _weight_bytes(stepper.model),
        kv_bytes(config, context + tokens // 2),
        None,
    )


def _times(step: Callable[[], object], count: int) -> Call:
    def run() -> None:
        for _ in range(count):
            step()

    return run


def _weight_bytes(model: Any) -> int:
    """Matrices but for the embedding, which counts once as the head where it is tied to it."""
    embed, head = model.get_input_embeddings().weight, model.lm_head.weight
    read = [p for p in model.parameters() if p is not embed and p is not head and p.squeeze().dim() > 0]
    states = (getattr(p, "quant_state", None) for p in read)
    return int(head.nbytes + sum(p.nbytes for p in read) + sum(s.absmax.nbytes for s in states if s))


@torch.no_grad()
def _reading(job: Job, model: str, built: Any) -> Iterator[Reading]:
    """The loss of transformers itself, windows of 2048 in a batch; logits in bfloat16."""
    windows, window = (2, 8) if job.dry else (READ_WINDOWS, 2048)
    config = DecoderConfig.from_hf(config_of(model, tiny=job.dry))
    ids_BT = torch.randint(config.vocab, (windows, window), device=job.device)

    def read() -> None:
        built(ids_BT, labels=ids_BT, use_cache=False)

    wall_seconds(read, job.device)
    seconds = statistics.median(wall_seconds(read, job.device) for _ in range(3))
    tokens = windows * window
    yield Reading(
        model, "transformers", "bf16", tokens, seconds, read_flops(config, tokens, window), whole=False
    )
