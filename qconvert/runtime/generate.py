"""Generates text with a decoder, one token at a time, and chooses the next token.

Legend: V vocabulary, T tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qconvert.errors import QConvertError
from qconvert.runtime.model import Decoder

WARM_UP_TOKENS = 32
"""Tokens read to warm up: enough rows for the kernels that prompts use."""
PREFILL_TOKENS = 512
"""Tokens of a prompt that are read together, so that a long one needs no more memory than a short one."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses the next token: the likeliest at temperature 0, else by chance.

    `top_p` keeps the likeliest tokens whose probabilities sum to at least that much (Holtzman et
    al., arXiv 1904.09751). The same seed gives the same text on the same machine.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _generator: torch.Generator = field(init=False, default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self._generator.manual_seed(self.seed)

    def choose(self, logits_V: Tensor) -> int:
        if self.temperature == 0:
            # On a CPU not by torch: its threads would spin for a while beside those of the next step.
            return int(logits_V.numpy().argmax() if logits_V.device.type == "cpu" else logits_V.argmax())
        below_V = logits_V.double().cpu() - logits_V.max()  # no temperature, however low, makes infinity of 0
        p_V, order_V = (below_V / self.temperature).softmax(-1).sort(descending=True)
        before_V = p_V.cumsum(-1) - p_V
        kept_V = p_V.where(before_V < self.top_p, 0.0)
        return int(order_V[torch.multinomial(kept_V, 1, generator=self._generator)])


def decodes_weights(decoder: Decoder) -> bool:
    """Whether weights are in a form without a kernel, so that every product decodes them again."""
    linears = (linear for layer in decoder.layers for linear in layer.attention.linears)
    return any(linear.weight.kind == "encoded" for linear in linears)


def warm_up(decoder: Decoder, prompt_tokens: int) -> None:
    """Run everything once on a few tokens, so that no kernel is compiled, or loaded, while a text is read."""
    cache = decoder.cache(1, WARM_UP_TOKENS + 1)
    few = max(1, min(prompt_tokens, WARM_UP_TOKENS, decoder.config.max_positions - 1))
    decoder.prefill(torch.zeros(1, few, dtype=torch.long, device=decoder.device), cache)
    decoder.decode(torch.zeros(1, dtype=torch.long, device=decoder.device), cache)


def generate(
    decoder: Decoder, prompt: Sequence[int], limit: int, sampler: Sampler, stops: frozenset[int]
) -> Iterator[int]:
    """Tokens that follow the prompt, at most `limit`; ends before a token of `stops`.

    Raises QConvertError for a prompt that is empty or fills all positions of the model; fewer than
    `limit` tokens come when the positions run out.
    """
    room = decoder.config.max_positions - len(prompt)
    if not prompt or room < 1:
        raise QConvertError(
            f"prompt: {len(prompt)} tokens, where the model reads 1 to {decoder.config.max_positions - 1}",
            "give a prompt of fewer tokens" if prompt else "give a prompt of at least one token",
        )
    limit = min(limit, room)
    cache = decoder.cache(1, len(prompt) + limit)
    prompt_T = torch.tensor(prompt, device=decoder.device)
    for part_T in torch.split(prompt_T, PREFILL_TOKENS):
        hidden_1TD = decoder.hidden(part_T[None], cache)
    logits_V = decoder.logits(hidden_1TD[:, -1])[0]
    for left in reversed(range(limit)):
        token = sampler.choose(logits_V)
        if token in stops:
            return
        yield token
        if left:
            logits_V = decoder.decode(torch.tensor([token], device=decoder.device), cache)[0]
