"""What the kernels are told of a model: flat records of sizes and byte addresses.

Addresses are those of tensors and arrays that the maker of a record keeps alive. A missing array
has the address 0. All sizes count elements; all fields are int64 but for `eps`.
"""

from __future__ import annotations

import numpy as np

FLOAT, BRAIN, INT8, INT4 = range(4)
"""Kinds of a linear: float32 or bfloat16 numbers; int8, or nibbles in words, with scales."""

_NUMBER = np.int64

LINEAR = np.dtype(
    [
        (name, _NUMBER)
        for name in (
            "kind",
            "codes",
            "scales",
            "brain_scales",
            "zeros",
            "zero",
            "group",
            "rows",
            "width",
            "bias",
        )
    ]
)
"""`y = W x + bias` with W [rows, width], of which `group` neighbours in a row share a scale.

`scales` are bfloat16 where `brain_scales` is 1, else float32; `zeros` int8, one per scale, or none:
then `zero` holds for all. A bias is float32.
"""

LAYER = np.dtype(
    [
        ("attention_norm", _NUMBER),
        ("qkv", LINEAR),
        ("q_norm", _NUMBER),
        ("k_norm", _NUMBER),
        ("o", LINEAR),
        ("mlp_norm", _NUMBER),
        ("gate_up", LINEAR),
        ("down", LINEAR),
        ("window", _NUMBER),
        ("keys", _NUMBER),
        ("values", _NUMBER),
    ]
)
"""One block of a dense decoder; norms are float32, keys and values [K, room, E] of the cache."""

MODEL = np.dtype(
    [
        *((name, _NUMBER) for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp_width")),
        *((name, _NUMBER) for name in ("position", "room", "brain_cache", "turn")),
        *((name, _NUMBER) for name in ("x", "qkv", "mixed", "inner", "cos", "sin", "logits")),
        ("final_norm", _NUMBER),
        ("head", LINEAR),
        ("eps", np.float32),
    ],
    align=True,
)
"""Sizes, the position of the token at hand, and the buffers that threads share.

`turn` is the counter of `team.meet`. Buffers are float32: x [hidden], qkv and mixed (attention's
output) by heads, inner [mlp_width], cosines and signed sines [head_dim], logits.
"""

THREAD = np.dtype([(name, _NUMBER) for name in ("normal", "gates", "head", "turned", "scores")])
"""The buffers that each thread has for itself, float32.

normal [hidden]: a normalised input, or products before they are added; gates [2 mlp_width]; head and
turned [head_dim]; scores [room, rounded up to 16].
"""
