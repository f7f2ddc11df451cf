"""`to-gguf` of models whose attention is sparse or linear, in graphs that newer llama.cpp has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, add_tokenizer, logits_of, saved_seeing, scatter, written
from tests.support.gguf_models import SIZES, log_probabilities
from tests.support.models import stored
from tests.support.newer_llama_cpp import newer_logits

M3: dict[str, Any] = {
    **SIZES, "head_dim": 32, "rotary_dim": 16, "num_hidden_layers": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 32, "dense_intermediate_size": 96,
    "shared_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "index_n_heads": 2, "index_head_dim": 32,
    "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
V32: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 4,
}  # fmt: skip


def minimax(folder: Path, **changes: Any) -> Any:
    """A random MiniMax-M3, saved by transformers in float32 with a tokenizer."""
    return saved_seeing(folder, "minimax_m3_vl", {**M3, **changes}, eager=True)


@pytest.mark.parametrize("blocks", [2, 8], ids=["some", "all"])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, blocks: int) -> None:
    expected, gguf = logits_of(minimax(tmp_path, index_topk_blocks=blocks)), written(tmp_path)
    assert expected.std() > 0.3
    found = log_probabilities(newer_logits(gguf, IDS, expected.shape[-1], flash=True))
    assert np.abs(found - expected).max() < 0.01


def test_attention_to_some_blocks_is_not_attention_to_all(tmp_path: Path) -> None:
    """What holds the test above: with two blocks of four, later tokens see less."""
    some = logits_of(minimax(tmp_path / "some", index_topk_blocks=2))
    every = logits_of(minimax(tmp_path / "all", index_topk_blocks=8))
    assert np.abs(some - every)[:8].max() < 1e-4 and np.abs(some - every)[8:].max() > 0.05


def test_files_go_back_to_the_same_weights(tmp_path: Path) -> None:
    minimax(tmp_path)
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == "minimax-m3"
        assert file.kv["minimax-m3.attention.indexer.top_k"].value == 2
    back = qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q", "--dtype", "f32")
    assert back.code == 0, back.err
    ours, theirs = stored(tmp_path / "back"), stored(tmp_path)
    ours = {name.removeprefix("language_model."): tensor for name, tensor in ours.items()}
    theirs = {name.removeprefix("language_model."): tensor for name, tensor in theirs.items()}
    away = set(theirs) - set(ours)
    assert away == {name for name in theirs if any(word in name for word in ("vision", "projector", "merge"))}
    for name in ours:
        if "norm" not in name:  # 1 + w loses low bits
            assert ours[name] == theirs[name], name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "index_topk_blocks", "index_block_size", "rotary_dim"):
        assert config[key] == M3[key], key


def deepseek(folder: Path, **changes: Any) -> Any:
    """A random DeepSeek-V3.2, saved by transformers in float32 with a tokenizer."""
    import transformers

    config = transformers.AutoConfig.for_model("deepseek_v32", **{**V32, **changes})
    config._attn_implementation = "eager"
    model = scatter(transformers.AutoModelForCausalLM.from_config(config)).eval()
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


@pytest.mark.parametrize("width", [64, 128])
def test_llama_cpp_attends_to_what_the_indexer_of_deepseek_chooses(tmp_path: Path, width: int) -> None:
    """To 4 positions of 16, which is far from attention to all.

    Of few heads all may find nothing (their scores are cut off at 0): then positions are equally good, and
    libraries choose differently among them. 32 heads make no such ties.
    """
    indexer = {"index_head_dim": width, "index_n_heads": 32}
    expected, gguf = logits_of(deepseek(tmp_path / "some", **indexer)), written(tmp_path / "some")
    every = logits_of(deepseek(tmp_path / "all", **indexer, index_topk=64))
    assert np.abs(expected - every)[8:].max() > 0.3
    found = log_probabilities(newer_logits(gguf, IDS, expected.shape[-1]))
    assert np.abs(found - expected).max() < 0.01


def test_heads_of_an_indexer_that_llama_cpp_stops_at_are_told(tmp_path: Path) -> None:
    """Its Hadamard matrix has 64 columns or more: the assertion ggml_can_mul_mat fails with 32 or 96."""
    for width, told in ((32, True), (96, True), (64, False), (128, False)):
        deepseek(tmp_path / str(width), index_head_dim=width)
        ran = qconvert("to-gguf", tmp_path / str(width), "--type", "f32", "-o", tmp_path / f"{width}.gguf")
        assert ran.code == 0 and (f"index_head_dim is {width};" in ran.err) is told, ran.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_alpha is 1.702 and swiglu_limit 5"),
        ({"index_n_heads": 1}, "1 heads of the indexer for 2 of keys"),
        ({"shared_intermediate_size": 48}, "shared_intermediate_size is 48"),
        ({"mlp_layer_types": ["sparse"] * 4}, "layer 0 is not as llama.cpp's minimax-m3 has it"),
    ],
)
def test_what_the_graph_does_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    minimax(tmp_path, **changes)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf", "--dry-run")
    assert ran.code == 1 and said in ran.err


@pytest.mark.parametrize("file_type", ["f16", "q4_k_m"])
def test_indexers_stay_in_float32(tmp_path: Path, file_type: str) -> None:
    """As llama.cpp's converter and llama-quantize leave them."""
    minimax(tmp_path, hidden_size=256, index_head_dim=256)
    with GGUFFile(written(tmp_path, "--type", file_type)) as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items() if "indexer" in name}
    assert len(kinds) == 12 and set(kinds.values()) == {"F32"}
