"""Declares Grok-1, and the families that llama.cpp has no graph for."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, NoGraph, Written, read_by
from qconvert.models.gguf.metadata import Metadata


def _read_scales(file: Metadata) -> Json:
    return {
        "max_attn_value": file.number("attn_logit_softcapping", 30.0),
        "moe_intermediate_size": file.optional("expert_feed_forward_length")
        or file.rows("blk.0.ffn_up_exps.weight"),
        "attn_output_multiplier": file.number("attention.output_scale", 0.08838834764831845),
        "embedding_multiplier_scale": file.number("embedding_scale", 78.38367176906169),
        "output_multiplier_scale": file.number("logit_scale", 0.5773502691896257),
    }


@read_by(_read_scales)
def grok_scales(facts: Facts) -> Iterator[KV]:
    """Writes the bounds and multipliers that keep Grok's activations small."""
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
