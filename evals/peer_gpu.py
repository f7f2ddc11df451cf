"""Runs matmuls and models of other libraries on a GPU, each with weights of its own format.

A library that is not installed says so by `here`. Models have random weights of the same shapes, and a
static cache, so that a step of theirs can be captured in a CUDA graph as ours is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evals.random_models import GROUP, Maker
from qconvert.core.dtypes import Json

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


class PeerModel:
    """A transformers model, one token after another, the likeliest first; bfloat16, or NF4 layers."""

    def __init__(self, config: Json, room: int, device: torch.device, *, nf4: bool = False) -> None:
        import transformers

        api: Any = transformers
        fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        with torch.device(device):
            hf_config = api.AutoConfig.for_model(config["model_type"], **fields)
            self.model = api.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).eval()
        if nf4:
            _into_nf4(self.model)
        self.cache: Any = api.StaticCache(config=self.model.config, max_cache_len=room)
        self.token_11 = torch.full((1, 1), 7, device=device)
        self.step()  # the cache takes its memory at the first call

    @torch.no_grad()
    def step(self) -> None:
        """Read the token, and put the likeliest one after it in its place."""
        out = self.model(self.token_11, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token_11.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

    def restart(self, context: int) -> None:
        """Fill the cache as if `context` tokens had been read: which ones does not matter to speed."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(context)
            layer.keys.normal_()
            layer.values.normal_()

    @torch.no_grad()
    def read(self, ids_BT: Tensor) -> None:
        """Compute the loss of windows as transformers does, logits in bfloat16."""
        self.model(ids_BT, labels=ids_BT, use_cache=False)

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads: all weights, the embedding only where it is the head too."""
        embed, head = self.model.get_input_embeddings().weight, self.model.lm_head.weight
        read = [p for p in self.model.parameters() if p is not embed and p is not head]
        states = (getattr(p, "quant_state", None) for p in read)
        return int(head.nbytes + sum(p.nbytes for p in read) + sum(s.absmax.nbytes for s in states if s))


def _into_nf4(model: Any) -> None:
    """Put bitsandbytes' 4-bit linears in place of a model's own, but for the head, as transformers does."""
    import bitsandbytes as bnb

    api: Any = bnb
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    for name, old in linears:
        if name == "lm_head":
            continue
        options = {"compress_statistics": False, "quant_type": "nf4"}
        with torch.device("meta"):
            new = api.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16, **options
            )
        weight = api.nn.Params4bit(old.weight.data.cpu(), requires_grad=False, module=new, **options)
        new.weight, new.bias = weight.to(old.weight.device), old.bias  # quantized on arrival
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new.eval())
