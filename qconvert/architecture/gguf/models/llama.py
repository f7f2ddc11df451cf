"""llama.cpp's `llama` and the models that it runs in that graph.

Its rotary embedding turns neighbours, not halves, so the rows of q and k change places.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.architecture.gguf import keys as k
from qconvert.architecture.gguf.model import Facts, GGUFModel, Written


def head_rows(facts: Facts) -> int:
    """The rows of one head."""
    return k.head_size(facts.settings)


ROTATED = dict.fromkeys(("attn.q", "attn.k"), Written(change="interleave_halves", block=head_rows))
SILU = k.computes("hidden_act", "silu", "swish")

LLAMA = GGUFModel(
    "llama",
    keys=(*k.DECODER[:-1], k.stated_head_sizes),
    late=(k.vocab_size, k.rope_dimensions()),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    roles=ROTATED,
    constants=k.rope_freqs,
    checks=(SILU,),
)
MISTRAL = replace(
    LLAMA, defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
)
MIXTRAL = replace(
    MISTRAL,
    keys=(*k.DECODER[:-1], k.expert_counts, k.head_sizes),
    defaults={**MISTRAL.defaults, "rms_norm_eps": 1e-5},
)

MODELS = {"llama": LLAMA, "mistral": MISTRAL, "mixtral": MIXTRAL}
