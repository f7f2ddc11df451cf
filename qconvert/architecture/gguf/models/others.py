"""Grok-1, and the families that llama.cpp has no graph for."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.architecture.gguf import keys as k
from qconvert.architecture.gguf.model import Facts, GGUFModel, NoGraph, Written
from qconvert.gguf_types import KV


def grok_scales(facts: Facts) -> Iterator[KV]:
    """The bounds and multipliers that keep Grok's numbers small."""
    yield facts.f32("attn_logit_softcapping", facts.number("max_attn_value"))
    yield facts.f32("router_logit_softcapping", 30.0)
    yield facts.u32("expert_feed_forward_length", facts.size("moe_intermediate_size"))
    yield facts.f32("attention.output_scale", facts.number("attn_output_multiplier"))
    yield facts.f32("embedding_scale", facts.number("embedding_multiplier_scale"))
    yield facts.f32("logit_scale", facts.number("output_multiplier_scale"))


GROK = GGUFModel(
    "grok",
    keys=k.decoder(more=(k.expert_counts,)),
    late=(grok_scales,),
    defaults={
        "max_attn_value": 30.0,
        "attn_output_multiplier": 0.08838834764831845,
        "embedding_multiplier_scale": 78.38367176906169,
        "output_multiplier_scale": 0.5773502691896257,
        "rms_norm_eps": 1e-5,
    },
    roles={
        "attn.post_norm": Written("attn_output_norm"),
        "mlp.post_norm": Written("layer_output_norm"),
    },
    checks=(k.computes("hidden_act", "gelu"), k.square_attention),
)

_NONE = "llama.cpp has no graph for it"
MODELS: dict[str, GGUFModel | NoGraph] = {
    "grok-1": GROK,
    "openai-gpt": NoGraph(f"{_NONE} (GPT's norms come after each block; gpt2's come before)"),
    "yuan": NoGraph(f"{_NONE} (Yuan2 filters the inputs of attention by convolutions)"),
    "rwkv": NoGraph(f"{_NONE} (it runs RWKV versions 6 and 7, this is version 4)"),
    "rwkv5": NoGraph(f"{_NONE} (it runs RWKV versions 6 and 7, this is version 5)"),
}
