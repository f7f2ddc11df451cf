"""Matmuls of others, each fed a weight of its own format: what ours are timed beside.

What is not installed, or has no kernel for this device, says so by `here`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evals.gpu.models import GROUP, Maker

_INNER_TILES = 8
"""Tiles of 16 columns that lie together in the layout of tinygemm: what allows 16-byte loads."""


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A weight in a peer's format: `multiply(x_MK)`, what the weight is worth, and its bytes."""

    multiply: Callable[[Tensor], Tensor]
    dense_NK: Callable[[], Tensor]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Whose kernel, of which form of weight, whether it is here, and how one of its weights is made."""

    via: str
    encoding: str
    here: Callable[[], bool]
    make: Callable[[Maker, tuple[int, int]], PeerCall]

    @property
    def subject(self) -> str:
        """What its check is called."""
        return f"peer {self.via}"


def _dense(maker: Maker, shape: tuple[int, int]) -> PeerCall:
    w_NK = maker.normal(*shape, deviation=0.02)
    return PeerCall(lambda x_MK: F.linear(x_MK, w_NK), lambda: w_NK, w_NK.nbytes)


def _torch_int4(maker: Maker, shape: tuple[int, int]) -> PeerCall:
    """tinygemm: `(code - 8) * scale + offset`; on CUDA the high half of a byte is the even column."""
    out, width = shape
    device = maker.device
    codes_NK = torch.randint(16, shape, dtype=torch.uint8, device=device)
    scales_NG = (maker.normal(out, width // GROUP, deviation=0.001, centre=0.004)).abs()
    pairs_GN2 = torch.stack((scales_NG, torch.zeros_like(scales_NG)), -1).transpose(0, 1).contiguous()
    if device.type == "cuda":
        packed = torch.ops.aten._convert_weight_to_int4pack(
            (codes_NK[:, ::2] << 4) | codes_NK[:, 1::2], _INNER_TILES
        )
        multiply = torch.ops.aten._weight_int4pack_mm
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK.int(), _INNER_TILES)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu

    def dense() -> Tensor:
        return ((codes_NK.float() - 8).view(out, -1, GROUP) * scales_NG.float()[..., None]).view(shape)

    return PeerCall(
        lambda x_MK: multiply(x_MK, packed, GROUP, pairs_GN2),
        dense,
        packed.nbytes + pairs_GN2.nbytes,
    )


def _bitsandbytes_nf4(maker: Maker, shape: tuple[int, int]) -> PeerCall:
    """Blocks of 64, float32 magnitudes: what its `Linear4bit` holds without double quantization."""
    import bitsandbytes as bnb

    api: Any = bnb
    packed, state = api.functional.quantize_4bit(
        maker.normal(*shape, deviation=0.02), blocksize=64, quant_type="nf4"
    )
    return PeerCall(
        lambda x_MK: api.matmul_4bit(x_MK, packed.t(), quant_state=state),
        lambda: api.functional.dequantize_4bit(packed, state),
        packed.nbytes + state.absmax.nbytes,
    )


KERNEL_PEERS = (
    Peer("F.linear", "bf16", lambda: True, _dense),
    Peer("torch int4", "int4", lambda: True, _torch_int4),
    Peer("bitsandbytes", "nf4", lambda: find_spec("bitsandbytes") is not None, _bitsandbytes_nf4),
)
