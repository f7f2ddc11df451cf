"""Declares the arguments of the CPU kernels: flat records of sizes and byte addresses.

Addresses are those of tensors and arrays that the maker of a record keeps alive. A missing array
has the address 0. All sizes count elements; fields are int64 but for single numbers.
"""

from __future__ import annotations

import numpy as np

F32, BF16, F16, I8 = range(4)
"""Types of numbers of groups: float32, bf16, f16; int8 to be multiplied by a float32."""

_NUMBER = np.int64

LINEAR = np.dtype(
    [
        *((name, _NUMBER) for name in ("kernel", "rows", "width", "bias")),
        *((name, _NUMBER) for name in ("codes", "table", "group", "zeros", "zero")),
        *((name, _NUMBER) for name in ("number_type", "scales", "supers", "mins", "super_mins", "shared")),
        *((name, np.float32) for name in ("divisor", "factor", "unit")),
        ("rounded_bits", np.int32),
        ("least", np.float32),
    ],
    align=True,
)
"""`y = W x + bias` with W [rows, width]; `kernel` is the address of the code that multiplies by it.

Of a dense weight, `codes` are its numbers. Of a grid, `group` neighbours in a row share a scale, and a
weight is worth `(code - zero) * scale / divisor * factor + min`, or `number * scale / divisor` where a
`table` (see `coded_dots.py`) has numbers for codes; its whole numbers count `unit` each. `zeros` are int8,
one per group, or none: then `zero` holds for all. Scales and mins (or none) are of `number_type`; of
`I8` ones, `shared` neighbours have one in `supers` and `super_mins`. Where `rounded_bits` is not 0,
decoding rounds product and sum to that many bits of fraction, numbers below `least` to its steps.
"""

LAYER = np.dtype(
    [
        *((name, LINEAR) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _NUMBER) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _NUMBER) for name in ("window", "keys", "values")),
    ],
    align=True,
)
"""One block of a dense decoder; norms are float32, keys and values [K, room, E] of the cache."""

MODEL = np.dtype(
    [
        *((name, _NUMBER) for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp_width")),
        *((name, _NUMBER) for name in ("position", "room", "bf16_cache", "arrived")),
        *((name, _NUMBER) for name in ("x", "qkv", "mixed", "inner", "cos", "sin", "logits")),
        ("final_norm", _NUMBER),
        ("head", LINEAR),
        ("eps", np.float32),
    ],
    align=True,
)
"""Sizes, the position of the token at hand, and the buffers that threads share.

`arrived` is the counter of `thread_barrier.wait_for_all`. Buffers are float32: x [hidden], qkv and mixed
(attention's output) by heads, inner [mlp_width], cosines and signed sines [head_dim], logits.
"""

THREAD = np.dtype([(name, _NUMBER) for name in ("normal", "gates", "head", "rotated", "scores")])
"""The buffers that each thread has for itself, float32.

normal [hidden]: a normalised input, or products before they are added; gates [2 mlp_width]; head and
rotated [head_dim]; scores [room, rounded up to 16].
"""
