"""Computes a decoder-only transformer in plain torch: the families of `graphs.py`.

The specification that faster kernels are measured against: within rounding of transformers in
float32, on any device, from dense or packed weights, fused or not. What a layer computes is in
`layer.py`; `load.py` builds the model. Legend: B batch, T tokens, D hidden, V vocabulary, N = B T rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.core.activations import INT8_GROUPS, InputQuantization
from qconvert.errors import QConvertError
from qconvert.models.rope import LongScaling
from qconvert.runtime.beside import LayerInputs
from qconvert.runtime.cache import Cache
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.input_rounding import round_inputs
from qconvert.runtime.layer import Layer
from qconvert.runtime.linear import Table
from qconvert.runtime.norm import Norm
from qconvert.runtime.observers import InputKey, Observer, Observers, Tap
from qconvert.runtime.precision import exact_products
from qconvert.runtime.rope import Rotation, cos_sin
from qconvert.runtime.scoring import Outputs
from qconvert.runtime.storage import DenseWeight

Step = Callable[[int, Cache], Tensor]
"""Reads one token of one sequence into the cache; gives the logits of what follows, float32 [V]."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that turns tokens into hidden states, and hidden states into logits.

    `hidden` and `logits` are apart so that evaluations can run many chunks through a layer at once,
    yet never hold [tokens, vocabulary] in full. Token ids must be below `config.vocab`. `step` is a
    faster way to decode a single sequence, where there is one. `embed_scale` multiplies embeddings,
    `layer_inputs` makes what Gemma 4's layers read of the tokens, and `head_inputs` says what hidden states
    are rounded to before the head.
    """

    config: DecoderConfig
    dtype: torch.dtype
    layout: Layout
    embed: Table
    layers: Sequence[Layer]
    norm: Norm
    head: Table
    frequencies_F: Tensor
    step: Step | None = None
    local_frequencies_F: Tensor | None = None
    embed_scale: float = 1.0
    layer_inputs: LayerInputs | None = None
    observers: Observers = field(default_factory=Observers)
    head_inputs: InputQuantization | None = None

    def __repr__(self) -> str:
        shape = f"{len(self.layers)} layers, hidden size {self.config.hidden}, {self.config.vocab:,} words"
        return f"Decoder {self.config.model_type}: {shape}, computes in {self.dtype}"

    def without_tables(self) -> Decoder:
        """This model without its embedding and head, to follow activations from layer to layer."""
        none = DenseWeight(torch.empty(0, self.config.hidden))
        return replace(self, embed=none, head=none, layer_inputs=None)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where the results come back."""
        return self.frequencies_F.device

    @property
    def is_plain(self) -> bool:
        """Whether the compiled decode steps compute it, given weights that they can read."""
        special = (self.embed_scale, self.config.logit_cap) != (1.0, None) or not self.norm.is_plain
        special |= self.head_inputs not in (None, INT8_GROUPS)  # of few rows
        whole = self.config.rope.share == 1 and not isinstance(self.config.rope.scaling, LongScaling)
        return whole and not special and all(layer.is_plain for layer in self.layers)

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D] in the compute dtype.

        Positions count from 0, or from the end of the cache, which then holds these tokens too.
        """
        new = tokens_BT.shape[1]
        start = 0 if cache is None else cache.length
        if cache is not None:
            self._check_room(cache, new)
        rotations, x_BTD = self.rotations(start, start + new), self.embedded(tokens_BT)
        with exact_products():
            for layer in self.layers:
                x_BTD = layer(x_BTD, rotations, cache)
        if cache is not None:
            cache.length += new
        h_BTD = self.normalised(x_BTD)
        if self.observers.linears:
            Tap(InputKey(("lm_head",)), self.observers.linears).show(h_BTD)
        return h_BTD

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """What the first layer reads, [B, T, D] in the compute dtype; of some models with more beside it."""
        x_BTD = self.embed.rows(tokens_BT.flatten()).view(*tokens_BT.shape, -1)
        if self.embed_scale != 1:
            x_BTD = x_BTD * torch.tensor(self.embed_scale, dtype=x_BTD.dtype)
        if self.layer_inputs is not None:
            x_BTD = torch.cat((x_BTD, self.layer_inputs(tokens_BT, x_BTD)), dim=-1)
        shared = self.config.stream - x_BTD.shape[-1]  # keys and values, which are not computed yet
        return F.pad(x_BTD, (0, shared)) if shared else x_BTD

    def normalised(self, x_BTS: Tensor) -> Tensor:
        """What the head reads of what the last layer gives, [B, T, D]."""
        return self.norm(x_BTS[..., : self.config.hidden])

    def rotations(self, start: int, stop: int) -> list[Rotation]:
        """The rotations of positions [start, stop), which every layer reads."""
        both = ((self.config.rope, self.frequencies_F), (self.config.local_rope, self.local_frequencies_F))
        return [
            cos_sin(rope, frequencies_F, start, stop)
            for rope, frequencies_F in both
            if rope is not None and frequencies_F is not None
        ]

    @torch.inference_mode()
    def logits(self, h_XD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits of vocabulary rows [start, stop) (default: all), float32 [..., stop - start]."""
        stop = self.config.vocab if stop is None else stop
        return self.outputs(h_XD.flatten(0, -2)).logits(start, stop).view(*h_XD.shape[:-1], -1)

    def outputs(self, h_ND: Tensor) -> Outputs:
        """Hidden states beside the head that makes logits of them, for `score_hidden`."""
        if self.head_inputs == INT8_GROUPS:
            return Outputs(h_ND, self.head, self.config.logit_cap, INT8_GROUPS)
        if self.head_inputs is not None:
            h_ND = round_inputs(h_ND, self.head_inputs)
        return Outputs(h_ND, self.head, self.config.logit_cap)

    @contextmanager
    def observing(self, observer: Observer, *, norms: bool = False) -> Iterator[None]:
        """Call `observer` with every input of a linear (and of a norm, with `norms`) inside the block.

        The head's input is that of all positions, under the role `lm_head`. Compiled decode steps, which
        show nothing, are not used meanwhile.
        """
        lists = [self.observers.linears, self.observers.norms] if norms else [self.observers.linears]
        for each in lists:
            each.append(observer)
        try:
            yield
        finally:
            for each in lists:
                each.remove(observer)

    def cache(self, batch: int, room: int) -> Cache:
        """An empty cache for `batch` sequences of up to `room` tokens.

        Raises QConvertError saying its size where the device has not that much memory.
        """
        kept = self.config.cached
        try:
            return Cache.empty(kept, batch, room, self.dtype, self.device)
        except RuntimeError as error:  # also torch.OutOfMemoryError
            gigabytes = sum(map(math.prod, kept)) * batch * room * self.dtype.itemsize / 1e9
            raise QConvertError(
                f"{room:,} tokens: their keys and values need {gigabytes:,.2f} GB, which are not free",
                "ask for fewer tokens, or give a shorter prompt",
            ) from error

    def _check_room(self, cache: Cache, new: int) -> None:
        if cache.length + new > cache.room:
            raise QConvertError(
                f"prompt: {cache.length} + {new} tokens do not fit the cache of {cache.room}",
                "ask for a longer cache or a shorter prompt",
            )

    def prefill(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """Read a prompt, or the next part of one; logits after its last token, float32 [B, V]."""
        return self.logits(self.hidden(tokens_BT, cache)[:, -1])

    def decode(self, token_B: Tensor, cache: Cache) -> Tensor:
        """Read one more token of each sequence; logits of what follows, float32 [B, V]."""
        if self.step is not None and len(token_B) == 1 and not self.observers.present:
            self._check_room(cache, 1)
            return self.step(int(token_B), cache)[None]
        return self.prefill(token_B[:, None], cache)
