"""Declares Grok-1, and the families that llama.cpp has no graph for."""

from __future__ import annotations

from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import GGUFModel, NoGraph, Written

# The multipliers that keep Grok's activations small: key of the file, key and default of the config.
_MULTIPLIERS = (
    ("attention.output_scale", "attn_output_multiplier", 0.08838834764831845),
    ("embedding_scale", "embedding_multiplier_scale", 78.38367176906169),
    ("logit_scale", "output_multiplier_scale", 0.5773502691896257),
)


GROK = GGUFModel(
    "grok",
    keys=k.decoder(more=(k.expert_counts,)),
    late=(
        k.number("attn_logit_softcapping", "max_attn_value", 30.0),
        k.fixed("router_logit_softcapping", 30.0),
        k.expert_widths,
        *(k.number(*each) for each in _MULTIPLIERS),
    ),
    defaults={
        "max_attn_value": 30.0,
        **{key: default for _, key, default in _MULTIPLIERS},
        "rms_norm_eps": 1e-5,
    },
    roles={"attn.post_norm": Written("attn_output_norm"), "mlp.post_norm": Written("layer_output_norm")},
    checks=(c.computes("hidden_act", "gelu"), c.square_attention),
)

_NONE = "llama.cpp has no graph for it"
MODELS: dict[str, GGUFModel | NoGraph] = {
    "grok-1": GROK,
    "openai-gpt": NoGraph(f"{_NONE} (GPT's norms come after each block; gpt2's come before)"),
    "yuan": NoGraph(f"{_NONE} (Yuan2 filters the inputs of attention by convolutions)"),
    "rwkv": NoGraph(f"{_NONE} (it runs RWKV versions 6 and 7, this is version 4)"),
    "rwkv5": NoGraph(f"{_NONE} (it runs RWKV versions 6 and 7, this is version 5)"),
}
