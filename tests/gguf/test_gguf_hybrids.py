"""`to-gguf` of hybrids, latent and other newer families: llama.cpp computes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, add_tokenizer, logits_of, scatter, written
from tests.support.gguf_models import SIZES, TEXT, llama_cpp_logits, llama_cpp_vocab, log_probabilities
from tests.support.models import stored

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
}  # fmt: skip
INDEXER = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}
MAMBA = {
    "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "chunk_size": 8,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "num_hidden_layers": 6, "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}  # fmt: skip
LONG = [1.0 + 0.25 * i for i in range(8)]
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3_next",
        "qwen3next",
        {
            **EXPERTS, **DELTA, "head_dim": 32, "num_hidden_layers": 4, "shared_expert_intermediate_size": 48,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    "llama4": (
        "llama4_text",
        "llama4",
        {
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 64, "head_dim": 16,
            "intermediate_size_mlp": 96, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
        },
    ),
    "gemma4": (
        "gemma4_text", "gemma4",
        {
            **GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320,
            "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        },
    ),
    "gemma4-experts": (
        "gemma4_text", "gemma4",
        {
            **GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 32, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3n-shallow": (
        "gemma3n_text", "gemma3n",
        {
            "head_dim": 32, "num_hidden_layers": 5, "sliding_window": 8, "intermediate_size": 2048,
            "num_kv_shared_layers": 0, "tie_word_embeddings": True, "vocab_size_per_layer_input": 320,
            "activation_sparsity_pattern": [0.95] * 5, "laurel_rank": 64,
        },
    ),
    "gemma3n": (
        "gemma3n_text", "gemma3n",
        {
            "head_dim": 32, "num_hidden_layers": 22, "sliding_window": 8, "intermediate_size": 2048,
            "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 2, "tie_word_embeddings": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12, "laurel_rank": 64,
        },
    ),
    "nemotron-h": (
        "nemotron_h", "nemotron_h",
        {**MAMBA, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron-3": (
        "nemotron_h", "nemotron_h_moe",
        {
            **MAMBA, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron-3-super": (
        "nemotron_h", "nemotron_h_moe",
        {
            **MAMBA, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 32,
        },
    ),
    "mimo-v2": (
        "mimo_v2_flash", "mimo2",
        {
            "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "v_head_dim": 16,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "sliding_window": 8, "attention_value_scale": 0.707,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "deepseek-v3.2": (
        "deepseek_v32", "deepseek32",
        {**LATENT, **INDEXER, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "glm-5": (
        "glm_moe_dsa", "glm-dsa", {**LATENT, **INDEXER, "mlp_layer_types": ["dense", "sparse"]}
    ),
    "minicpm3": (
        "minicpm3", "minicpm3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16, "v_head_dim": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
                "long_factor": LONG, "short_factor": LONG,
            },
        },
    ),
    "olmo2": ("olmo2", "olmo2", {}),
    "starcoder": (
        "gpt_bigcode", "starcoder",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "tie_word_embeddings": True},
    ),
}  # fmt: skip


# What published configs have, and transformers does not save.
PUBLISHED: dict[str, dict[str, Any]] = {"mimo-v2": {"swa_num_key_value_heads": 2}}


def made(folder: Path, name: str, **changes: Any) -> Any:
    """A random model of a class, saved by transformers in float32 with a tokenizer."""
    import transformers

    model_type, _, config = CONFIGS[name]
    made = transformers.AutoConfig.for_model(
        model_type, **{**({} if "n_embd" in config else SIZES), "vocab_size": 320, **config, **changes}
    )
    model = scatter(transformers.AutoModelForCausalLM.from_config(made), 0.08).eval()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | PUBLISHED.get(name, {})))
    add_tokenizer(folder)
    return model


# What this build of llama.cpp has no graph for: names and shapes alone are those of its converter.
NO_GRAPH = ("deepseek-v3.2",)
# Keys and values without a scale lose more in llama.cpp's float16 cache. Gemma 3n's gates drop what is below
# a threshold, so small differences grow with depth: 0.015 after 5 layers, 0.024 after 11, 0.096 after 22.
LOOSE = {"gemma4": 0.03, "gemma4-experts": 0.05, "gemma3n": 0.2, "gemma3n-shallow": 0.03}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NO_GRAPH])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    expected, gguf = logits_of(made(tmp_path, name)), written(tmp_path)
    assert expected.std() > 0.3
    found = log_probabilities(llama_cpp_logits(gguf, IDS, expected.shape[-1]))
    # Measured: 0.0013 (starcoder) to 0.0036 (qwen3-next).
    assert np.abs(found - expected).max() < LOOSE.get(name, 0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_files_go_back_to_the_same_weights(tmp_path: Path, name: str) -> None:
    made(tmp_path, name)
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == CONFIGS[name][1]
    back = qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q", "--dtype", "f32")
    assert back.code == 0, back.err
    ours, theirs = stored(tmp_path / "back"), stored(tmp_path)
    assert ours.keys() == theirs.keys()
    for tensor in theirs:
        # A_log comes back through an exponential, Gemma 3n's table with a row for every token.
        if "A_log" not in tensor and (name != "gemma3n" or "embed_tokens_per_layer" not in tensor):
            assert ours[tensor] == theirs[tensor], tensor


def pieces_by_rank() -> Any:
    """A BPE of SentencePiece's kind that falls back on bytes, as Gemma 4's tokenizer.json has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator([line + "\n\n" for line in TEXT.split(". ")], trainer)
    tokenizer.add_tokens([AddedToken("<|channel>", special=True)])
    spelled = json.loads(tokenizer.to_str())
    bytes_are_trained = [t for t in spelled["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps({**spelled, "added_tokens": bytes_are_trained}))


def test_gemma_4s_tokenizer_is_ranked_pieces(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    made(tmp_path, "gemma4", vocab_size=480, vocab_size_per_layer_input=480)
    theirs = pieces_by_rank()
    theirs.save(str(tmp_path / "tokenizer.json"))
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["tokenizer.ggml.model"].value == "gemma4"
    ours, model = llama_cpp_vocab(llama_cpp, gguf)
    assert qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q").code == 0
    back = Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    for text in (
        "The quick brown fox",
        " two  spaces\n\nand lines\n",
        "na\u00efve \U0001f999 3.14",
        "<|channel>x",
    ):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert back.encode(text, add_special_tokens=False).ids == expected
        assert list(ours.tokenize(text, add_special=False, parse_special=True)) == expected, text
    del model
