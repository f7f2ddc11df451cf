"""`to-gguf` of Nemotron-NAS, whose layers differ: llama.cpp computes what its blocks do in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, distance, save, written
from tests.support.gguf_models import SIZES, log_probabilities
from tests.support.models import stored

HIDDEN, HEADS = SIZES["hidden_size"], SIZES["num_attention_heads"]
# Query heads for each head of keys, "linear" in place of attention, or None; and the block's multiple.
Layer = tuple[int | str | None, float | None]
LAYERS: list[Layer] = [(2, 6.0), ("linear", 2.0), (None, 4.0), (4, 12.0), (None, None), (1, 6.0)]


def block(group: int | str | None, multiple: float | None) -> dict[str, Any]:
    attention = {
        "n_heads_in_group": group if isinstance(group, int) else None,
        "no_op": group is None,
        "replace_with_linear": group == "linear",
    }
    ffn = {"ffn_mult": multiple, "no_op": multiple is None, "replace_with_linear": False}
    return {"attention": attention, "ffn": ffn}


def width(multiple: float) -> int:
    return -(-int(2 * multiple * HIDDEN / 3) // 256) * 256


def llama_config(group: int, multiple: float) -> Any:
    import transformers

    sizes = {**SIZES, "num_key_value_heads": HEADS // group, "intermediate_size": width(multiple)}
    return transformers.LlamaConfig(**sizes, attn_implementation="eager", rms_norm_eps=1e-5)


def made(folder: Path, layers: list[Layer]) -> np.ndarray:
    """A model of these layers, saved; what transformers' Llama blocks compute with its weights."""
    import torch
    from transformers.models.llama import modeling_llama as llama

    torch.manual_seed(0)
    weights: dict[str, Any] = {}

    def own(name: str, *shape: int) -> Any:
        weights[name] = torch.randn(*shape).mul(0.15).add(float(len(shape) == 1)).bfloat16().float()
        return weights[name]

    def filled(module: Any, name: str) -> Any:
        state = {key: own(f"{name}.{key}", *value.shape) for key, value in module.state_dict().items()}
        module.load_state_dict(state)
        return module

    rotary = llama.LlamaRotaryEmbedding(llama_config(1, 6.0))
    positions = torch.arange(len(IDS))[None]
    mask = torch.full((len(IDS), len(IDS)), -torch.inf).triu(1)[None, None]
    x = own("model.embed_tokens.weight", SIZES["vocab_size"], HIDDEN)[torch.tensor([IDS])]
    for i, (group, multiple) in enumerate(layers):
        at = f"model.layers.{i}."
        if group is not None:
            normed = filled(llama.LlamaRMSNorm(HIDDEN, 1e-5), at + "input_layernorm")(x)
            if isinstance(group, int):
                attention = filled(llama.LlamaAttention(llama_config(group, 6.0), 0), at + "self_attn")
                x = x + attention(normed, rotary(x, positions), mask)[0]
            else:
                x = x + normed @ own(at + "self_attn.linear_attn.weight", HIDDEN, HIDDEN).T
        if multiple is not None:
            normed = filled(llama.LlamaRMSNorm(HIDDEN, 1e-5), at + "post_attention_layernorm")(x)
            x = x + filled(llama.LlamaMLP(llama_config(1, multiple)), at + "mlp")(normed)
    x = filled(llama.LlamaRMSNorm(HIDDEN, 1e-5), "model.norm")(x)
    logits = x @ own("lm_head.weight", SIZES["vocab_size"], HIDDEN).T
    config = {
        **SIZES, "num_key_value_heads": None, "intermediate_size": None, "num_hidden_layers": len(layers),
        "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 10000.0, "block_configs": [block(*each) for each in layers],
    }  # fmt: skip
    save(folder, weights, config)
    return log_probabilities(logits[0].detach().numpy())


def test_llama_cpp_computes_what_the_blocks_do(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    expected = made(tmp_path / "nas", LAYERS)
    assert distance(tmp_path / "nas", expected) < 0.01


def test_files_go_back_to_the_same_weights(tmp_path: Path) -> None:
    made(tmp_path / "nas", LAYERS)
    gguf = written(tmp_path / "nas")
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == "deci"
        assert file.kv["deci.attention.head_count"].value == (4, 4, 0, 4, 0, 4)
        assert file.kv["deci.attention.head_count_kv"].value == (2, 0, 0, 1, 0, 4)
    back = qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q", "--dtype", "bf16")
    assert back.code == 0, back.err
    assert stored(tmp_path / "back") == stored(tmp_path / "nas")
    blocks = json.loads((tmp_path / "back" / "config.json").read_text())["block_configs"]
    kinds = [(each["attention"]["n_heads_in_group"], each["ffn"]["no_op"]) for each in blocks]
    assert kinds == [(g if isinstance(g, int) else None, m is None) for g, m in LAYERS]


def test_attention_without_a_block_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "nas", [(2, None), (2, 6.0)])
    ran = qconvert("to-gguf", tmp_path / "nas", "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and "attention and no ffn in layer 0, which llama.cpp's deci leaves out" in ran.err
