"""Computes gated delta nets, which stand in the place of attention: Qwen3-Next, Qwen3.5.

A head keeps a matrix of what it has seen instead of all keys and values: every token lets it decay, takes out
what the matrix holds under its key, and writes its value there (arXiv 2412.06464; transformers'
`modeling_qwen3_next`). Queries, keys and values have first gone through a short convolution over time.
Legend: B batch, T tokens, D hidden, C channels of the convolution, H value heads, K key dim, V value dim,
S the tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.attention import by_head
from qconvert.runtime.cache import Cache
from qconvert.runtime.config import DeltaSizes
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import Rotation

CHUNK = 64
"""Tokens whose products are made together; results do not depend on it but for rounding."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net of one layer.

    `reading` are four linears of one input, to queries with keys and values, to gates, to what is written
    and to decays; or two, which give all of a key head side by side: the first two of these together, and
    the others (Qwen3-Next).
    """

    layer: int
    sizes: DeltaSizes
    reading: Sequence[Linear]
    conv_C1K: Tensor
    decay_H: Tensor
    step_bias_H: Tensor
    norm: Norm
    o: Linear

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.reading, self.o]

    def mixed(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        """What the output projection reads: the normalised and gated values of all heads, [B, T, H V]."""
        sizes = self.sizes
        qkv_BTC, gate_BTHV, write_BTH, step_BTH = self._read(x_BTD)
        before_BTC, state_BHKV = self._state(qkv_BTC, cache)
        all_BTC = torch.cat((before_BTC, qkv_BTC), dim=1)
        mixed_BCT = F.conv1d(all_BTC.transpose(1, 2), self.conv_C1K, groups=len(self.conv_C1K))
        q, k, v = torch.split_with_sizes(
            F.silu(mixed_BCT).transpose(1, 2).float(), (sizes.keys, sizes.keys, sizes.values), dim=-1
        )
        decay_BTH = -self.decay_H.exp() * F.softplus(step_BTH.float() + self.step_bias_H)
        y_BHTV, state_BHKV = delta_rule(
            self._unit(q) * sizes.key_dim**-0.5,
            self._unit(k),
            by_head(v, sizes.value_heads).transpose(1, 2),
            decay_BTH.transpose(1, 2),
            write_BTH.float().sigmoid().transpose(1, 2),
            state_BHKV,
        )
        if cache is not None:
            last_BTC = all_BTC[:, all_BTC.shape[1] - before_BTC.shape[1] :].clone()
            cache.states[self.layer] = last_BTC, state_BHKV
        y_BTHV = self.norm(y_BHTV.transpose(1, 2).to(x_BTD.dtype))
        return (y_BTHV * F.silu(gate_BTHV.float())).to(x_BTD.dtype).flatten(-2)

    def _read(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, C], gates [B, T, H, V], what is written and decays [B, T, H]."""
        sizes = self.sizes
        if len(self.reading) == 4:
            qkv, gate, write, step = (linear(x_BTD) for linear in self.reading)
            return qkv, by_head(gate, sizes.value_heads), write, step
        heads, share = sizes.key_heads, sizes.value_heads // sizes.key_heads
        values = share * sizes.value_dim
        both, gates = (by_head(linear(x_BTD), heads) for linear in self.reading)
        parts = torch.split_with_sizes(both, (sizes.key_dim, sizes.key_dim, values, values), dim=-1)
        q, k, v, gate = (part.flatten(-2) for part in parts)
        write, step = (part.flatten(-2) for part in torch.split(gates, share, dim=-1))
        return torch.cat((q, k, v), dim=-1), by_head(gate, sizes.value_heads), write, step

    def _state(self, qkv_BTC: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """What the convolution reads of tokens before these, and the matrices that they left."""
        if cache is not None and self.layer in cache.states:
            before_BTC, state_BHKV = cache.states[self.layer]
            return before_BTC, state_BHKV
        sizes, (batch, _, channels) = self.sizes, qkv_BTC.shape
        shape = batch, sizes.value_heads, sizes.key_dim, sizes.value_dim
        state_BHKV = torch.zeros(shape, device=qkv_BTC.device)
        return qkv_BTC.new_zeros(batch, sizes.kernel - 1, channels), state_BHKV

    def _unit(self, x_BTX: Tensor) -> Tensor:
        """Queries or keys of length 1, each for all value heads that share it: [B, H, T, K]."""
        x_BTHK = by_head(x_BTX, self.sizes.key_heads)
        x_BTHK = x_BTHK * torch.rsqrt(x_BTHK.square().sum(-1, keepdim=True) + _EPS)
        return x_BTHK.repeat_interleave(self.sizes.value_heads // self.sizes.key_heads, dim=2).transpose(1, 2)


def delta_rule(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    decay_BHT: Tensor,
    write_BHT: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """What the heads give for each token, [B, H, T, V], and the matrix after the last one; all float32.

    For one token after the other, `S <- e^decay S + k (write (v - e^decay k S))` and `y = q S`. Of a chunk
    the values that are written solve one triangular system (arXiv 2406.06484, section 3.2).
    """
    given = []
    for start in range(0, q_BHTK.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        q, k, v, write = q_BHTK[:, :, chunk], k_BHTK[:, :, chunk], v_BHTV[:, :, chunk], write_BHT[:, :, chunk]
        total_BHS = decay_BHT[:, :, chunk].cumsum(-1)
        later_SS = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        between_BHSS = (
            (total_BHS[..., None] - total_BHS[..., None, :]).masked_fill(later_SS, -torch.inf).exp()
        )
        since_BHS1 = total_BHS.exp()[..., None]
        system_BHSS = write[..., None] * (k @ k.mT) * between_BHSS
        missing_BHSV = write[..., None] * (v - since_BHS1 * (k @ state_BHKV))
        written_BHSV = torch.linalg.solve_triangular(
            system_BHSS, missing_BHSV, upper=False, unitriangular=True
        )
        given.append(since_BHS1 * (q @ state_BHKV) + ((q @ k.mT) * between_BHSS) @ written_BHSV)
        left_BHS1 = (total_BHS[..., -1:] - total_BHS).exp()[..., None]
        state_BHKV = since_BHS1[:, :, -1:] * state_BHKV + (k * left_BHS1).mT @ written_BHSV
    return torch.cat(given, dim=2), state_BHKV
