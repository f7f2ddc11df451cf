"""`to-gguf` of families that transformers lacks, and of the recorded checkpoints, in llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.gguf.test_from_gguf import run
from tests.gguf.test_gguf_families import IDS, ROWS, TIED, as_gguf, difference, made
from tests.support.gguf_families import save
from tests.support.gguf_models import SIZES, llama_cpp_logits, log_probabilities, save_transformers_model
from tests.support.models import stored

# Families without a class in transformers, whose weights are those of one that it has


def renamed(source: Path, folder: Path, config: dict[str, Any], rename: Callable[[Any], Any]) -> Path:
    """A copy of a model's folder with another config and its tensors under other names."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    sizes = json.loads((source / "config.json").read_text())
    kept = {key: sizes[key] for key in (*SIZES, "rms_norm_eps") if key in sizes}
    (folder / "config.json").write_text(json.dumps({**kept, **config}))
    tensors = {
        name: tensor.contiguous() for name, tensor in rename(load_file(source / "model.safetensors")).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def stacked(weights: dict[str, Any], parts: tuple[str, ...], whole: str) -> dict[str, Any]:
    """The weights with every `parts[0]` replaced by the stack of all parts."""
    import torch

    found = {name: weight for name, weight in weights.items() if not any(part in name for part in parts)}
    for name in weights:
        if parts[0] in name:
            pieces = [weights[name.replace(parts[0], part)] for part in parts]
            found[name.replace(parts[0], whole)] = torch.cat(pieces)
    return found


def with_names(weights: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The weights with pieces of their names replaced."""
    found = {}
    for name, weight in weights.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901
        found[name] = weight
    return found


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def packed(weights: dict[str, Any]) -> dict[str, Any]:
    return stacked(weights, QKV, "self_attn.W_pack")


def llama(folder: Path, **changes: Any) -> Path:
    config = {**SIZES, "rms_norm_eps": 1e-6, **changes}
    return save_transformers_model(folder, "Llama", config, spread=0.08)


# llama.cpp's own graph has the rotary embedding in models of 32 layers alone.
@pytest.mark.parametrize(("layers", "arch"), [(2, "llama"), (32, "baichuan")])
def test_baichuan_is_a_llama_with_one_linear_for_q_k_and_v(tmp_path: Path, layers: int, arch: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    source = llama(tmp_path / "llama", num_hidden_layers=layers, num_key_value_heads=4)
    config = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    gguf = as_gguf(renamed(source, tmp_path / "model", config, packed))
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == arch
    assert difference(source, gguf) < 0.01


def test_the_13b_baichuan_has_alibi_where_the_7b_is_rotary(tmp_path: Path) -> None:
    """The reference is a Llama all of whose tokens stand at position 0, with ALiBi in its mask.

    Slopes are those of Press et al., Train Short, Test Long: 2^(-8 h / heads) for head h from 1 on.
    """
    pytest.importorskip("cyllama.llama.llama_cpp")
    import torch
    import transformers

    source = llama(tmp_path / "llama", num_hidden_layers=40, num_key_value_heads=4)
    config = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "model_max_length": 128}
    folder = renamed(source, tmp_path / "model", config, packed)
    stated = json.loads((folder / "config.json").read_text())
    del stated["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(stated))
    distance_TT = torch.arange(len(IDS))[None, :] - torch.arange(len(IDS))[:, None]
    slopes_H = 2.0 ** (-8 * torch.arange(1, 5) / 4)
    mask_HTT = (slopes_H[:, None, None] * distance_TT).masked_fill(distance_TT > 0, -torch.inf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(
            torch.tensor([IDS]),
            attention_mask=mask_HTT[None],
            position_ids=torch.zeros(1, len(IDS), dtype=int),
        ).logits
    found = log_probabilities(llama_cpp_logits(as_gguf(folder), IDS, ROWS))
    assert np.abs(found - log_probabilities(logits[0].numpy())).max() < 0.01


def test_baichuan_2_has_a_head_of_unit_rows(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    import torch
    from safetensors.torch import load_file, save_file

    source = llama(tmp_path / "llama", num_key_value_heads=4)
    config = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}
    gguf = as_gguf(renamed(source, tmp_path / "model", config, packed))
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = torch.nn.functional.normalize(weights["lm_head.weight"])
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert difference(source, gguf) < 0.01


def test_internlm_is_a_llama_with_biases(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    source = llama(tmp_path / "llama", attention_bias=True)
    config = {"model_type": "internlm", "architectures": ["InternLMForCausalLM"], "bias": True}
    gguf = as_gguf(renamed(source, tmp_path / "model", config, dict))
    assert difference(source, gguf) < 0.01


def test_chatglm_is_a_glm_with_a_ratio_for_its_base(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    rope = {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
    source = made(tmp_path / "glm", "glm", rope_parameters=rope)
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        "self_attn.query_key_value": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "gate_up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }  # fmt: skip
    config = {
        "model_type": "chatglm", "architectures": ["ChatGLMModel"], "padded_vocab_size": ROWS,
        "num_layers": 2,
        "ffn_hidden_size": 96, "kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 2,
        "seq_length": 128, "layernorm_epsilon": 1.5625e-7, "add_qkv_bias": True, "rope_ratio": 50,
        "add_bias_linear": False, "rmsnorm": True, "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip

    def rename(weights: dict[str, Any]) -> dict[str, Any]:
        return with_names(stacked(weights, QKV, "self_attn.query_key_value"), names)

    gguf = as_gguf(renamed(source, tmp_path / "model", config, rename))
    assert difference(source, gguf) < 0.01


def test_openelm_of_equal_layers_is_a_qwen3(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    qwen3 = {**SIZES, "head_dim": 16, "rms_norm_eps": 1e-6, **TIED}
    source = save_transformers_model(tmp_path / "qwen3", "Qwen3", qwen3, spread=0.08)
    names = {
        "model.embed_tokens": "transformer.token_embeddings", "model.layers": "transformer.layers",
        "model.norm": "transformer.norm", "self_attn": "attn", "o_proj": "out_proj",
        "mlp.down_proj": "ffn.proj_2",
        "mlp.proj_1": "ffn.proj_1", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip

    def rename(weights: dict[str, Any]) -> dict[str, Any]:
        weights = stacked(weights, QKV, "self_attn.qkv_proj")
        return with_names(stacked(weights, ("mlp.gate_proj", "mlp.up_proj"), "mlp.proj_1"), names)

    config = {
        "model_type": "openelm", "architectures": ["OpenELMForCausalLM"], "model_dim": 64, "head_dim": 16,
        "num_transformer_layers": 2, "num_query_heads": [4, 4], "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.5, 1.5], "ffn_dim_divisor": 32, "normalize_qk_projections": True,
        "share_input_output_layers": True, "max_context_length": 128, "rope_freq_constant": 10000,
    }  # fmt: skip
    gguf = as_gguf(renamed(source, tmp_path / "model", config, rename))
    assert difference(source, gguf) < 0.01


def openelm_logits(weights: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """What OpenELM computes for IDS, written out from its modelling file: layers of different sizes."""
    torch = pytest.importorskip("torch")
    w = {name.removeprefix("transformer."): weight.float() for name, weight in weights.items()}
    size, ids = config["head_dim"], torch.tensor(IDS)
    angles = torch.outer(torch.arange(len(ids)).float(), 10000 ** (-torch.arange(0, size, 2) / size))
    cos, sin = (torch.cat([f(angles)] * 2, dim=1) for f in (torch.cos, torch.sin))

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def rotated(x: Any) -> Any:
        return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1) * sin

    x = w["token_embeddings.weight"][ids]
    for layer, (heads, kv) in enumerate(zip(config["num_query_heads"], config["num_kv_heads"], strict=True)):
        at = f"layers.{layer}."
        qkv = norm(x, f"{at}attn_norm") @ w[f"{at}attn.qkv_proj.weight"].T
        q, k, v = qkv.view(len(ids), -1, size).transpose(0, 1).split([heads, kv, kv])
        q, k = rotated(norm(q, f"{at}attn.q_norm")), rotated(norm(k, f"{at}attn.k_norm"))
        k, v = (part.repeat_interleave(heads // kv, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)
        x = x + y @ w[f"{at}attn.out_proj.weight"].T
        gate, up = (norm(x, f"{at}ffn_norm") @ w[f"{at}ffn.proj_1.weight"].T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{at}ffn.proj_2.weight"].T
    logits = norm(x, "norm") @ w["token_embeddings.weight"].T
    return log_probabilities(logits.numpy())


def test_openelm_of_different_layers(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    torch = pytest.importorskip("torch")
    hidden, size, heads, kv, inner = 64, 16, [2, 4, 6], [1, 2, 3], [64, 96, 160]
    shapes: dict[str, tuple[int, ...]] = {"token_embeddings": (ROWS, hidden), "norm": (hidden,)}
    for i in range(3):
        layer = {
            "attn.qkv_proj": ((heads[i] + 2 * kv[i]) * size, hidden), "attn.q_norm": (size,),
            "attn.k_norm": (size,), "attn.out_proj": (hidden, heads[i] * size), "attn_norm": (hidden,),
            "ffn_norm": (hidden,), "ffn.proj_1": (2 * inner[i], hidden), "ffn.proj_2": (hidden, inner[i]),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    torch.manual_seed(0)
    weights = {
        f"transformer.{name}.weight": (torch.randn(shape) * 0.15 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "openelm", "architectures": ["OpenELMForCausalLM"], "model_dim": hidden,
        "head_dim": size, "vocab_size": ROWS, "num_transformer_layers": 3, "num_query_heads": heads,
        "num_kv_heads": kv, "ffn_multipliers": [n / hidden for n in inner], "ffn_dim_divisor": 32,
        "normalize_qk_projections": True, "share_input_output_layers": True, "max_context_length": 128,
        "rope_freq_constant": 10000,
    }  # fmt: skip
    expected = openelm_logits(weights, config)
    gguf = as_gguf(save(tmp_path / "model", weights, config))
    # Measured: 0.006.
    found = log_probabilities(llama_cpp_logits(gguf, IDS, ROWS))
    assert np.abs(found - expected).max() < 0.02 and expected.std() > 1
    back = run("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", "bf16")
    assert stored(back) == stored(tmp_path / "model")


# The recorded checkpoints: measured 0.00007 (command-r) to 0.0021 (llama2)
ZOO = [
    "baichuan", "chatglm2", "command-r", "falcon-7b-style", "falcon-new-decoder", "gemma", "gemma2", "glm",
    "gpt2", "internlm2", "olmo", "phi3", "skywork", "yi",
]  # fmt: skip


def byte_tokenizer(rows: int) -> Any:
    """A byte-level BPE without merges and with as many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[: rows - 1]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(["<|endoftext|>", *symbols])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("name", ZOO)
def test_recorded_logits(assets: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    from safetensors.numpy import load_file

    source, folder = assets / "fixtures" / "zoo" / name, tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((source / file).read_bytes())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    byte_tokenizer(rows).save(str(folder / "tokenizer.json"))
    ids = json.loads((source / "golden.json").read_text())["logits"]["input_ids"]
    (recorded_TV,) = load_file(source / "logits.safetensors").values()
    expected = log_probabilities(recorded_TV.reshape(len(ids), rows))
    found = log_probabilities(llama_cpp_logits(as_gguf(folder), ids, rows))
    assert np.abs(found - expected).max() < 0.01
