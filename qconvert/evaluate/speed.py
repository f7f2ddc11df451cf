"""Times the decoder on a model: reading a prompt, and generating, as llama-bench does.

Every model is measured in a process of its own, so that its peak of memory is its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.resolved import open_found
from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.generate import PREFILL_TOKENS, warm_up
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.run_info import device_name, use_threads, versions


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """What is timed: `prompt` tokens read, then `generated` tokens one by one, `rounds` times."""

    prompt: int = 512
    generated: int = 128
    rounds: int = 5
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of every round."""

    rounds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rounds)

    @property
    def deviation(self) -> float:
        """The standard deviation of the rounds; 0 of a single one."""
        return statistics.stdev(self.rounds) if len(self.rounds) > 1 else 0.0

    def to_json(self) -> Json:
        """The mean, the deviation and every round."""
        return {"mean": self.mean, "deviation": self.deviation, "rounds": list(self.rounds)}


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """The rates of a model (None where no token was asked for), and bytes of weights and of the peak."""

    model: str
    weight_bytes: int
    prompt: Rate | None
    generated: Rate | None
    peak_bytes: int
    device: str
    versions: dict[str, str]

    def to_json(self) -> Json:
        rates = {"prompt": self.prompt, "generated": self.generated}
        plain = {k: v for k, v in asdict(self).items() if k not in rates}
        return plain | {f"{k}_tokens_per_second": v.to_json() if v else None for k, v in rates.items()}


def measure(model: str, test: SpeedTest, revision: str | None = None) -> ModelSpeed:
    """The speed of one model, measured in a new process. Raises what opening the model raises."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_measure, model, test, revision).result()


def _measure(model: str, test: SpeedTest, revision: str | None) -> ModelSpeed:
    use_threads(test.threads)
    checkpoint = open_found(resolve(model, revision=revision))
    decoder = load_decoder(
        DecoderConfig.of(checkpoint.architecture),
        CheckpointWeights(checkpoint),
        device=test.device,
        dtype=None,
        layout=Layout.AUTO,
    )
    most = decoder.config.max_positions
    if max(test.prompt, test.generated) > most:
        raise BadRecipe(
            f"{model}: the model has {most:,} positions", f"use --prompt {most} --generate {most} or fewer"
        )
    warm_up(decoder, test.prompt or 1)
    rates = {"prompt": (_read, test.prompt), "generated": (_generate, test.generated)}
    found = {name: _rate(decoder, timed, tokens, test.rounds) for name, (timed, tokens) in rates.items()}
    nbytes = sum(tensor.nbytes for tensor in checkpoint.files.specs.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return ModelSpeed(
        model, nbytes, found["prompt"], found["generated"], peak, device_name(decoder), versions()
    )


def _rate(decoder: Decoder, timed: Callable[[Decoder, int], None], tokens: int, rounds: int) -> Rate | None:
    if not tokens:
        return None
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        timed(decoder, tokens)
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        times.append(tokens / (time.perf_counter() - started))
    return Rate(tuple(times))


def _read(decoder: Decoder, tokens: int) -> None:
    """Read a prompt of seeded random tokens, and compute the logits of what follows."""
    cache, random = decoder.cache(1, tokens), torch.Generator().manual_seed(0)
    prompt_T = torch.randint(decoder.config.vocab, (tokens,), generator=random).to(decoder.device)
    for part_T in torch.split(prompt_T, PREFILL_TOKENS):
        hidden_1TD = decoder.hidden(part_T[None], cache)
    decoder.logits(hidden_1TD[:, -1])


def _generate(decoder: Decoder, tokens: int) -> None:
    """Decode so many tokens one after another, each the likeliest after those before it."""
    cache = decoder.cache(1, tokens)
    token_1 = torch.zeros(1, dtype=torch.long, device=decoder.device)
    for _ in range(tokens):
        token_1 = decoder.decode(token_1, cache).argmax(-1)
