"""`to-gguf` of Kimi-K3: tensors are the converter's, products among them, and llama.cpp runs them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import made, qconvert
from tests.support.gguf_families import IDS, add_tokenizer, written
from tests.support.newer_llama_cpp import newer_logits

VOCAB, HIDDEN = 320, 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_experts": 8,
    "num_experts_per_token": 2, "num_shared_experts": 2, "max_position_embeddings": 128,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True, "mla_use_output_gate": True,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0,
    "routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "attn_res_block_size": 2,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5, "model_type": "kimi_linear", "num_expert_group": 1, "topk_group": 1,
    "linear_attn_config": {
        "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 32, "num_heads": 2,
        "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
    },
}  # fmt: skip
CONFIG = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
# Of what llama.cpp's converter (0c1e57098) makes of this model: names, types, shapes and bytes of all tensors
# but the decay, which its exponential makes with another last bit.
CONVERTED = "010b5073acafb3e4"


def k3(folder: Path, **changes: Any) -> dict[str, Any]:
    """A random Kimi-K3 in float32 under the names of its published files, with a tokenizer; its weights."""
    import torch
    from safetensors.torch import save_file

    from qconvert.models import Architecture

    config = {**CONFIG, "text_config": {**TEXT, **changes}}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {
        f"language_model.{p.name}": torch.randn(p.shape) * 0.15 + ("norm" in p.name)
        for p in Architecture.of(config).stored.values()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    add_tokenizer(folder)
    return weights


def test_tensors_are_those_of_the_converter(tmp_path: Path) -> None:
    """Byte for byte; the weights that mix residuals are the products of a norm's weights and a row."""
    weights = k3(tmp_path)
    found = hashlib.sha256()
    with GGUFFile(written(tmp_path)) as file:
        read = {n: np.asarray(file.read(n, 0, t.stored.rows)) for n, t in file.tensors.items()}
        for name, tensor in sorted(file.tensors.items()):
            if not name.endswith("ssm_a"):
                found.update(f"{name} {tensor.type.name} {tensor.shape}".encode() + read[name].tobytes())
        bound = file.kv["kimi-k3.kda.gate_lower_bound"].value
    assert len(read) == 102 and bound == -5.0
    for ours, theirs in (
        ("layers.2.mlp_res", "blk.2.ffn_res_score"),
        ("output_attn_res", "output_res_score"),
    ):
        norm, row = (
            weights[f"language_model.model.{ours}_{part}.weight"].numpy() for part in ("norm", "proj")
        )
        np.testing.assert_array_equal(read[f"{theirs}.weight"].ravel(), norm * row[0])
    decay = weights["language_model.model.layers.0.self_attn.A_log"].numpy()
    assert decay.shape == (128,)  # its files have zeros behind the heads
    np.testing.assert_allclose(read["blk.0.ssm_a"].ravel(), -np.exp(decay[:2]), rtol=1e-6)
    assert found.hexdigest()[:16] == CONVERTED


def test_experts_keep_their_codes_and_llama_cpp_runs_them(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    k3(tmp_path / "plain")
    kept = [flag for part in ("attn", "delta", "mlp.gate", "mlp.up", "mlp.down", "mlp.shared")
            for flag in ("--keep", part)]  # fmt: skip
    folder = made("quantize", tmp_path / "plain", "--scheme", "MXFP4A16", *kept, "-o", tmp_path / "mxfp4")
    ran = qconvert("to-gguf", folder, "--type", "keep", "-o", tmp_path / "m.gguf")
    assert ran.code == 0 and "mxfp4        9" in ran.out and "has no chat template" in ran.err, ran.out
    plain, coded = (
        newer_logits(path, IDS, VOCAB) for path in (written(tmp_path / "plain"), tmp_path / "m.gguf")
    )
    assert np.isfinite(coded).all() and plain.std() > 0.3
    assert 0.001 < np.abs(coded - plain).mean() < 0.3


def test_the_published_model_is_planned(tmp_path: Path, assets: Path) -> None:
    published = assets / "metadata" / "configs" / "moonshotai--Kimi-K3_config.json"
    (tmp_path / "config.json").write_text(published.read_text())
    ran = qconvert("to-gguf", tmp_path, "--type", "keep", "--dry-run")
    assert ran.code == 0 and "mxfp4      276  2,722,740,830,208" in ran.out, ran.out + ran.err


def test_a_file_is_not_read_back(tmp_path: Path) -> None:
    k3(tmp_path)
    ran = qconvert("from-gguf", written(tmp_path), "-o", tmp_path / "back")
    assert ran.code == 1 and "general.architecture is 'kimi-k3', which is not read here" in ran.err, ran.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"mla_use_nope": False}, "llama.cpp's kimi-k3 computes no positions"),
        (
            {"linear_attn_config": {**TEXT["linear_attn_config"], "use_full_rank_gate": False}},
            "use_full_rank_gate is false",
        ),
    ],
)
def test_what_the_graph_does_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    k3(tmp_path, **changes)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and said in ran.err and not (tmp_path / "m.gguf").exists(), ran.err
