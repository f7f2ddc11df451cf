"""Tiny seeded checkpoints in Hugging Face layout, written without qconvert and without transformers.

Names and shapes are spelled out here a second time on purpose: they are what `qconvert.models`
is held against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LIBRARY_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}

Arrays = dict[str, np.ndarray]


def tiny(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    biases: bool = False,
    dtype: str = "bf16",
    shards: int = 1,
    seed: int = 0,
    changes: Mapping[str, np.ndarray | None] | None = None,
    **sizes: Any,
) -> Path:
    """Write a random model into `folder` and return it.

    `biases` sets attention_bias (and mlp_bias for Llama); `sizes` are config.json keys; `changes`
    adds or replaces tensors by name (float32 ones are rounded to `dtype`), and None leaves one out.
    """
    config = tiny_config(family, tied=tied, biases=biases, dtype=dtype, **sizes)
    arrays = tiny_arrays(config, seed)
    for name, array in (changes or {}).items():
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_shards(folder, arrays, dtype, shards)
    return folder


def tiny_config(
    family: str = "qwen3", *, tied: bool = True, biases: bool = False, dtype: str = "bf16", **sizes: Any
) -> dict[str, Any]:
    """The config.json of `tiny`."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": _LIBRARY_DTYPES[dtype],
        "custom_key": {"kept": True},
    }
    if biases and family in ("qwen3", "llama"):
        config["attention_bias"] = True
    if biases and family == "llama":
        config["mlp_bias"] = True
    return config | sizes


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a config of `tiny_config` promises, in the order of the layers."""
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family, attention_bias = config["model_type"], config.get("attention_bias", False)
    linears = {
        "self_attn.q_proj": ((q, hidden), attention_bias or family == "qwen2"),
        "self_attn.k_proj": ((kv, hidden), attention_bias or family == "qwen2"),
        "self_attn.v_proj": ((kv, hidden), attention_bias or family == "qwen2"),
        "self_attn.o_proj": ((hidden, q), attention_bias),
        "mlp.gate_proj": ((inter, hidden), config.get("mlp_bias", False)),
        "mlp.up_proj": ((inter, hidden), config.get("mlp_bias", False)),
        "mlp.down_proj": ((hidden, inter), config.get("mlp_bias", False)),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBED: (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        for name, (shape, biased) in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if biased:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        if family == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes[HEAD] = (vocab, hidden)
    return shapes


def tiny_arrays(config: Mapping[str, Any], seed: int = 0) -> Arrays:
    """Random float32 weights: spreads far from the defaults, so that a forgotten tensor shows."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, shape in tiny_shapes(config).items():
        noise = random.standard_normal(shape, dtype=np.float32)
        arrays[name] = 1 + 0.2 * noise if "norm" in name else 0.06 * noise
    return arrays


def write_shards(folder: Path, arrays: Arrays, dtype: str = "bf16", shards: int = 1) -> None:
    """Write arrays with the safetensors library, floats rounded to `dtype`, in one file or several."""
    if shards == 1:
        write_file(folder / "model.safetensors", arrays, dtype)
        return
    names = list(arrays)
    size = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        held = names[number * size : (number + 1) * size]
        write_file(folder / file, {name: arrays[name] for name in held}, dtype)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_file(path: Path, arrays: Arrays, dtype: str = "bf16") -> None:
    """One safetensors file; float32 arrays are rounded to `dtype`, others stay what they are."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, _LIBRARY_DTYPES[dtype])
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
        for name, array in arrays.items()
    }
    rounded = {n: t.to(kind) if t.dtype is torch.float32 else t for n, t in tensors.items()}
    save_file(rounded, path, {"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: one token per byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every array of a folder as the safetensors library reads it: dtype, shape and bytes."""
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            found[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found
