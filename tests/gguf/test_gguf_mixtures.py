"""Families of the catalogue's second half as GGUF: llama.cpp computes with them what transformers does."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import (
    CLOSE,
    IDS,
    add_tokenizer,
    distance,
    logits_of,
    random_model,
    save,
    scatter,
    written,
)
from tests.support.gguf_models import SIZES, llama_cpp_logits, log_probabilities, transformers_logits

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OSS = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
    "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", LATENT),
    "deepseek-v2-yarn": ("DeepseekV2", LATENT | {"rope_parameters": YARN}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "num_hidden_layers": 26, "spread": 0.05},
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | {"n_group": 4, "topk_group": 2}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "use_qk_norm": True, "attention_bias": True, "head_dim": 16, "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss": ("GptOss", OSS),
    "qwen2-moe-tied": (
        "Qwen2Moe",
        EXPERTS
        | {"tie_word_embeddings": True, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        DELTA | EXPERTS | {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 32},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    family, changes = CASES[name]
    folder = random_model(tmp_path / name, family, **changes)
    assert distance(folder, log_probabilities(transformers_logits(folder, IDS))) < CLOSE


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", "gpt-oss", "qwen3.5"])
def test_eight_bits_load_and_stay_near(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    family, changes = CASES[name]
    folder = random_model(tmp_path / name, family, **changes)
    found = log_probabilities(llama_cpp_logits(written(folder, "--type", "q8_0"), IDS, 320))
    expected = log_probabilities(transformers_logits(folder, IDS))
    # Routers choose other experts where scores are near, so no bound holds everywhere.
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.98


def test_the_first_qwen(tmp_path: Path) -> None:
    """It computes what Qwen2 does with a head of keys for each head of queries, under other names."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "num_key_value_heads": 4}
    model = scatter(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)))
    names = {
        "model.layers.": "transformer.h.", "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj",
        "self_attn.o_proj": "attn.c_proj",
    }  # fmt: skip
    weights = {}
    for theirs, weight in model.state_dict().items():
        name = reduce(lambda text, pair: text.replace(*pair), names.items(), theirs)
        weights[name] = weight
    for layer in range(2):
        for part in ("weight", "bias"):
            parts = [weights.pop(f"transformer.h.{layer}.self_attn.{x}_proj.{part}") for x in "qkv"]
            weights[f"transformer.h.{layer}.attn.c_attn.{part}"] = torch.cat(parts)
    config = {
        "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "hidden_size": 64,
        "intermediate_size": 2 * SIZES["intermediate_size"], "num_hidden_layers": 2,
        "num_attention_heads": 4, "kv_channels": 16, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000,
        "rotary_pct": 1.0, "seq_length": 128, "max_position_embeddings": 128, "vocab_size": 320,
    }  # fmt: skip
    folder = save(tmp_path / "qwen", weights, config)
    assert distance(folder, logits_of(model)) < CLOSE


def test_the_first_deepseek(tmp_path: Path) -> None:
    """Llama's attention and DeepSeek-V2's experts, both as transformers has them."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

    experts = {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    }  # fmt: skip
    sizes = {**SIZES, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    config = transformers.DeepseekV2Config(**sizes, **experts, topk_method="greedy", n_group=1, topk_group=1)
    model.model.layers[1].mlp = getattr(v2, "DeepseekV2Moe", None) and v2.DeepseekV2Moe(config)
    scatter(model)
    weights = {}
    for name, weight in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj" and weight.ndim == 3:
            for expert, whole in enumerate(weight):
                for part, rows in zip(("gate", "up"), whole.chunk(2), strict=True):
                    weights[f"{stem}.{expert}.{part}_proj.weight"] = rows
        elif last == "down_proj" and weight.ndim == 3:
            weights |= {f"{stem}.{expert}.down_proj.weight": rows for expert, rows in enumerate(weight)}
        else:
            weights[name] = weight
    stated = {
        "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", **sizes, **experts,
        "first_k_dense_replace": 1, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip
    folder = save(tmp_path / "deepseek", weights, stated)
    assert distance(folder, logits_of(model)) < CLOSE


# gpt-oss in MXFP4


def mxfp4_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of gpt-oss's arrays (two codes to a byte, the first one low) as GGML's 17-byte blocks."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).astype(np.uint8)


def test_mxfp4_experts_keep_their_codes(assets: Path, tmp_path: Path) -> None:
    """The bytes in the file are the source's, put in GGML's order; gguf's own reader sees the numbers."""
    gguf = pytest.importorskip("gguf")
    safetensors = pytest.importorskip("safetensors.torch")
    source = assets / "fixtures" / "quantized" / "gptoss-mxfp4"
    folder = tmp_path / "oss"
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    bare_bytes(folder)
    stored = safetensors.load_file(folder / "model.safetensors")
    weights = {
        name: weight.numpy() for name, weight in stored.items() if name.endswith(("_blocks", "_scales"))
    }
    out = tmp_path / "m.gguf"
    ran = qconvert("to-gguf", folder, "--type", "f16", "-o", out, "-q")
    assert ran.code == 0, ran.err
    reader = gguf.GGUFReader(str(out))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, first in (("ffn_gate_exps", 0), ("ffn_up_exps", 1), ("ffn_down_exps", None)):
        stem = "model.layers.0.mlp.experts." + ("down_proj" if first is None else "gate_up_proj")
        rows = slice(first, None, 2) if first is not None else slice(None)
        expected = mxfp4_blocks(weights[f"{stem}_blocks"][:, rows], weights[f"{stem}_scales"][:, rows])
        found = tensors[f"blk.0.{name}.weight"]
        assert found.tensor_type.name == "MXFP4"
        assert np.array_equal(np.asarray(found.data).reshape(expected.shape), expected)


def test_mxfp4_is_quantized_again_only_when_asked(assets: Path, tmp_path: Path) -> None:
    source = assets / "fixtures" / "quantized" / "gptoss-mxfp4"
    folder = tmp_path / "oss"
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    bare_bytes(folder)
    flags = ["--type", "q8_0", "-o", tmp_path / "m.gguf", "-q", "--overwrite"]
    assert qconvert("to-gguf", folder, *flags).code == 0
    with GGUFFile(tmp_path / "m.gguf") as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert types["blk.0.ffn_down_exps.weight"] == "MXFP4" and types["blk.0.attn_q.weight"] == "Q8_0"
    ran = qconvert("to-gguf", folder, *flags, "--tensor-type", "ffn_down_exps=q8_0")
    assert ran.code == 1 and "loses twice" in ran.err
    assert qconvert("to-gguf", folder, *flags, "--allow-requantize").code == 0


def test_quantized_weights_that_are_turned_are_computed_first(tmp_path: Path) -> None:
    """DeepSeek-V3 is published in FP8, and the keys' half of `kv_b` has to be transposed."""
    folder = random_model(tmp_path / "v3", "DeepseekV3", **LATENT)
    flags = ["--scheme", "int8-channel", "-q"]
    assert qconvert("quantize", folder, "-o", tmp_path / "int8", *flags).code == 0
    ran = qconvert("dequantize", tmp_path / "int8", "-o", tmp_path / "plain", "--dtype", "f32", "-q")
    assert ran.code == 0, ran.err
    with GGUFFile(written(tmp_path / "int8")) as one, GGUFFile(written(tmp_path / "plain")) as other:
        assert sorted(one.tensors) == sorted(other.tensors)
        for name, spec in one.specs.items():
            rows = [file.read(name, 0, spec.rows) for file in (one, other)]
            assert np.abs(rows[0] - rows[1]).max() <= np.abs(rows[1]).max() / 128, name
    ran = qconvert("to-gguf", tmp_path / "int8", "--type", "q4_0", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and "loses twice" in ran.err


# What is refused, and what is said


def refused(folder: Path, **changes: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    ran = qconvert("to-gguf", folder, "--type", "f16", "-o", folder / "m.gguf", "-q")
    assert ran.code == 1 and not (folder / "m.gguf").exists()
    return ran.err


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("deepseek-v2", {"scoring_func": "cubic"}, "scoring_func is 'cubic'"),
        ("deepseek-v2", {"rope_scaling": YARN | {"mscale": 2.0}}, "mscale_all_dim 0.707"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 2}, "a window in every other layer"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], told: str
) -> None:
    family, sizes = CASES[name]
    folder = random_model(tmp_path / name, family, **sizes)
    if "rope_scaling" in changes:
        changes = {"rope_parameters": changes["rope_scaling"]}
    assert told in refused(folder, **changes)


def test_queries_without_a_low_rank_need_the_number_of_layers_that_llama_cpp_counts(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "v2", "DeepseekV2", **(LATENT | {"q_lora_rank": None}))
    assert "q_lora_rank is None in 2 layers" in refused(folder)


@pytest.mark.parametrize(
    ("name", "told"), [("openai-gpt", "GPT"), ("yuan2", "Yuan2"), ("rwkv4", "versions 6 and 7")]
)
def test_families_without_a_graph_get_a_plain_sentence(
    assets: Path, tmp_path: Path, name: str, told: str
) -> None:
    folder = assets / "fixtures" / "zoo" / name
    ran = qconvert("to-gguf", folder, "--type", "f16", "-o", tmp_path / "m.gguf")
    assert ran.code == 1
    assert "cannot be written as GGUF: llama.cpp has no graph for it" in ran.err and told in ran.err
    assert "`qconvert quantize` writes it as safetensors" in ran.err


@pytest.mark.parametrize("name", ["grok-1", "grok-1-jax-names", "deepseek-v1-moe", "deepseek-v2"])
def test_tiny_checkpoints_load_and_run(assets: Path, tmp_path: Path, name: str) -> None:
    """Those that nobody else computes logits for: llama.cpp takes the file and finds finite ones."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = tmp_path / name
    shutil.copytree(assets / "fixtures" / "zoo" / name, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    bare_bytes(folder)
    found = llama_cpp_logits(written(folder), [i % 256 for i in IDS], 256)
    assert np.isfinite(found).all() and found.std() > 0.1
    golden = folder / "logits.safetensors"
    if golden.exists():
        recorded = json.loads((folder / "golden.json").read_text())["logits"]["input_ids"]
        expected = pytest.importorskip("safetensors.numpy").load_file(golden)["logits"]
        found = llama_cpp_logits(folder / "m.gguf", recorded, 256)
        assert np.abs(log_probabilities(found) - log_probabilities(expected)).max() < CLOSE


def grok_logits(weights: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """What the port of Grok-1 to Hugging Face computes, written out from its modelling file.

    Attention has its logits scaled and bounded, the two chosen experts' weights are not normalised (the
    norm behind them undoes that), and each block's output is normalised before it is added.
    """
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w = {name: weight.float() for name, weight in weights.items()}
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], 16
    ids = torch.tensor(IDS) % 256
    angles = torch.outer(torch.arange(len(ids)).float(), 10000 ** (-torch.arange(0, size, 2) / size))
    cos, sin = (torch.cat([f(angles)] * 2, dim=1) for f in (torch.cos, torch.sin))

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.scale"]

    def split(x: Any, count: int) -> Any:
        return x.view(len(ids), count, size).transpose(0, 1)

    def turned(x: Any) -> Any:
        return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1) * sin

    x = w["model.embed_tokens.weight"][ids] * config["embedding_multiplier_scale"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, f"{at}pre_attn_norm")
        q, k, v = (y @ w[f"{at}attn.{part}_proj.weight"].T for part in "qkv")
        q, k, v = turned(split(q, heads)), turned(split(k, kv)), split(v, kv)
        k, v = (part.repeat_interleave(heads // kv, dim=0) for part in (k, v))
        bound = config["max_attn_value"]
        scores = bound * torch.tanh(q @ k.transpose(1, 2) * config["attn_output_multiplier"] / bound)
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1) @ w[f"{at}attn.o_proj.weight"].T
        x = x + norm(y, f"{at}post_attn_norm")
        y = norm(x, f"{at}pre_moe_norm")
        routed, chosen = (y @ w[f"{at}moe_block.gate.weight"].T).softmax(-1).topk(2, dim=-1)
        made = torch.zeros_like(y)
        for token in range(len(ids)):
            for share, expert in zip(routed[token], chosen[token].tolist(), strict=True):
                gate, up, down = (
                    w[f"{at}moe_block.experts.{expert}.{part}.weight"]
                    for part in ("linear", "linear_v", "linear_1")
                )
                made[token] += share * (down @ (functional.gelu(gate @ y[token]) * (up @ y[token])))
        x = x + norm(made, f"{at}post_moe_norm")
    logits = norm(x, "model.norm") @ w["lm_head.weight"].T * config["output_multiplier_scale"]
    return log_probabilities(logits.numpy())


def test_grok_computes_what_its_port_does(assets: Path, tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "grok"
    shutil.copytree(assets / "fixtures" / "zoo" / "grok-1", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    bare_bytes(folder)
    weights = safetensors.load_file(folder / "model.safetensors")
    expected = grok_logits(weights, json.loads((folder / "config.json").read_text()))
    found = log_probabilities(llama_cpp_logits(written(folder), [i % 256 for i in IDS], 256))
    assert np.abs(found - expected).max() < CLOSE and expected.std() > 0.2


def bare_bytes(folder: Path) -> None:
    """A tokenizer of the 256 bytes and nothing else."""
    tokenizers = pytest.importorskip("tokenizers")
    add_tokenizer(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spec["model"] |= {"vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    spec["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text("{}")
