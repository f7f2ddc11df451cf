"""`to-gguf` of DeepSeek-V4: newer llama.cpp computes what transformers does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.gguf.test_gguf_family_keys import spelled
from tests.models.test_deepseek_v4 import as_published as packed
from tests.models.test_deepseek_v4 import theirs
from tests.support.commands import made, qconvert
from tests.support.family_configs import SAVED
from tests.support.gguf_families import add_tokenizer, scatter, written
from tests.support.gguf_models import log_probabilities
from tests.support.models import stored
from tests.support.newer_llama_cpp import newer_logits

EXPERTS, VOCAB = 8, 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 128, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
    "hc_mult": 4, "qk_rope_head_dim": 16, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "num_hash_layers": 1, "compress_ratios": [0, 128, 0, 4], "index_n_heads": 32,
    "index_head_dim": 64, "index_topk": 4, "max_position_embeddings": 256, "sliding_window": 24,
    "n_shared_experts": 1, "swiglu_limit": 0.5, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Recorded from convert_hf_to_gguf.py of llama.cpp b11549 on this model as published; its own file type is 38.
RECORDED = (
    "block_count=4 context_length=256 embedding_length=64 attention.head_count=4 attention.head_count_kv=1 "
    "rope.scaling.type=yarn rope.scaling.factor=4.0 rope.scaling.original_context_length=64 "
    "rope.scaling.yarn_beta_fast=32.0 rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-06 expert_count=8 expert_used_count=2 expert_gating_func=4 "
    "attention.key_length=128 attention.value_length=128 rope.dimension_count=16 attention.q_lora_rank=32 "
    "attention.sliding_window=24 expert_feed_forward_length=32 expert_shared_count=1 "
    "expert_weights_scale=1.5 expert_weights_norm=True swiglu_clamp_exp=(0.5, 0.5, 0.5, 0.5) "
    "swiglu_clamp_shexp=(0.5, 0.5, 0.5, 0.5) attention.indexer.head_count=32 "
    "attention.indexer.key_length=64 attention.indexer.top_k=4 attention.output_group_count=2 "
    "attention.output_lora_rank=16 attention.compress_ratios=(0, 128, 0, 4, 0) "
    "attention.compress_rope_freq_base=160000.0 hyper_connection.count=4 "
    "hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=1e-06 hash_layer_count=1 "
    "embedding_length_out=256"
)
# More than 128 positions, so that some share one key.
TEXT = np.random.default_rng(5).integers(0, 300, 150).tolist()


def deepseek(folder: Path, **changes: Any) -> Any:
    """A random DeepSeek-V4 in float32, under the names of its published files, with a tokenizer."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.AutoConfig.for_model("deepseek_v4", **{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = scatter(transformers.AutoModelForCausalLM.from_config(config)).eval()
    for name, buffer in model.named_buffers():
        if "tid2eid" in name:
            buffer.copy_(torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(VOCAB)]))
    model.save_pretrained(folder)
    weights = {}
    for saved, weight in load_file(folder / "model.safetensors").items():
        name = saved
        for now, then in SAVED["deepseek-v4"].published:
            name = re.sub(now, then, name)
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    add_tokenizer(folder)
    return model


def as_published(folder: Path, **changes: Any) -> None:
    """The config under the keys of DeepSeek's own."""
    config = json.loads((folder / "config.json").read_text())
    for key in (
        "layer_types",
        "mlp_layer_types",
        "rope_parameters",
        "partial_rotary_factor",
        "compress_rates",
    ):
        config.pop(key, None)
    config |= {**SIZES, "compress_ratios": [*SIZES["compress_ratios"], 0], "num_nextn_predict_layers": 1}
    config |= {"rope_theta": 10000, "compress_rope_theta": 160000, **changes}
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return log_probabilities(model(torch.tensor([TEXT])).logits[0].numpy())


# With few heads an indexer finds positions of the score 0, and any of them may be chosen.
@pytest.mark.parametrize(
    "changes", [{}, {"num_hash_layers": 4, "compress_ratios": [0, 128, 4, 4]}], ids=["routers", "tables"]
)
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Of 37 groups of four positions, the indexer chooses 4; gates are cut off at 0.5."""
    expected = logits_of(deepseek(tmp_path, rope_parameters=dict(YARN), **changes))
    assert expected.std() > 0.3
    found = log_probabilities(newer_logits(written(tmp_path), TEXT, VOCAB))
    assert np.abs(found - expected).max() < 0.01
    found = log_probabilities(newer_logits(written(tmp_path, "--type", "q8_0"), TEXT, VOCAB))
    assert 0.01 < np.abs(found - expected).mean() < 0.2  # other experts and positions are chosen in places


def test_published_configs_make_the_same_file(tmp_path: Path) -> None:
    deepseek(tmp_path, rope_parameters=dict(YARN))
    with GGUFFile(written(tmp_path)) as file:
        saved = {key: entry.value for key, entry in file.kv.items()}
    as_published(tmp_path, rope_scaling={**YARN, "type": "yarn"})
    with GGUFFile(written(tmp_path)) as file:
        published = {key: entry.value for key, entry in file.kv.items()}
    ratios = "deepseek4.attention.compress_ratios"
    assert published.pop(ratios) == (*saved.pop(ratios), 0)  # a layer for next-token prediction
    assert published == saved


def test_keys_are_those_of_the_converter(tmp_path: Path) -> None:
    deepseek(tmp_path)
    scaling = {**YARN, "type": "yarn", "beta_fast": 32, "beta_slow": 1}
    as_published(tmp_path, rope_scaling=scaling)
    with GGUFFile(written(tmp_path)) as file:
        own = tuple(entry for key, entry in file.kv.items() if key.startswith("deepseek4."))
    assert " ".join(spelled("deepseek4", own)) == RECORDED


def test_experts_keep_their_codes(tmp_path: Path) -> None:
    """FP4 with E8M0 scales becomes MXFP4: gguf's numbers of it are those that transformers computes."""
    import gguf
    from safetensors.torch import load_file, save_file

    deepseek(tmp_path)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    as_published(tmp_path, expert_dtype="fp4", quantization_config=blocks)
    arrays = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        arrays |= packed(name, weight)
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    made = {tensor.name: tensor for tensor in gguf.GGUFReader(written(tmp_path, "--type", "bf16")).tensors}
    for stem, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        stack = made[f"blk.2.ffn_{stem}_exps.weight"]
        assert stack.tensor_type.name == "MXFP4"
        numbers = gguf.quants.dequantize(stack.data, stack.tensor_type)
        expected = theirs(arrays, f"layers.2.ffn.experts.5.{name}").float().numpy()
        np.testing.assert_array_equal(numbers[5], expected)


def test_what_has_no_type_is_counted_and_the_hint_works(tmp_path: Path, assets: Path) -> None:
    published = assets / "metadata" / "configs" / "deepseek-ai--DeepSeek-V4-Flash_config.json"
    (tmp_path / "config.json").write_text(published.read_text())
    asked = ("to-gguf", tmp_path, "--type", "keep", "--dry-run")
    ran = qconvert(*asked)
    assert ran.code == 1 and "e4m3-g128x128 is not a type of GGUF (365 of 790 weights are so)" in ran.err
    assert "add --allow-requantize: these become q8_0, the 129 of mxfp4 keep their codes" in ran.err
    ran = qconvert(*asked, "--allow-requantize")
    assert ran.code == 0 and "q8_0       365" in ran.out and "mxfp4      129" in ran.out, ran.out + ran.err


def test_choosing_and_cutting_off_make_a_difference(tmp_path: Path) -> None:
    """What holds the test above: each of the settings changes the numbers by more than its tolerance."""
    expected = logits_of(deepseek(tmp_path / "a", rope_parameters=dict(YARN)))
    others = ({"index_topk": 64}, {"swiglu_limit": 10.0}, {"sliding_window": 128}, {"rope_parameters": None})
    for i, changes in enumerate(others):
        other = logits_of(deepseek(tmp_path / str(i), **{"rope_parameters": dict(YARN), **changes}))
        assert np.abs(other - expected).max() > 0.1, changes


def test_files_go_back_to_the_same_weights(tmp_path: Path) -> None:
    deepseek(tmp_path, rope_parameters=dict(YARN))
    as_published(tmp_path, rope_scaling={**YARN, "type": "yarn"})
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.tensors["blk.0.ffn_gate_tid2eid.weight"].type.name == "I32"
        assert file.kv["deepseek4.attention.compress_ratios"].value == (0, 128, 0, 4, 0)
        assert file.kv["deepseek4.embedding_length_out"].value == 256
    back = made("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", "f32")
    assert stored(back) == stored(tmp_path)
    config = json.loads((back / "config.json").read_text())
    for key in (
        "compress_ratios",
        "num_hash_layers",
        "index_topk",
        "qk_rope_head_dim",
        "hc_mult",
        "swiglu_limit",
    ):
        before = json.loads((tmp_path / "config.json").read_text())
        assert config[key] == before[key], key
    assert config["rope_scaling"]["factor"] == 4 and config["compress_rope_theta"] == 160000


def test_experts_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    deepseek(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["layers.0.ffn.gate.tid2eid"][7, 1] = 1 << 33
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and "layers.0.ffn.gate.tid2eid: 1 numbers do not fit" in ran.err, ran.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hc_mult": 2}, "hc_mult is 2, but llama.cpp's deepseek4 computes 4"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.2}}, "attention_factor is 1.2"),
    ],
)
def test_what_the_graph_does_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    deepseek(tmp_path, **changes)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf", "--dry-run")
    assert ran.code == 1 and said in ran.err, ran.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index_head_dim": 128}, "head_dim and index_head_dim are both 128"),
        ({"compress_ratios": [0, 128, 0, 128]}, "no layer has an indexer"),
        ({}, ""),
    ],
)
def test_models_that_llama_cpp_stops_at_are_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    deepseek(tmp_path, **changes)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 0 and said in ran.err and ("divides by zero" in ran.err) is bool(said), ran.err
