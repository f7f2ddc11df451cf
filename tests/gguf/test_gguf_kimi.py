"""`to-gguf` of Kimi-Linear: newer llama.cpp computes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import made, qconvert
from tests.support.gguf_families import IDS, add_tokenizer, logits_of, scatter, written
from tests.support.gguf_models import log_probabilities
from tests.support.models import stored
from tests.support.newer_llama_cpp import newer_logits

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "linear_head_dim": 32, "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def kimi(folder: Path, **changes: Any) -> Any:
    """A random Kimi-Linear, saved by transformers in float32 with a tokenizer."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        transformers.KimiLinearConfig(**{**SIZES, **changes})
    )
    scatter(model).eval().save_pretrained(folder)
    add_tokenizer(folder)
    return model


def as_published(folder: Path) -> None:
    """The config and the names of dense blocks as Moonshot publishes them."""
    from safetensors.torch import load_file, save_file

    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        del config[key]
    config |= {
        "linear_attn_config": {
            "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 32, "num_heads": 2,
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        },
        "first_k_dense_replace": 1, "mla_use_nope": True, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
    }  # fmt: skip
    file.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("0.block_sparse_moe", "0.mlp"): weight for name, weight in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("published", [False, True], ids=["saved", "published"])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, published: bool) -> None:
    expected = logits_of(kimi(tmp_path))
    if published:
        as_published(tmp_path)
    assert expected.std() > 0.3
    found = log_probabilities(newer_logits(written(tmp_path), IDS, expected.shape[-1]))
    assert np.abs(found - expected).max() < 0.003
    found = log_probabilities(newer_logits(written(tmp_path, "--type", "q8_0"), IDS, expected.shape[-1]))
    assert 0.003 < np.abs(found - expected).mean() < 0.2  # other experts are chosen in places


def test_files_go_back_to_the_same_model(tmp_path: Path) -> None:
    import transformers

    expected = logits_of(kimi(tmp_path))
    as_published(tmp_path)
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["kimi-linear.attention.head_count_kv"].value == (0, 1, 0, 1)
        assert file.kv["kimi-linear.kda.head_dim"].value == 32
    back = made("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", "f32")
    ours, theirs = stored(back), stored(tmp_path)
    assert set(ours) == set(theirs)
    assert all(ours[name] == theirs[name] for name in ours if not name.endswith("A_log"))
    config = json.loads((back / "config.json").read_text())
    before = json.loads((tmp_path / "config.json").read_text())
    for key in ("linear_attn_config", "num_experts", "num_experts_per_token", "model_max_length"):
        assert config[key] == before[key], key
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="float32", pad_token_id=None).eval()
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_lora_rank": 24}, "q_lora_rank is 24"),
        ({"linear_num_heads": 1}, "linear_attn_config has 1 heads, attention 2"),
        ({"n_group": 2, "topk_group": 1}, "num_expert_group is 2"),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "layer 2 is dense after others"),
        ({"norm_topk_prob": False}, "moe_renormalize is false"),
    ],
)
def test_what_the_graph_does_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    kimi(tmp_path, **changes)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and said in ran.err and not (tmp_path / "m.gguf").exists(), ran.err
