"""Makes decoders of real models' shapes with random weights, on the device and in the layout of its kernels.

Speed needs no checkpoint: any bits are codes, and scales are drawn so that weights have the standard
deviation 0.02 of a fresh model. Legend: C copies, N out features, G groups, of one tile's width each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evals.synthetic import SHAPES
from qconvert.core.dtypes import Json
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cuda.packing import FewRowWeight, MmaWeight, pack_scales
from qconvert.runtime.cuda.tiles import TILE
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.layer import Attention, Layer, Mlp
from qconvert.runtime.linear import Linear, Table
from qconvert.runtime.model import Decoder
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import frequencies
from qconvert.runtime.storage import DenseWeight, IntWeight

MODELS = ("qwen2.5-7b", "qwen2.5-1.5b", "qwen3-8b", "qwen2.5-0.5b", "qwen3-0.6b")
"""By how much hangs on them: what a budget cuts off is the end."""
QUANTIZED = ("int4", "int8")
FORMS = (*QUANTIZED, "bf16")
GROUP = 128
_DEVIATION = 0.02
_CODE_DEVIATION = {"int4": 4.61, "int8": 73.9}
"""Of codes that take all values alike: the square root of (levels^2 - 1) / 12."""

TINY: Json = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256,
              "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
"""What a dry run makes of every shape, of heads of 64 dimensions."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model's weights are held in: the form of its layers, and the bits of its head."""

    encoding: str
    head_bits: int

    @property
    def name(self) -> str:
        """In words: `int4, 8-bit head`."""
        return self.encoding if self.encoding == "bf16" else f"{self.encoding}, {self.head_bits}-bit head"


INT4, INT4_HEAD8, INT8, BF16 = Recipe("int4", 16), Recipe("int4", 8), Recipe("int8", 8), Recipe("bf16", 16)
RECIPES = (INT4, BF16, INT4_HEAD8, INT8)
"""In the order in which they are checked: those with targets first."""


def config_of(model: str, *, tiny: bool = False, layers: int | None = None) -> Json:
    """The config.json of a named shape; `tiny` for a dry run, `layers` for fewer of them."""
    config = dict(SHAPES[model])
    if tiny:
        config |= TINY | ({"head_dim": 64} if "head_dim" in config else {})
    return config if layers is None or tiny else config | {"num_hidden_layers": layers}


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of every product of a decode step."""
    c = config
    heads = (c.heads + 2 * c.kv_heads) * c.head_dim
    return {
        "qkv": (heads, c.hidden),
        "o": (c.hidden, c.heads * c.head_dim),
        "gate_up": (2 * c.mlp_width, c.hidden),
        "down": (c.hidden, c.mlp_width),
        "head": (c.vocab, c.hidden),
    }


def named_shapes(models: Sequence[str], *, tiny: bool = False) -> dict[tuple[int, int], str]:
    """Every shape of these models once, with the model and the product it is first met in."""
    met: dict[tuple[int, int], str] = {}
    for model in models:
        for name, shape in linear_shapes(DecoderConfig.from_hf(config_of(model, tiny=tiny))).items():
            met.setdefault(shape, f"{model} {name}")
    return met


class Maker:
    """Random weights on a device, from a seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, deviation: float = 1.0, centre: float = 0.0) -> Tensor:
        """Normally distributed bfloat16."""
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return x.normal_(centre, deviation, generator=self._generator)

    def weights(self, encoding: str, out: int, width: int, copies: int) -> list[FewRowWeight]:
        """Several weights of one shape, `encoding` of FORMS; groups of 128, symmetric, bfloat16 scales."""
        if encoding == "bf16":
            return [DenseWeight(w) for w in self.normal(copies, out, width, deviation=_DEVIATION)]
        bits = 4 if encoding == "int4" else 8
        tiles, across = -(-out // TILE), -(-width // TILE)
        words = torch.empty(copies, tiles, across, bits, TILE, 4, dtype=torch.int32, device=self.device)
        words.random_(-(1 << 31), 1 << 31, generator=self._generator)
        scales_CNG = self._scales(encoding, copies, tiles * TILE, across)
        scales_CNG[:, out:] = 0
        return [
            MmaWeight(each, pack_scales(scales_NG, 1), None, GROUP, (out, width), bits)
            for each, scales_NG in zip(words, scales_CNG, strict=True)
        ]

    def int8_head(self, out: int, width: int) -> IntWeight:
        """A head of 8 bits as the decoder holds one: a float32 scale per word."""
        codes_OI = torch.empty(out, width, dtype=torch.uint8, device=self.device)
        codes_OI.random_(0, 256, generator=self._generator)
        scales_O1 = self._scales("int8", out, 1).float()
        return IntWeight(codes_OI, scales_O1, 128, width, torch.float32, "int8")

    def _scales(self, encoding: str, *shape: int) -> Tensor:
        """Within a factor of three of each other, as in real checkpoints."""
        x = torch.empty(shape, device=self.device).uniform_(0.5, 1.5, generator=self._generator)
        return (x * (_DEVIATION / _CODE_DEVIATION[encoding])).bfloat16()


def make_decoder(config: Json, recipe: Recipe, maker: Maker) -> Decoder:
    """A decoder of a config's shape, its weights random."""
    c, device = DecoderConfig.from_hf(config), maker.device
    shapes = linear_shapes(c)

    def linear(name: str, biased: bool = False) -> Linear:
        (weight,) = maker.weights(recipe.encoding, *shapes[name], copies=1)
        return Linear(weight, maker.normal(shapes[name][0], deviation=_DEVIATION) if biased else None)

    def norm(width: int) -> Norm:
        return Norm(maker.normal(width, deviation=_DEVIATION, centre=1.0), c.norm_eps)

    def layer(i: int) -> Layer:
        attention = Attention(
            layer=i,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            window=c.windows[i],
            qkv=(linear("qkv", "attn.qkv" in c.biased),),
            q_norm=norm(c.head_dim) if c.qk_norm else None,
            k_norm=norm(c.head_dim) if c.qk_norm else None,
            o=linear("o"),
        )
        mlp = Mlp(gate_up=(linear("gate_up"),), down=linear("down"))
        return Layer(norm(c.hidden), attention, norm(c.hidden), mlp)

    embed = DenseWeight(maker.normal(c.vocab, c.hidden, deviation=_DEVIATION))
    head: Table = embed
    if recipe.head_bits == 8:
        head = maker.int8_head(c.vocab, c.hidden)
    elif not c.tied:
        head = DenseWeight(maker.normal(c.vocab, c.hidden, deviation=_DEVIATION))
    return Decoder(
        config=c,
        dtype=torch.bfloat16,
        layout=Layout.AUTO,
        embed=embed,
        layers=tuple(layer(i) for i in range(c.layers)),
        norm=norm(c.hidden),
        head=head,
        frequencies_F=frequencies(c.rope, c.head_dim).to(device),
    )


def dense(weight: object, dtype: torch.dtype) -> Tensor:
    """All rows of any weight in `dtype`, decoded in float32."""
    if isinstance(weight, MmaWeight):
        weight = replace(weight, dtype=torch.float32)
    rows: Callable[[slice], Tensor] = weight.rows  # type: ignore[attr-defined]
    return rows(slice(None)).to(dtype)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that every token of a decode step reads: linears and head."""
    total = decoder.head.nbytes
    for layer in decoder.layers:
        assert isinstance(layer.mlp, Mlp)
        used = [*layer.attention.qkv, layer.attention.o, *layer.mlp.gate_up, layer.mlp.down]
        total += sum(linear.weight.nbytes for linear in used)
    return total


def kv_bytes(config: DecoderConfig, context: int) -> int:
    """Bytes of the keys and values, in bfloat16, that attention reads after `context` tokens."""
    return config.layers * 2 * config.kv_heads * config.head_dim * context * 2


def read_flops(config: DecoderConfig, tokens: int, window: int) -> float:
    """Operations of reading `tokens` in windows: products, head, and the causal half of attention.

    Two per weight and token; for every pair of a query and a key, two per dimension of a head for
    the score and two for the value.
    """
    shapes = linear_shapes(config)
    head = shapes["head"][0] * shapes["head"][1]
    layer = sum(out * width for name, (out, width) in shapes.items() if name != "head")
    pairs = window / 2
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    return tokens * (2.0 * (config.layers * layer + head) + attention)
