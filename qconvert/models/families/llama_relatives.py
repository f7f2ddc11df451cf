"""Declares decoders that are Llama's but for a few parts: SmolLM3, Seed-OSS, OLMo 3, Granite, ERNIE 4.5.

Also EXAONE 4, Hunyuan, Arcee and Apertus, and Mistral's models of 2025: Ministral 3, and Mistral Small 3.1
and later, which see. Sources: transformers' classes (`modeling_smollm3`, `modeling_seed_oss`,
`modeling_olmo3`, `modeling_granite`, `modeling_ernie4_5`, `modeling_ministral3`, `modeling_mistral3`,
`modeling_exaone4`, `modeling_hunyuan_v1_dense`, `modeling_arcee`, `modeling_apertus`).
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.models.families import common as c
from qconvert.models.families.llama import LLAMA, MISTRAL, OLMO2
from qconvert.models.parameters import ParameterTemplate

# Every fourth layer has no rotary embedding.
SMOLLM3 = replace(
    LLAMA,
    name="SmolLM3",
    model_types=("smollm3",),
    classes=("SmolLM3ForCausalLM",),
    defaults={"tie_word_embeddings": True},
    note="",
)

SEED_OSS = replace(
    LLAMA,
    name="Seed-OSS",
    model_types=("seed_oss",),
    classes=("SeedOssForCausalLM",),
    slots=c.decoder(
        c.attention(qkv_bias="attention_bias", o_bias="attention_out_bias"), c.gated_mlp(bias="mlp_bias")
    ),
    defaults={"attention_bias": True},
    note="",
)

OLMO3 = replace(OLMO2, name="OLMo 3", model_types=("olmo3",), classes=("Olmo3ForCausalLM",))

GRANITE = replace(LLAMA, name="Granite 3", model_types=("granite",), classes=("GraniteForCausalLM",), note="")

ERNIE4_5 = replace(
    LLAMA,
    name="ERNIE 4.5",
    model_types=("ernie4_5",),
    classes=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    slots=c.decoder(c.attention(qkv_bias="use_bias", o_bias="use_bias"), c.gated_mlp(bias="use_bias")),
    defaults={"tie_word_embeddings": True, "head_dim": 128},
    note="",
)

MINISTRAL3 = replace(
    MISTRAL, name="Ministral 3", model_types=("ministral3",), classes=("Ministral3ForCausalLM",)
)

MISTRAL3 = replace(
    MISTRAL,
    name="Mistral Small 3.1, 3.2, Ministral 3 that see",
    model_types=("mistral3",),
    classes=("Mistral3ForConditionalGeneration",),
    spellings=c.NESTED,
    carried={r"(model\.)?(vision_tower|multi_modal_projector)\..*": "vision"},
    note="the vision tower is copied as it is",
)

# Norms stand behind the blocks, as in OLMo 2; each head of q and k has one.
EXAONE4 = replace(
    LLAMA,
    name="EXAONE 4",
    model_types=("exaone4",),
    classes=("Exaone4ForCausalLM",),
    slots=(
        c.EMBED,
        *c.attention(),
        c.Q_NORM,
        c.K_NORM,
        c.norm("attn.post_norm", c.LAYER + "post_attention_layernorm"),
        *c.gated_mlp(),
        c.norm("mlp.post_norm", c.LAYER + "post_feedforward_layernorm"),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
    note="",
)

HUNYUAN_NORMS = (
    replace(c.Q_NORM, module=c.LAYER + "self_attn.query_layernorm"),
    replace(c.K_NORM, module=c.LAYER + "self_attn.key_layernorm"),
)
HUNYUAN = replace(
    LLAMA,
    name="Hunyuan",
    model_types=("hunyuan_v1_dense",),
    classes=("HunYuanDenseV1ForCausalLM",),
    slots=c.decoder((*c.BIASED_ATTENTION, *HUNYUAN_NORMS), c.gated_mlp()),
    note="",
)

# Its block has no gate.
ARCEE = replace(
    LLAMA,
    name="Arcee (AFM)",
    model_types=("arcee",),
    classes=("ArceeForCausalLM",),
    slots=c.decoder(
        c.BIASED_ATTENTION,
        (
            c.linear("mlp.up", c.LAYER + "mlp.up_proj", "intermediate", "hidden", bias="mlp_bias"),
            c.linear("mlp.down", c.LAYER + "mlp.down_proj", "hidden", "intermediate", bias="mlp_bias"),
        ),
    ),
    fusions=(c.QKV,),
    scale_pairs=c.SCALE_PAIRS[:3],
    note="",
)


def _activation(name: str, *shape: str) -> ParameterTemplate:
    return ParameterTemplate(f"mlp.act.{name}", f"{c.LAYER}mlp.act_fn.{name}", shape, "other", suffix="")


# Its activation has numbers of its own in every layer.
APERTUS = replace(
    ARCEE,
    name="Apertus",
    model_types=("apertus",),
    classes=("ApertusForCausalLM",),
    slots=(
        c.EMBED,
        *c.BIASED_ATTENTION,
        c.Q_NORM,
        c.K_NORM,
        c.linear("mlp.up", c.LAYER + "mlp.up_proj", "intermediate", "hidden"),
        c.linear("mlp.down", c.LAYER + "mlp.down_proj", "hidden", "intermediate"),
        _activation("alpha_p", "one"),
        _activation("alpha_n", "one"),
        _activation("beta"),
        _activation("eps"),
        replace(c.ATTN_NORM, module=c.LAYER + "attention_layernorm"),
        replace(c.MLP_NORM, module=c.LAYER + "feedforward_layernorm"),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
)

FAMILIES = (
    SMOLLM3,
    SEED_OSS,
    OLMO3,
    GRANITE,
    ERNIE4_5,
    MINISTRAL3,
    MISTRAL3,
    EXAONE4,
    HUNYUAN,
    ARCEE,
    APERTUS,
)
