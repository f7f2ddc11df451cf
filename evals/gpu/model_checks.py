"""Models of two layers against the decoder that defines them, computed in float32.

Rounding to bfloat16 along the way is allowed, and its size depends on the weights; so the limit is what the
same decoder in plain torch makes of them in bfloat16, and half as much again.
Legend: T tokens, V vocabulary, N tokens with a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from evals.gpu.comparing import distance, repeated
from evals.gpu.job import Job, attempt
from evals.gpu.models import Recipe, config_of, dense_twin, make_decoder
from evals.gpu.reading import read_losses
from evals.gpu.rows import Check, Row
from qconvert.runtime.cuda.decode_step import open_step, read
from qconvert.runtime.model import Decoder

ROUNDING_FACTOR, DRY_FACTOR = 1.5, 3.0
"""Triton's interpreter truncates to bfloat16 where a device rounds, which is twice as far on average."""
TOKENS, DRY_TOKENS = 150, 40
"""Into a third block of the positions that attention reads at a time."""
DRY_STEPS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, a text, and its logits: as defined, in float32, and in bfloat16."""

    job: Job
    recipe: Recipe
    case: str
    decoder: Decoder
    text_T: Tensor
    want_TV: Tensor
    near_TV: Tensor

    def check(self, what: str, result: Tensor, want: Tensor, near: Tensor, stable: bool) -> Check:
        """As near to what is wanted as plain torch comes in bfloat16, or half as far again."""
        limit = (DRY_FACTOR if self.job.dry else ROUNDING_FACTOR) * distance(near, want)
        return Check(f"{what} {self.recipe.name}", self.case, distance(result, want), limit, stable)


def check_model(job: Job, model: str, recipe: Recipe) -> Iterator[Row]:
    """Reading at once, the losses of an evaluation, and a step for every token."""
    trial = _trial(job, model, recipe)
    for what, part in (("reading", _read_at_once), ("losses", _losses), ("step", _stepped)):
        yield from attempt(job, f"{what} {trial.case}", partial(part, trial))


def _trial(job: Job, model: str, recipe: Recipe) -> Trial:
    decoder = make_decoder(config_of(model, tiny=job.dry, layers=2), recipe, job.maker)
    tokens = DRY_TOKENS if job.dry else TOKENS
    text_T = torch.randint(decoder.config.vocab, (tokens,), device=job.device)
    twins = (dense_twin(decoder, dtype) for dtype in (torch.float32, torch.bfloat16))
    want_TV, near_TV = (twin.logits(twin.hidden(text_T[None]))[0] for twin in twins)
    return Trial(job, recipe, f"{model}, {tokens} tokens", decoder, text_T, want_TV, near_TV)


def _read_at_once(trial: Trial) -> Iterator[Check]:
    decoder, text_1T = trial.decoder, trial.text_T[None]
    got_TV, stable = repeated(trial.job, lambda: decoder.logits(decoder.hidden(text_1T))[0])
    yield trial.check("reading", got_TV, trial.want_TV, trial.near_TV, stable)


def _losses(trial: Trial) -> Iterator[Check]:
    """Losses about the mean of what they should be, which is most of them."""
    targets_N1 = trial.text_T[1:, None]
    want_N, near_N = (
        x_TV[:-1].double().log_softmax(-1).gather(1, targets_N1)[:, 0].neg()
        for x_TV in (trial.want_TV, trial.near_TV)
    )

    def losses() -> Tensor:
        track = read_losses(trial.decoder, trial.text_T.cpu().numpy(), len(trial.text_T))
        return torch.from_numpy(track.nll[0]).to(want_N.device)

    got_N, stable = repeated(trial.job, losses)
    mean = want_N.mean()
    yield trial.check("reading", got_N - mean, want_N - mean, near_N - mean, stable)


def _stepped(trial: Trial) -> Iterator[Check]:
    """Token by token from an empty cache, which is full of NaN."""
    text_T = trial.text_T[:DRY_STEPS] if trial.job.dry else trial.text_T
    cache = trial.decoder.cache(1, len(text_T))
    step = open_step(trial.decoder, cache)

    def run() -> Tensor:
        cache.kv.fill_(torch.nan)
        cache.length = 0
        return torch.stack([read(step, token_1)[0].clone() for token_1 in text_T[:, None]])

    got_TV, stable = repeated(trial.job, run)
    steps = len(text_T)
    yield trial.check("step", got_TV, trial.want_TV[:steps], trial.near_TV[:steps], stable)
