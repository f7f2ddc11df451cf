"""Declares Llama and the families built like it; Llama 4."""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import optional_int, positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families import tower_tiles
from qconvert.models.parameters import Dimensions, Family

LLAMA = Family(
    name="Llama 1, 2, 3",
    model_types=("llama",),
    classes=("LlamaForCausalLM",),
    slots=c.decoder(c.BIASED_ATTENTION, c.gated_mlp(bias="mlp_bias")),
    dimensions=c.dense_dimensions,
    named_by=c.NAMED_BY,
    fusions=(c.QKV, c.GATE_UP),
    ignored=c.ROTARY_BUFFERS,
    scale_pairs=c.SCALE_PAIRS,
    note="also Yi, DeepSeek 7B and DeepSeek-Coder, which are declared as Llama",
)

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_types=("mistral",),
    classes=("MistralForCausalLM",),
    slots=c.decoder(c.attention(), c.gated_mlp()),
    note="",
)

YI = replace(
    LLAMA,
    name="Yi",
    model_types=("Yi",),
    classes=("YiForCausalLM",),
    spellings=({"input_layernorm": "ln1", "post_attention_layernorm": "ln2"},),
    note="the first releases; later ones are declared as Llama",
)

SKYWORK = replace(LLAMA, name="Skywork", model_types=("skywork",), classes=("SkyworkForCausalLM",), note="")

INTERNLM = replace(
    MISTRAL,
    name="InternLM",
    model_types=("internlm",),
    classes=("InternLMForCausalLM",),
    slots=c.decoder(c.attention(qkv_bias="bias", o_bias="bias"), c.gated_mlp()),
    defaults={"bias": True},
)

OLMO = replace(
    MISTRAL,
    name="OLMo",
    model_types=("olmo",),
    classes=("OlmoForCausalLM",),
    slots=(c.EMBED, *c.BIASED_ATTENTION, *c.gated_mlp(), c.LM_HEAD),
)

# Norms stand behind the blocks, and those of q and k are over all heads together.
OLMO2 = replace(
    OLMO,
    name="OLMo 2",
    model_types=("olmo2",),
    classes=("Olmo2ForCausalLM",),
    slots=(
        c.EMBED,
        *c.BIASED_ATTENTION,
        c.norm("attn.q_norm", c.LAYER + "self_attn.q_norm", "q_rows"),
        c.norm("attn.k_norm", c.LAYER + "self_attn.k_norm", "kv_rows"),
        c.norm("attn.post_norm", c.LAYER + "post_attention_layernorm"),
        *c.gated_mlp(),
        c.norm("mlp.post_norm", c.LAYER + "post_feedforward_layernorm"),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
)

MIXTRAL = replace(
    MISTRAL,
    name="Mixtral",
    model_types=("mixtral",),
    classes=("MixtralForCausalLM",),
    slots=c.decoder(
        c.attention(),
        (
            c.router(c.LAYER + "block_sparse_moe.gate"),
            *c.experts(c.LAYER + "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")),
        ),
    ),
    dimensions=c.sparse_dimensions(),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    fusions=(c.QKV, *c.EXPERT_STACKS),
    spellings=({"block_sparse_moe.": "mlp."},),
)

FEED_FORWARD = c.LAYER + "feed_forward."


def llama4_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Llama 4's dimensions; which layers have experts is listed, or follows from a step."""
    step = optional_int(config, "interleave_moe_layer_step") or 1
    sparse = (layer + 1) % step == 0
    if config.get("moe_layers") is not None:
        sparse = layer in whole_numbers(config, "moe_layers")
    rows = positive_int(config, "intermediate_size")
    return {
        **c.attention_dimensions(config),
        "intermediate": 0 if sparse else positive_int(config, "intermediate_size_mlp"),
        "experts": positive_int(config, "num_local_experts") if sparse else 0,
        "expert_rows": rows if sparse else 0,
        "shared_rows": rows if sparse else 0,
    }


# Its files hold the experts [in, out], gate beside up.
LLAMA4 = replace(
    LLAMA,
    name="Llama 4",
    model_types=("llama4", "llama4_text"),
    classes=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    slots=c.decoder(
        c.BIASED_ATTENTION,
        (
            *c.gated_mlp(FEED_FORWARD),
            c.router(FEED_FORWARD + "router"),
            *c.experts(FEED_FORWARD + "experts.{expert}."),
            *c.gated_mlp(FEED_FORWARD + "shared_expert.", "mlp.shared.", "shared_rows"),
        ),
    ),
    dimensions=llama4_dimensions,
    named_by={
        **c.NAMED_BY,
        "intermediate": "intermediate_size_mlp",
        "experts": "num_local_experts",
        "expert_rows": "intermediate_size",
        "shared_rows": "intermediate_size",
    },
    defaults={
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "vocab_size": 202_048,
    },
    fusions=(
        c.QKV,
        replace(c.GATE_UP, module=FEED_FORWARD + "gate_up_proj"),
        *(
            replace(stack, module=stack.module.replace("mlp.", "feed_forward."), native=True, transposed=True)
            for stack in c.EXPERT_STACKS
        ),
    ),
    spellings=c.NESTED[1:],
    carried={r"(vision_model|multi_modal_projector)\..*": "vision"},
    tower=tower_tiles.LLAMA4_TOWER,
    note="the vision tower is copied as it is; experts are stored [in, out]; quantized, each is a linear",
)

FAMILIES = (LLAMA, LLAMA4, YI, SKYWORK, INTERNLM, OLMO, OLMO2, MISTRAL, MIXTRAL)
