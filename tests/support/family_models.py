"""Tiny configs of every family, and what an independent reading of its class says about it.

`gates` are the modules that a class holds as linears but nobody quantizes. Families that transformers
does not have list their linears and count here; sources are the modelling files published with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A config, and what its class has: regular expressions of linears that are gates or heads."""

    config: Config
    gates: tuple[str, ...] = ()
    auto: str = "AutoModelForCausalLM"


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def small(model_type: str, class_name: str, **changes: Any) -> Config:
    return {"model_type": model_type, "architectures": [class_name], **SMALL, **changes}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
LIQUID = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
GPT = {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
BERT = {
    "model_type": "bert",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "feed_forward_proj": "relu",
}

ROWS = {
    "qwen2-moe": Row(
        small("qwen2_moe", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=40, **EXPERTS),
        gates=("mlp.gate", "shared_expert_gate"),
    ),
    "qwen2-moe-every-second-layer": Row(
        small(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            num_hidden_layers=6,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            qkv_bias=False,
            shared_expert_intermediate_size=40,
            tie_word_embeddings=True,
            **EXPERTS,
        ),
        gates=("mlp.gate", "shared_expert_gate"),
    ),
    "qwen3-moe": Row(small("qwen3_moe", "Qwen3MoeForCausalLM", head_dim=16, **EXPERTS), gates=("mlp.gate",)),
    "mixtral": Row(
        small("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
        gates=("gate",),
    ),
    "mistral": Row(small("mistral", "MistralForCausalLM", head_dim=16)),
    "smollm3": Row(small("smollm3", "SmolLM3ForCausalLM", tie_word_embeddings=True, pad_token_id=0)),
    "seed-oss": Row(small("seed_oss", "SeedOssForCausalLM", head_dim=16, attention_out_bias=False)),
    "olmo3": Row(small("olmo3", "Olmo3ForCausalLM", pad_token_id=0)),
    "granite": Row(small("granite", "GraniteForCausalLM")),
    "ernie4.5": Row(small("ernie4_5", "Ernie4_5ForCausalLM", head_dim=16, use_bias=True)),
    "ministral3": Row(small("ministral3", "Ministral3ForCausalLM", head_dim=16)),
    "olmoe": Row(small("olmoe", "OlmoeForCausalLM", **EXPERTS), gates=("mlp.gate",)),
    "exaone4": Row(small("exaone4", "Exaone4ForCausalLM")),
    "hunyuan": Row(small("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", head_dim=16)),
    "hunyuan-moe": Row(
        small("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", head_dim=16, num_experts=4, moe_topk=2),
        gates=("mlp.gate.wg",),
    ),
    "apertus": Row(small("apertus", "ApertusForCausalLM", pad_token_id=0)),
    "arcee": Row(small("arcee", "ArceeForCausalLM", mlp_bias=True)),
    "gpt-neox": Row(small("gpt_neox", "GPTNeoXForCausalLM")),
    "phi": Row(small("phi", "PhiForCausalLM", qk_layernorm=True)),
    "starcoder2": Row(small("starcoder2", "Starcoder2ForCausalLM")),
    "stablelm": Row(small("stablelm", "StableLmForCausalLM", use_qkv_bias=True)),
    "stablelm-parallel": Row(small("stablelm", "StableLmForCausalLM", use_parallel_residual=True)),
    "lfm2": Row(small("lfm2", "Lfm2ForCausalLM", **LIQUID)),
    "lfm2-moe": Row(
        small("lfm2_moe", "Lfm2MoeForCausalLM", num_dense_layers=1, **LIQUID, **EXPERTS),
        gates=("feed_forward.gate",),
    ),
    "falcon-h1": Row(
        small(
            "falcon_h1",
            "FalconH1ForCausalLM",
            mamba_d_ssm=48,
            mamba_n_heads=3,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_rms_norm=True,
        )
    ),
    "mamba": Row(
        {
            "model_type": "mamba",
            "architectures": ["MambaForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 2,
        },
        gates=("dt_proj",),
    ),
    "mamba2": Row(
        {
            "model_type": "mamba2",
            "architectures": ["Mamba2ForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 8,
        }
    ),
    "olmo": Row(small("olmo", "OlmoForCausalLM", attention_bias=True)),
    "phi3": Row(small("phi3", "Phi3ForCausalLM", pad_token_id=0)),
    "falcon-7b": Row(small("falcon", "FalconForCausalLM", tie_word_embeddings=True)),
    "falcon-rw": Row(
        small("falcon", "FalconForCausalLM", multi_query=False, parallel_attn=False, bias=True, alibi=True)
    ),
    "falcon-40b": Row(small("falcon", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2)),
    "falcon-11b": Row(
        small(
            "falcon",
            "FalconForCausalLM",
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            ffn_hidden_size=80,
        )
    ),
    "gemma": Row(small("gemma", "GemmaForCausalLM", head_dim=16, tie_word_embeddings=True)),
    "gemma2": Row(small("gemma2", "Gemma2ForCausalLM", head_dim=16, tie_word_embeddings=True)),
    "gemma3": Row(small("gemma3_text", "Gemma3ForCausalLM", head_dim=16, tie_word_embeddings=True)),
    "command-r": Row(small("cohere", "CohereForCausalLM", tie_word_embeddings=True)),
    "command-r-plus": Row(small("cohere", "CohereForCausalLM", tie_word_embeddings=True, use_qk_norm=True)),
    "command-r7b": Row(small("cohere2", "Cohere2ForCausalLM", tie_word_embeddings=True)),
    "glm": Row(small("glm", "GlmForCausalLM", head_dim=16, attention_bias=True, pad_token_id=0)),
    "glm4-0414": Row(small("glm4", "Glm4ForCausalLM", head_dim=16, pad_token_id=0)),
    "deepseek-v2": Row(
        small(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            **LATENT,
            q_lora_rank=20,
            moe_intermediate_size=24,
            n_shared_experts=2,
            first_k_dense_replace=1,
        ),
        gates=("mlp.gate",),
    ),
    "deepseek-v2-lite": Row(
        small(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            **LATENT,
            q_lora_rank=None,
            moe_intermediate_size=24,
            n_shared_experts=1,
            first_k_dense_replace=0,
        ),
        gates=("mlp.gate",),
    ),
    "deepseek-v3": Row(
        small(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            **LATENT,
            q_lora_rank=20,
            moe_intermediate_size=24,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        gates=("mlp.gate",),
    ),
    "glm4-moe": Row(
        small(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            **{key: LATENT[key] for key in ("n_routed_experts", "num_experts_per_tok")},
            head_dim=16,
            moe_intermediate_size=24,
            use_qk_norm=True,
            attention_bias=True,
            first_k_dense_replace=1,
        ),
        gates=("mlp.gate",),
    ),
    "gpt-oss": Row(
        small("gpt_oss", "GptOssForCausalLM", head_dim=16, num_local_experts=4), gates=("mlp.router",)
    ),
    "qwen3.5": Row(
        small("qwen3_5_text", "Qwen3_5ForCausalLM", num_hidden_layers=4, head_dim=16, **DELTA),
        gates=("in_proj_a", "in_proj_b"),
    ),
    "qwen3.5-moe": Row(
        small(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            num_hidden_layers=4,
            head_dim=16,
            shared_expert_intermediate_size=40,
            **DELTA,
            **EXPERTS,
        ),
        gates=("mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b"),
    ),
    "gpt2": Row(GPT | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_inner": 96}),
    "openai-gpt": Row(GPT | {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]}),
    "bert-masked": Row(
        BERT | {"architectures": ["BertForMaskedLM"]},
        auto="BertForMaskedLM",
        gates=("cls.predictions.transform.dense",),
    ),
    "bert": Row(BERT | {"architectures": ["BertModel"]}, auto="BertModel", gates=("pooler.dense",)),
    "bert-pretraining": Row(
        BERT | {"architectures": ["BertForPreTraining"]},
        auto="BertForPreTraining",
        gates=("cls.predictions.transform.dense", "pooler.dense", "cls.seq_relationship"),
    ),
    "modernbert": Row(
        small(
            "modernbert",
            "ModernBertModel",
            num_hidden_layers=3,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        auto="ModernBertModel",
    ),
    "modernbert-masked": Row(
        small("modernbert", "ModernBertForMaskedLM", tie_word_embeddings=True, pad_token_id=0),
        auto="ModernBertForMaskedLM",
        gates=("head.dense",),
    ),
    "xlm-roberta": Row(
        BERT | {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]},
        auto="XLMRobertaModel",
        gates=("pooler.dense",),
    ),
    "roberta-masked": Row(
        BERT | {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
        auto="RobertaForMaskedLM",
        gates=("lm_head.dense",),
    ),
    "t5": Row(T5, auto="T5ForConditionalGeneration"),
    "t5-1.1": Row(
        T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
        auto="T5ForConditionalGeneration",
    ),
    "rwkv": Row(
        {
            "model_type": "rwkv",
            "architectures": ["RwkvForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 32,
            "attention_hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
        }
    ),
}


def grown(**changes: Any) -> Config:
    """The config of a tiny checkpoint of a family that transformers lacks."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 4, "tie_word_embeddings": False, **changes}


LLAMA = small("llama", "LlamaForCausalLM")
# Families without a class in transformers: a config, and the config of a relative with as many weights.
RELATIVES: dict[str, tuple[Config, Config]] = {
    "skywork": (small("skywork", "SkyworkForCausalLM"), LLAMA),
    "yi": (small("Yi", "YiForCausalLM"), LLAMA),
    "internlm": (small("internlm", "InternLMForCausalLM"), LLAMA | {"attention_bias": True}),
    "internlm2": (small("internlm2", "InternLM2ForCausalLM", bias=False), LLAMA),
    "baichuan": (
        small("baichuan", "BaichuanForCausalLM", num_key_value_heads=4),
        LLAMA | {"num_key_value_heads": 4},
    ),
    "qwen1": (
        small("qwen", "QWenLMHeadModel", num_key_value_heads=4, kv_channels=8),
        small("qwen2", "Qwen2ForCausalLM", num_key_value_heads=4, intermediate_size=24),
    ),
    "chatglm": (
        small(
            "chatglm",
            "ChatGLMModel",
            padded_vocab_size=96,
            ffn_hidden_size=48,
            num_layers=2,
            multi_query_attention=True,
            multi_query_group_num=2,
            kv_channels=8,
            add_qkv_bias=True,
        ),
        small("glm", "GlmForCausalLM", head_dim=8, attention_bias=True, pad_token_id=0),
    ),
}
# Families without a relative: a config, the count of its tiny checkpoint, the linears of its structure.
ALONE: dict[str, tuple[Config, int, str]] = {
    "deepseek-moe": (
        grown(
            model_type="deepseek",
            architectures=["DeepseekForCausalLM"],
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_shared_experts=2,
            first_k_dense_replace=1,
            moe_layer_freq=1,
        ),
        127_552,
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    ),
    "grok-1": (
        grown(
            model_type="grok-1", architectures=["Grok1ModelForCausalLM"], num_key_value_heads=2, num_experts=4
        ),
        255_040,
        "q_proj k_proj v_proj o_proj linear linear_v linear_1",
    ),
    "yuan2": (
        grown(model_type="yuan", architectures=["YuanForCausalLM"], tie_word_embeddings=True),
        115_328,
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    ),
    "rwkv5": (
        grown(model_type="rwkv5", architectures=["Rwkv5ForCausalLM"], intermediate_size=None, head_size=16),
        141_312,
        "key value receptance gate output",
    ),
    "openelm": (
        {
            "model_type": "openelm",
            "architectures": ["OpenELMForCausalLM"],
            "vocab_size": 256,
            "model_dim": 64,
            "head_dim": 16,
            "num_transformer_layers": 2,
            "num_query_heads": [2, 4],
            "num_kv_heads": [1, 2],
            "ffn_multipliers": [1.0, 1.5],
            "ffn_dim_divisor": 32,
            "normalize_qk_projections": True,
            "share_input_output_layers": True,
        },
        65_920,
        "qkv_proj out_proj proj_1 proj_2",
    ),
}
