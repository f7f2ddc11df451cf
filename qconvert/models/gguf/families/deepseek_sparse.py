"""Declares models of latent attention that an indexer makes sparse: DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.deepseek_sparse import has_indexer
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, Written, read_by
from qconvert.models.gguf.families.deepseek import DEEPSEEK_V3, GLM4_MOE_LITE, low_rank_queries
from qconvert.models.gguf.metadata import Metadata

INDEXER_KEYS = k.together(
    k.size("attention.indexer.head_count", "index_n_heads"),
    k.size("attention.indexer.key_length", "index_head_dim"),
    k.size("attention.indexer.top_k", "index_topk"),
)
# Its graphs always have a low-rank projection of queries, and the loader does not guess by the depth.
_CHECKS = tuple(check for check in DEEPSEEK_V3.checks if check is not low_rank_queries)

_LEAST = 64  # columns of the matrix


def _rotated_heads(facts: Facts) -> str | None:
    """Warns that newer llama.cpp stops at an indexer whose heads its Hadamard matrix does not fit."""
    width = facts.size("index_head_dim")
    if width >= _LEAST and width & (width - 1) == 0:
        return None
    return (
        f"index_head_dim is {width}; llama.cpp's {facts.model.arch} turns the indexer's heads by a matrix "
        f"whose size is a power of two from {_LEAST} on, and stops at others"
    )


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    arch="deepseek32",
    late=(*DEEPSEEK_V3.late, INDEXER_KEYS),
    defaults={**DEEPSEEK_V3.defaults, "max_position_embeddings": 163840, "index_topk": 2048},
    roles={
        **DEEPSEEK_V3.roles,
        "attn.indexer.q": Written("indexer.attn_q_b"),
        "attn.indexer.k": Written("indexer.attn_k"),
        "attn.indexer.k_norm": Written("indexer.k_norm"),
        "attn.indexer.weights": Written("indexer.proj"),
    },
    checks=_CHECKS,
    remarks=(*DEEPSEEK_V3.remarks, _rotated_heads),
)


_TYPES = "attention.indexer.types"


def _read_types(file: Metadata) -> Json:
    if not file.has(_TYPES):
        return {}
    return {
        "indexer_types": ["full" if full else "shared" for full in file.values("attention.indexer.types")]
    }


@read_by(_read_types)
def _indexer_types(facts: Facts) -> Iterator[KV]:
    """Writes which layers choose positions, where the config lists them."""
    if facts.settings.get("indexer_types") is not None:
        full = (has_indexer(facts.settings, layer) for layer in range(facts.layers))
        yield facts.flags_by_layer(_TYPES, full)


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    arch="glm-dsa",
    late=(*DEEPSEEK_V32.late, _indexer_types),
    defaults={
        **GLM4_MOE_LITE.defaults,
        "max_position_embeddings": 202752,
        "routed_scaling_factor": 2.5,
        "index_topk": 2048,
    },
    special=GLM4_MOE_LITE.special,
    checks=(*_CHECKS, c.computes("mlp_bias", False)),
)

MODELS = {"deepseek_v32": DEEPSEEK_V32, "glm_moe_dsa": GLM_MOE_DSA}
