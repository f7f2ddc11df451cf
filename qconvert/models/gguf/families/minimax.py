"""Declares MiniMax-M2: experts in every layer, norms over all heads of q and of k together."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, read_by
from qconvert.models.gguf.families.deepseek import gating, known_gating
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata


def _read_rotary(file: Metadata) -> Json:
    return {"rotary_dim": file.optional("rope.dimension_count") or file.head_size}


@read_by(_read_rotary)
def rotary(facts: Facts) -> Iterator[KV]:
    """Writes how many dimensions of a head are rotated: stated, or a share of the head."""
    share = (
        k.rope_of(facts).get("partial_rotary_factor") or facts.settings.get("partial_rotary_factor") or 1.0
    )
    rotated = int(k.head_size(facts.settings) * float(share))
    yield facts.u32("rope.dimension_count", facts.optional("rotary_dim") or rotated)


MINIMAX_M2 = GGUFModel(
    "minimax-m2",
    keys=k.decoder(more=(k.expert_counts, gating("sigmoid"))),
    late=(k.size("expert_feed_forward_length", "intermediate_size"), rotary),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
    },
    roles={"mlp.router_correction": Written("exp_probs_b", suffix=".bias")},
    checks=(SILU, known_gating, c.computes("use_qk_norm", True), c.computes("attention_bias", False)),
)

MODELS = {"minimax_m2": MINIMAX_M2}
