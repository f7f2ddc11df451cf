"""Tiny configs of families whose files hold other names than their class in memory, and of nested models.

`kept` are the modules that a class holds as linears but nobody quantizes: gates, mixing of residual streams,
tables. `published` are the replacements by which the names of the published files differ from the saved ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.family_models import DELTA, EXPERTS, LATENT, Config, small

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_attention_heads": 2, "depth": 1}
VISION |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "out_hidden_size": 32}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
LATENT_MOE = {**LATENT, "q_lora_rank": 20, "moe_intermediate_size": 24, "n_shared_experts": 1}


@dataclass(frozen=True)
class Saved:
    """A config, the class that makes its model, and what of it is not quantized."""

    config: Config
    auto: str = "AutoModelForCausalLM"
    kept: tuple[str, ...] = ()
    published: tuple[tuple[str, str], ...] = ()


def nested(model_type: str, class_name: str, text: Config, **changes: object) -> Config:
    """A config with the language model's inside it."""
    tie = {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    inner = {"text_config": text, "vision_config": VISION}
    return {"model_type": model_type, "architectures": [class_name], **tie, **inner, **changes}


IMAGE = "AutoModelForImageTextToText"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
GRANITE4 = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
}
SAVED = {
    "granite-moe": Saved(
        small("granitemoe", "GraniteMoeForCausalLM", num_local_experts=4), kept=("router.layer",)
    ),
    "granite-moe-shared": Saved(
        small(
            "granitemoeshared",
            "GraniteMoeSharedForCausalLM",
            num_local_experts=4,
            shared_intermediate_size=40,
        ),
        kept=("router.layer",),
    ),
    "granite4": Saved(
        small("granitemoehybrid", "GraniteMoeHybridForCausalLM", num_local_experts=4, **GRANITE4),
        kept=("router.layer",),
    ),
    "granite4-dense": Saved(
        small(
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            num_local_experts=0,
            num_experts_per_tok=0,
            tie_word_embeddings=True,
            **{**GRANITE4, "layer_types": ["attention"] * 3},
        )
    ),
    "ernie4.5-moe": Saved(
        small(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            num_hidden_layers=3,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=24,
            use_bias=True,
            pad_token_id=0,
        ),
        kept=("mlp.gate",),
    ),
    "phi3.5-moe": Saved(
        small("phimoe", "PhimoeForCausalLM", num_local_experts=4, attention_bias=True, lm_head_bias=True),
        kept=("block_sparse_moe.gate",),
    ),
    "nomic": Saved(
        {
            "model_type": "nomic_bert",
            "architectures": ["NomicBertModel"],
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        auto="NomicBertModel",
    ),
    "gpt-neox": Saved(small("gpt_neox", "GPTNeoXForCausalLM")),
    "qwen2-vl": Saved(
        nested(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            small("qwen2_vl_text", "x", **ROPE),
            vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 3},
        ),
        IMAGE,
    ),
    "qwen2.5-vl": Saved(
        nested("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", small("qwen2_5_vl_text", "x", **ROPE)),
        IMAGE,
    ),
    "qwen3-vl": Saved(
        nested(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            small("qwen3_vl_text", "x", head_dim=8, **ROPE),
            vision_config={**VISION, "deepstack_visual_indexes": [0]},
        ),
        IMAGE,
    ),
    "qwen3-vl-moe": Saved(
        nested(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            small("qwen3_vl_moe_text", "x", head_dim=8, **ROPE, **EXPERTS),
        ),
        IMAGE,
        ("mlp.gate",),
    ),
    "qwen3-next": Saved(
        small(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            num_hidden_layers=4,
            head_dim=16,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
            **DELTA,
            **EXPERTS,
        ),
        kept=("mlp.gate", "shared_expert_gate", "in_proj_ba"),
    ),
    "llama4": Saved(
        nested(
            "llama4",
            "Llama4ForConditionalGeneration",
            small(
                "llama4_text",
                "x",
                head_dim=8,
                intermediate_size_mlp=40,
                num_local_experts=4,
                interleave_moe_layer_step=2,
            ),
        ),
        IMAGE,
        ("feed_forward.router",),
    ),
    "glm-4.7-flash": Saved(
        small("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **LATENT_MOE, pad_token_id=0), kept=("mlp.gate",)
    ),
    "minicpm3": Saved(
        small(
            "minicpm3",
            "MiniCPM3ForCausalLM",
            **{key: LATENT[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
            q_lora_rank=20,
        )
    ),
    "deepseek-v3.2": Saved(
        small("deepseek_v32", "DeepseekV32ForCausalLM", **LATENT_MOE, **INDEXER, first_k_dense_replace=1),
        kept=("mlp.gate", "indexer.weights_proj"),
    ),
    "glm-5.2": Saved(
        small(
            "glm_moe_dsa",
            "GlmMoeDsaForCausalLM",
            **LATENT_MOE,
            **INDEXER,
            num_hidden_layers=6,
            first_k_dense_replace=1,
            index_topk_freq=2,
            pad_token_id=0,
        ),
        kept=("mlp.gate", "indexer.weights_proj"),
    ),
    "deepseek-v4": Saved(
        small(
            "deepseek_v4",
            "DeepseekV4ForCausalLM",
            **INDEXER,
            num_hidden_layers=5,
            head_dim=16,
            num_key_value_heads=1,
            q_lora_rank=20,
            o_lora_rank=8,
            o_groups=2,
            hc_mult=2,
            qk_rope_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            intermediate_size=24,  # the class's other word for the next
            moe_intermediate_size=24,
            num_hash_layers=2,
            compress_ratios=[0, 4, 128, 4, 128],
        ),
        kept=("ffn.gate", "weights_proj", "compressor.(wkv|wgate)"),
        published=(
            (r"^model\.", ""),
            (r"\.attn\.norm\.", ".attn.kv_norm."),
            (r"embed_tokens", "embed"),
            (r"hc_head\.hc", "hc_head"),
        ),
    ),
    "kimi-k2.5": Saved(
        nested(
            "kimi_k25",
            "KimiK25ForConditionalGeneration",
            small("deepseek_v3", "x", **LATENT_MOE, first_k_dense_replace=1),
        ),
        IMAGE,
        ("mlp.gate",),
        ((r"^language_model\.model\.blocks", "language_model.model.layers"),),
    ),
    "kimi-linear": Saved(
        small(
            "kimi_linear",
            "KimiLinearForCausalLM",
            **{key: value for key, value in LATENT_MOE.items() if "expert" not in key and "group" not in key},
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_heads=2,
            linear_head_dim=16,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            pad_token_id=0,
        ),
        kept=("block_sparse_moe.gate", "b_proj"),
    ),
    "minimax-m2": Saved(
        small("minimax_m2", "MiniMaxM2ForCausalLM", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        kept=("block_sparse_moe.gate",),
    ),
    "minimax-m3": Saved(
        nested(
            "minimax_m3_vl",
            "MiniMaxM3VLForConditionalGeneration",
            small(
                "minimax_m3_vl_text",
                "x",
                num_hidden_layers=3,
                head_dim=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                dense_intermediate_size=56,
                shared_intermediate_size=40,
                moe_layer_freq=[0, 1, 1],
                sparse_attention_config={"sparse_attention_freq": [0, 0, 1]},
                index_n_heads=2,
                index_head_dim=16,
                rotary_dim=8,
            ),
        ),
        IMAGE,
        ("block_sparse_moe.gate",),
    ),
    "mimo-v2": Saved(
        small(
            "mimo_v2_flash",
            "MiMoV2FlashForCausalLM",
            num_hidden_layers=3,
            head_dim=16,
            v_head_dim=8,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_head_dim=16,
            swa_v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_group=1,
            topk_group=1,
        ),
        kept=("mlp.gate",),
    ),
    "step-3.7": Saved(
        nested(
            "step3p7",
            "Step3p7ForConditionalGeneration",
            small(
                "step3p5",
                "x",
                num_hidden_layers=4,
                head_dim=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                share_expert_dim=40,
                layer_types=["full_attention", "sliding_attention"] * 2,
                sliding_window=8,
                num_sliding_attention_heads=6,
                moe_layers_enum="2,3",
            ),
        ),
        IMAGE,
        ("moe.gate", "g_proj"),
    ),
    "nemotron-h": Saved(
        small(
            "nemotron_h",
            "NemotronHForCausalLM",
            num_hidden_layers=4,
            hybrid_override_pattern="M-*M",
            head_dim=8,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=8,
        )
    ),
    "nemotron-3": Saved(
        small(
            "nemotron_h",
            "NemotronHForCausalLM",
            num_hidden_layers=None,
            layers_block_type=["mamba", "moe", "attention", "moe"],
            head_dim=8,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            moe_latent_size=16,
        ),
        kept=("mixer.gate",),
    ),
    "gemma4-moe": Saved(
        nested(
            "gemma4",
            "Gemma4ForConditionalGeneration",
            small(
                "gemma4_text",
                "x",
                num_hidden_layers=6,
                head_dim=8,
                global_head_dim=16,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                enable_moe_block=True,
                num_experts=4,
                top_k_experts=2,
                moe_intermediate_size=24,
                hidden_size_per_layer_input=0,
                tie_word_embeddings=True,
            ),
            vision_config={
                **VISION,
                "position_embedding_size": 64,
                "head_dim": 8,
                "num_key_value_heads": 2,
                "patch_size": 4,
            },
        ),
        IMAGE,
        ("router.proj",),
    ),
    "gemma4-small": Saved(
        small(
            "gemma4_text",
            "Gemma4ForCausalLM",
            num_hidden_layers=6,
            head_dim=8,
            global_head_dim=16,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            layer_types=["sliding_attention", "full_attention"] * 3,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=80,
            tie_word_embeddings=True,
        ),
        kept=("per_layer_model_projection",),
    ),
    "gemma3n": Saved(
        small(
            "gemma3n_text",
            "Gemma3nForCausalLM",
            num_hidden_layers=4,
            head_dim=8,
            num_kv_shared_layers=2,
            intermediate_size=[48, 40, 48, 48],
            activation_sparsity_pattern=[0.0] * 4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=80,
            laurel_rank=8,
            tie_word_embeddings=True,
        ),
        kept=(
            "per_layer_model_projection",
            r"altup_(unembed_)?projections.\d",
            r"altup.(correction_coefs|prediction_coefs|modality_router)",
        ),
    ),
    "starcoder": Saved(
        {
            "model_type": "gpt_bigcode",
            "architectures": ["GPTBigCodeForCausalLM"],
            "vocab_size": 96,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
        }
    ),
    "starcoder-all-heads": Saved(
        {
            "model_type": "gpt_bigcode",
            "architectures": ["GPTBigCodeForCausalLM"],
            "vocab_size": 96,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
            "multi_query": False,
        }
    ),
}
