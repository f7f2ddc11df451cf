"""Declares GPT, GPT-2 and StarCoder: learned positions, norms with biases; GPT's linears are Conv1D.

Sources: transformers' `modeling_openai`, `modeling_gpt2` and `modeling_gpt_bigcode`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import divided, flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.parameters import Dimensions, Family, Fusion, ParameterTemplate

LAYER = "transformer.h.{layer}."
ATTENTION = (
    c.linear("attn.q", LAYER + "attn.q_proj", "hidden", "hidden", bias=True, transposed=True),
    c.linear("attn.k", LAYER + "attn.k_proj", "hidden", "hidden", bias=True, transposed=True),
    c.linear("attn.v", LAYER + "attn.v_proj", "hidden", "hidden", bias=True, transposed=True),
    c.linear("attn.o", LAYER + "attn.c_proj", "hidden", "hidden", bias=True, transposed=True),
)
MLP = (
    c.linear("mlp.up", LAYER + "mlp.c_fc", "intermediate", "hidden", bias=True, transposed=True),
    c.linear("mlp.down", LAYER + "mlp.c_proj", "hidden", "intermediate", bias=True, transposed=True),
)
ATTN_NORM = c.norm("attn.norm", LAYER + "ln_1", bias=True)
MLP_NORM = c.norm("mlp.norm", LAYER + "ln_2", bias=True)
LM_HEAD = c.head("lm_head")


def gpt_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns dimensions from GPT's config keys; the inner width is 4 * hidden unless `n_inner` is set."""
    hidden = positive_int(config, "n_embd")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "positions": positive_int(config, "n_positions"),
        "hidden": hidden,
        "intermediate": optional_int(config, "n_inner") or 4 * hidden,
    }


GPT2 = Family(
    name="GPT-2",
    model_types=("gpt2",),
    classes=("GPT2LMHeadModel",),
    slots=(
        c.embedding("transformer.wte"),
        ParameterTemplate("positions", "transformer.wpe", ("positions", "hidden"), "other"),
        ATTN_NORM,
        *ATTENTION,
        MLP_NORM,
        *MLP,
        c.norm("final_norm", "transformer.ln_f", bias=True),
        LM_HEAD,
    ),
    dimensions=gpt_dimensions,
    named_by={
        "vocab": "vocab_size",
        "positions": "n_positions",
        "hidden": "n_embd",
        "intermediate": "n_inner",
    },
    fusions=(Fusion("attn.qkv", LAYER + "attn.c_attn", ("attn.q", "attn.k", "attn.v"), native=True),),
    layers=("n_layer",),
    defaults={"tie_word_embeddings": True},
    spellings=({"transformer.": ""},),
    note="linears are stored [in, out] (Conv1D), and as [out, in] when quantized",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    scale_pairs=(c.ATTN_INPUT, c.MLP_INPUT, c.VALUES),
)

OPENAI_GPT = replace(
    GPT2,
    name="GPT",
    model_types=("openai-gpt",),
    classes=("OpenAIGPTLMHeadModel",),
    slots=(
        c.embedding("transformer.tokens_embed"),
        ParameterTemplate("positions", "transformer.positions_embed", ("positions", "hidden"), "other"),
        *ATTENTION,
        ATTN_NORM,
        *MLP,
        MLP_NORM,
        LM_HEAD,
    ),
    named_by={**GPT2.named_by, "intermediate": "4 x n_embd"},
    scale_pairs=(c.VALUES,),  # what its norms make is the residual, too
)


def bigcode_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns StarCoder's dimensions: one head of keys and values, or as many as of queries, by head."""
    dims, heads = gpt_dimensions(config, layer), positive_int(config, "n_head")
    shared = flag(config, "multi_query", default=True)
    head_dim = divided(config, "n_embd", "n_head")
    kv_heads = 1 if shared else heads
    return {
        **dims,
        "q_rows": heads * head_dim,
        "kv_rows": kv_heads * head_dim,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }


BIGCODE = replace(
    GPT2,
    name="StarCoder, SantaCoder",
    model_types=("gpt_bigcode",),
    classes=("GPTBigCodeForCausalLM",),
    slots=(
        *GPT2.slots[:2],
        ATTN_NORM,
        *c.attention(LAYER + "attn.", ("q_proj", "k_proj", "v_proj", "c_proj"), qkv_bias=True, o_bias=True),
        MLP_NORM,
        *(replace(slot, transposed=False) for slot in MLP),
        *GPT2.slots[-2:],
    ),
    dimensions=bigcode_dimensions,
    named_by={**GPT2.named_by, "q_rows": "n_embd", "kv_rows": "n_embd / n_head"},
    fusions=(replace(GPT2.fusions[0], groups="kv_heads"),),
    defaults={"tie_word_embeddings": True, "n_positions": 1024},
    spellings=(),
    ignored=(),
    note="",
)

FAMILIES = (GPT2, OPENAI_GPT, BIGCODE)
