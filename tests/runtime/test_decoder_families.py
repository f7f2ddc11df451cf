"""Families that run beside Llama's relatives: saved by transformers, read by role, within 1e-5 of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.layer import Mlp
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.scoring import score_hidden
from tests.support.decoder_models import tiny, tokens

TOLERANCE = 1e-5
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PADS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(4)],
    "long_factor": [2.0 + i for i in range(4)],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
LATENT = PADS | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
LLAMA4 = PADS | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 5,
    "attn_scale": 0.6,
}
HYBRID = HEADS | {
    "deviation": 0.05,  # at 0.1 transformers' own two ways, by chunks and by tokens, differ by 1e-5
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
HYBRID_EXPERTS = HYBRID | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
GEMMA4 = PADS | {
    "deviation": 0.05,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160,
    "final_logit_softcapping": 1.5,
}
SHARED_KEYS = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 12,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", HEADS | {"sliding_window": 5, "query_pre_attn_scalar": 24}),
    "gemma2-low-caps": (
        "gemma2",
        HEADS | {"sliding_window": 5, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5},
    ),
    "gemma3": (
        "gemma3_text",
        HEADS | {"sliding_window": 5, "num_hidden_layers": 7, "rope_parameters": LOCAL_AND_GLOBAL},
    ),
    "phi3": ("phi3", PADS | {"sliding_window": 5}),
    "phi3-long-partial": (
        "phi3",
        PADS
        | {"hidden_size": 96, "max_position_embeddings": 64, "original_max_position_embeddings": 32}
        | {"rope_parameters": LONG | {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}},
    ),
    "command-r": ("cohere", {"logit_scale": 0.3}),
    "command-r-norms-biases": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "command-r7b": ("cohere2", {"sliding_window": 5, "num_hidden_layers": 5}),
    "olmo": ("olmo", {"clip_qkv": 0.4}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", PADS | {"num_hidden_layers": 5}),
    "seed-oss": ("seed_oss", HEADS | {"attention_out_bias": True}),
    "ernie4.5": ("ernie4_5", HEADS | {"use_bias": True}),
    "glm": ("glm", HEADS | PADS),
    "glm4": ("glm4", HEADS | PADS),
    "gpt-oss": (
        "gpt_oss",
        HEADS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "num_hidden_layers": 4}
        | {"swiglu_limit": 0.5},
    ),
    "deepseek-v2": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN},
    ),
    "deepseek-v3": ("deepseek_v3", LATENT | {"rope_parameters": YARN, "attention_bias": True}),
    "deepseek-v3-halves": ("deepseek_v3", LATENT | {"rope_interleave": False, "norm_topk_prob": False}),
    "gemma4-small": ("gemma4_text", GEMMA4 | SHARED_KEYS),
    "gemma4": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe": (
        "gemma4_text",
        GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
        | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "llama-4-scout": ("llama4_text", LLAMA4),
    "llama-4-maverick": (
        "llama4_text",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2}
        | {"no_rope_layers": [0, 1, 1, 0]},
    ),
    "llama-4-untuned": ("llama4_text", LLAMA4 | {"attn_temperature_tuning": False}),
    "qwen3-next": ("qwen3_next", HYBRID_EXPERTS | {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
    "qwen3.5": ("qwen3_5_text", HYBRID | {"layer_types": ["full_attention", "linear_attention"] * 2}),
    "qwen3.5-moe": ("qwen3_5_moe_text", HYBRID_EXPERTS),
    "glm-4.5": ("glm4_moe", HEADS | LATENT | {"num_key_value_heads": 2, "use_qk_norm": True}),
}


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, layout: Layout = Layout.REFERENCE) -> Decoder:
    checkpoint = open_checkpoint(folder)
    return load_decoder(
        DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint), layout=layout
    )


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def largest_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of log-probabilities, in nats."""
    return float((log_probabilities(got) - log_probabilities(want)).abs().max())


def one_by_one(decoder: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits at every position: 7 tokens at once, then one token at a time through the cache."""
    cache = decoder.cache(*ids_BT.shape)
    first = decoder.logits(decoder.hidden(ids_BT[:, :7], cache))
    return torch.cat(
        [first, *(decoder.decode(t[:, 0], cache)[:, None] for t in ids_BT[:, 7:].split(1, 1))], 1
    )


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    model, ids = tiny(model_type, **({"deviation": 0.1} | changes)), tokens(2, 24)
    with torch.no_grad():
        want = model(ids).logits
    assert want.std() > 0.01  # something to be wrong about
    folder = saved(model, tmp_path / case)
    for layout in (Layout.REFERENCE, Layout.AUTO):
        decoder = opened(folder, layout)
        whole = decoder.logits(decoder.hidden(ids))
        assert largest_difference(whole, want) < TOLERANCE
        assert largest_difference(one_by_one(decoder, ids), want) < TOLERANCE


class PublishedMlp(torch.nn.Module):
    """The gated block of the modelling file published with DeepSeek-MoE."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, width, bias=False)
        self.up_proj = torch.nn.Linear(hidden, width, bias=False)
        self.down_proj = torch.nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class PublishedMoe(torch.nn.Module):
    """Its sparse block (transformers has none): softmax over all experts, the best few, and one shared."""

    def __init__(self, hidden: int, width: int, experts: int, chosen: int, normalise: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, experts, bias=False)
        self.experts = torch.nn.ModuleList(PublishedMlp(hidden, width) for _ in range(experts))
        self.shared_experts = PublishedMlp(hidden, 2 * width)
        self.chosen, self.normalise = chosen, normalise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, indices = self.gate(rows).softmax(-1).topk(self.chosen)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        y = self.shared_experts(rows)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(indices == number)
            if len(row):
                y = y.index_add(0, row, expert(rows[row]) * weights[row, slot, None])
        return y.view_as(x)


def deepseek(folder: Path, *, normalise: bool = False) -> torch.nn.Module:
    """A tiny DeepSeek-MoE, dense in its first layer, in a folder and in memory."""
    model, generator = tiny("llama"), torch.Generator().manual_seed(5)
    for layer in model.model.layers[1:]:
        layer.mlp = PublishedMoe(48, 24, experts=6, chosen=3, normalise=normalise)
        for parameter in layer.mlp.parameters():
            parameter.data = 0.15 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    config = model.config.to_dict() | {
        "model_type": "deepseek",
        "architectures": ["DeepseekForCausalLM"],
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "norm_topk_prob": normalise,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("normalise", [False, True])
def test_deepseek_moe_matches_its_published_block(normalise: bool, tmp_path: Path) -> None:
    model, ids = deepseek(tmp_path / "deepseek", normalise=normalise), tokens(2, 24)
    with torch.no_grad():
        want = model(ids).logits
    decoder = opened(tmp_path / "deepseek")
    assert largest_difference(decoder.logits(decoder.hidden(ids)), want) < TOLERANCE
    assert largest_difference(one_by_one(decoder, ids), want) < TOLERANCE


def test_a_fused_gate_up_of_phi3_stays_one_product(tmp_path: Path) -> None:
    decoder = opened(saved(tiny("phi3", **PADS), tmp_path / "phi3"))
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, Mlp) and len(layer.attention.qkv) == len(layer.mlp.gate_up) == 1


def test_the_compiled_step_leaves_other_graphs_alone(tmp_path: Path) -> None:
    """Each of these has widths that the kernels read, and one thing that they do not compute."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    for model_type in ("gemma", "olmo2", "phi3", "cohere"):
        changes = sizes | {"rope_parameters": LONG | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}
        model = tiny(model_type, **(changes if model_type == "phi3" else sizes), **PADS)
        assert opened(saved(model, tmp_path / model_type), Layout.AUTO).step is None
    plain = tiny("phi3", **sizes, **PADS)
    assert opened(saved(plain, tmp_path / "plain"), Layout.AUTO).step is not None


def test_logits_are_capped_in_scores_too(tmp_path: Path) -> None:
    model, ids = tiny("gemma2", **HEADS, final_logit_softcapping=1.5), tokens(1, 24)
    decoder = opened(saved(model, tmp_path / "gemma2"))
    with torch.no_grad():
        want_TV = log_probabilities(model(ids).logits[0, :-1])
    (scores,) = score_hidden([decoder.outputs(decoder.hidden(ids)[0, :-1])], ids[0, 1:])
    assert float((scores.nll_N + want_TV.gather(1, ids[0, 1:, None])[:, 0]).abs().max()) < TOLERANCE


def test_a_family_that_is_not_run_names_those_that_are() -> None:
    config = {"model_type": "falcon", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1}
    with pytest.raises(UnsupportedModel, match="'falcon' is not run here") as caught:
        DecoderConfig.from_hf(config | {"num_hidden_layers": 1})
    assert "gemma3" in str(caught.value.hint)


@pytest.mark.parametrize("short", [[1.0], [1.0, 2.0, 3.0, 0.0], None])
def test_divisors_that_do_not_fit_the_heads_are_refused(short: list[float] | None) -> None:
    config = tiny("phi3", **PADS).config.to_dict()
    scaling = LONG | {"short_factor": short}
    with pytest.raises(CorruptCheckpoint, match="short_factor"):
        DecoderConfig.from_hf(config | {"rope_parameters": scaling})
