"""The checkpoints that the recorded commands start from: seeded, and the same bytes on every machine.

Everything is drawn by numpy and written without transformers, whose next version may name or order
weights in another way.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.pairs import SOURCES as PAIRS
from tests.pairs import gpt_oss
from tests.support.gguf_models import imatrix_dat, qwen2_tokenizer
from tests.support.models import Arrays, byte_tokenizer, tiny, tiny_arrays, tiny_config, write_file

Config = dict[str, Any]

_LLAMA = """
    model.embed_tokens.weight 320 64
    model.norm.weight 64
    model.layers.{0,1}.{input,post_attention}_layernorm.weight 64
    model.layers.{0,1}.self_attn.{q,o}_proj.weight 64 64
    model.layers.{0,1}.self_attn.{k,v}_proj.weight 32 64
"""
_HEAD = "lm_head.weight 320 64\n"
_MLP = """
    model.layers.{0,1}.mlp.{gate,up}_proj.weight 96 64
    model.layers.{0,1}.mlp.down_proj.weight 64 96
"""
_QK_NORM = "model.layers.{0,1}.self_attn.{q,k}_norm.weight 16\n"
_SIZES: Config = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA: Config = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA2 = f"{_LLAMA}{_MLP}model.layers.{{0,1}}.{{pre,post}}_feedforward_layernorm.weight 64\n"
_T5 = """
    shared.weight 320 64
    lm_head.weight 320 64
    {encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 4
    {encoder,decoder}.block.{0,1}.layer.0.SelfAttention.{q,k,v,o}.weight 64 64
    {encoder,decoder}.block.{0,1}.layer.{0,1}.layer_norm.weight 64
    {encoder,decoder}.final_layer_norm.weight 64
    encoder.block.{0,1}.layer.1.DenseReluDense.wi_{0,1}.weight 96 64
    encoder.block.{0,1}.layer.1.DenseReluDense.wo.weight 64 96
    decoder.block.{0,1}.layer.1.EncDecAttention.{q,k,v,o}.weight 64 64
    decoder.block.{0,1}.layer.2.layer_norm.weight 64
    decoder.block.{0,1}.layer.2.DenseReluDense.wi_{0,1}.weight 96 64
    decoder.block.{0,1}.layer.2.DenseReluDense.wo.weight 64 96
"""

# What a family's config says beside the sizes, and its weights: a name with alternatives, and a shape.
FAMILIES: dict[str, tuple[str, str, Config, str]] = {
    "qwen2": (
        "qwen2", "Qwen2ForCausalLM", {},
        f"{_LLAMA}{_HEAD}{_MLP}"
        "model.layers.{0,1}.self_attn.q_proj.bias 64\nmodel.layers.{0,1}.self_attn.{k,v}_proj.bias 32",
    ),
    "qwen3-moe": (
        "qwen3_moe", "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        f"{_LLAMA}{_HEAD}{_QK_NORM}"
        "model.layers.{0,1}.mlp.gate.weight 4 64\n"
        "model.layers.{0,1}.mlp.experts.{0,1,2,3}.{gate,up}_proj.weight 32 64\n"
        "model.layers.{0,1}.mlp.experts.{0,1,2,3}.down_proj.weight 64 32",
    ),
    "mixtral": (
        "mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2},
        f"{_LLAMA}{_HEAD}"
        "model.layers.{0,1}.block_sparse_moe.gate.weight 4 64\n"
        "model.layers.{0,1}.block_sparse_moe.experts.{0,1,2,3}.w{1,3}.weight 96 64\n"
        "model.layers.{0,1}.block_sparse_moe.experts.{0,1,2,3}.w2.weight 64 96",
    ),
    "phi": (  # llama.cpp asks for Phi-3's own tokens where a name says phi3
        "phi3", "Phi3ForCausalLM", {"pad_token_id": 0, "original_max_position_embeddings": 128},
        "model.embed_tokens.weight 320 64\nmodel.norm.weight 64\nlm_head.weight 320 64\n"
        "model.layers.{0,1}.{input,post_attention}_layernorm.weight 64\n"
        "model.layers.{0,1}.self_attn.qkv_proj.weight 128 64\n"
        "model.layers.{0,1}.self_attn.o_proj.weight 64 64\n"
        "model.layers.{0,1}.mlp.gate_up_proj.weight 192 64\nmodel.layers.{0,1}.mlp.down_proj.weight 64 96",
    ),
    "gemma": (
        "gemma", "GemmaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}, f"{_LLAMA}{_MLP}"
    ),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", _GEMMA, _GEMMA2),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _GEMMA, f"{_GEMMA2}{_QK_NORM}"),
    "gpt2": (
        "gpt2", "GPT2LMHeadModel",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 96,
         "activation_function": "gelu_new", "tie_word_embeddings": True},
        "transformer.wte.weight 320 64\ntransformer.wpe.weight 128 64\n"
        "transformer.ln_f.{weight,bias} 64\ntransformer.h.{0,1}.ln_{1,2}.{weight,bias} 64\n"
        "transformer.h.{0,1}.attn.c_attn.weight 64 192\ntransformer.h.{0,1}.attn.c_attn.bias 192\n"
        "transformer.h.{0,1}.attn.c_proj.weight 64 64\ntransformer.h.{0,1}.attn.c_proj.bias 64\n"
        "transformer.h.{0,1}.mlp.c_fc.weight 64 96\ntransformer.h.{0,1}.mlp.c_fc.bias 96\n"
        "transformer.h.{0,1}.mlp.c_proj.weight 96 64\ntransformer.h.{0,1}.mlp.c_proj.bias 64",
    ),
    "falcon": (
        "falcon", "FalconForCausalLM",
        {"multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
         "new_decoder_architecture": False, "ffn_hidden_size": 256, "tie_word_embeddings": True},
        "transformer.word_embeddings.weight 320 64\ntransformer.ln_f.{weight,bias} 64\n"
        "transformer.h.{0,1}.input_layernorm.{weight,bias} 64\n"
        "transformer.h.{0,1}.self_attention.query_key_value.weight 96 64\n"
        "transformer.h.{0,1}.self_attention.dense.weight 64 64\n"
        "transformer.h.{0,1}.mlp.dense_h_to_4h.weight 256 64\n"
        "transformer.h.{0,1}.mlp.dense_4h_to_h.weight 64 256",
    ),
    "deepseek-v2": (
        "deepseek_v2", "DeepseekV2ForCausalLM",
        {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
         "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
         "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "num_key_value_heads": 4},
        "model.embed_tokens.weight 320 64\nmodel.norm.weight 64\nlm_head.weight 320 64\n"
        "model.layers.{0,1}.{input,post_attention}_layernorm.weight 64\n"
        "model.layers.{0,1}.self_attn.kv_a_layernorm.weight 32\n"
        "model.layers.{0,1}.self_attn.kv_a_proj_with_mqa.weight 48 64\n"
        "model.layers.{0,1}.self_attn.kv_b_proj.weight 128 32\n"
        "model.layers.{0,1}.self_attn.q_a_proj.weight 48 64\n"
        "model.layers.{0,1}.self_attn.q_a_layernorm.weight 48\n"
        "model.layers.{0,1}.self_attn.q_b_proj.weight 128 48\n"
        "model.layers.{0,1}.self_attn.o_proj.weight 64 64\n"
        "model.layers.0.mlp.{gate,up}_proj.weight 96 64\nmodel.layers.0.mlp.down_proj.weight 64 96\n"
        "model.layers.1.mlp.gate.weight 4 64\n"
        "model.layers.1.mlp.{experts.{0,1,2,3},shared_experts}.{gate,up}_proj.weight 32 64\n"
        "model.layers.1.mlp.{experts.{0,1,2,3},shared_experts}.down_proj.weight 64 32",
    ),
    "bert": (
        "bert", "BertModel",
        {"num_key_value_heads": None, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
        "embeddings.word_embeddings.weight 320 64\nembeddings.position_embeddings.weight 128 64\n"
        "embeddings.token_type_embeddings.weight 2 64\nembeddings.LayerNorm.{weight,bias} 64\n"
        "encoder.layer.{0,1}.attention.self.{query,key,value}.weight 64 64\n"
        "encoder.layer.{0,1}.attention.self.{query,key,value}.bias 64\n"
        "encoder.layer.{0,1}.attention.output.dense.weight 64 64\n"
        "encoder.layer.{0,1}.{attention.output,output}.{dense.bias,LayerNorm.weight,LayerNorm.bias} 64\n"
        "encoder.layer.{0,1}.intermediate.dense.weight 96 64\n"
        "encoder.layer.{0,1}.intermediate.dense.bias 96\nencoder.layer.{0,1}.output.dense.weight 64 96\n"
        "pooler.dense.weight 64 64\npooler.dense.bias 64",
    ),
    "t5": (
        "t5", "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "num_key_value_heads": None},
        _T5,
    ),
}  # fmt: skip


def spelled(name: str) -> Iterator[str]:
    """Every name that a name with `{one,another}` stands for, the innermost braces first."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        yield name
        return
    for choice in match[1].split(","):
        yield from spelled(name[: match.start()] + choice + name[match.end() :])


def _tokenizer() -> Config:
    """Qwen2's structure with a few merges of ours: those that are trained are up to the library."""
    found: Config = json.loads(qwen2_tokenizer().to_str())
    symbols = sorted(symbol for symbol in found["model"]["vocab"] if len(symbol) == 1)
    merges = [["t", "h"], ["th", "e"], ["i", "n"], ["in", "g"], ["a", "n"], ["an", "d"]]
    tokens = [*symbols, *("".join(merge) for merge in merges)]
    found["model"] |= {"vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}
    found["added_tokens"][0]["id"] = len(tokens)
    return found


def family(name: str, folder: Path) -> Path:
    """A model of `FAMILIES` in bf16, with a tokenizer."""
    model_type, class_name, changes, lines = FAMILIES[name]
    config = {"model_type": model_type, "architectures": [class_name], **_SIZES, **changes}
    config = {key: value for key, value in config.items() if value is not None}
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for line in filter(None, map(str.strip, lines.splitlines())):
        pattern, *sizes = line.split(" ")
        for weight in sorted({*spelled(pattern)}):
            noise = random.standard_normal([int(size) for size in sizes], dtype=np.float32)
            arrays[weight] = 1 + 0.2 * noise if re.search(r"norm|ln_\w+\.weight", weight) else 0.06 * noise
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_file(folder / "model.safetensors", arrays)
    if name == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        (folder / "vocab.txt").write_text("\n".join([*special, *(f"w{i}" for i in range(315))]) + "\n")
        settings = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, **settings}))
    else:
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def _tiny(family: str = "qwen3", **wish: Any) -> Callable[[Path], Path]:
    layers = {"num_hidden_layers": wish.pop("num_hidden_layers", 1)}
    return lambda folder: tiny(folder, family, **layers, **wish)


def _with_card(folder: Path) -> Path:
    """A model whose own card has things to keep and things to leave."""
    tiny(folder, "mistral", num_hidden_layers=1, tied=False)
    text = "---\nlicense: apache-2.0\nlanguage: [en, de]\nmodel-index: secret\n---\n# Theirs\n"
    (folder / "README.md").write_text(text)
    return folder


def _equal_head(folder: Path) -> Path:
    """A head of its own that equals the embedding."""
    table = tiny_arrays(tiny_config("qwen3", num_hidden_layers=1))["model.embed_tokens.weight"]
    return tiny(folder, tied=False, num_hidden_layers=1, changes={"lm_head.weight": table})


def _nonfinite(folder: Path) -> Path:
    """A weight with a NaN and an infinity."""
    name = "model.layers.0.mlp.up_proj.weight"
    weight = tiny_arrays(tiny_config("qwen3", num_hidden_layers=1))[name]
    weight[3, 5], weight[7, 9] = np.nan, np.inf
    return tiny(folder, num_hidden_layers=1, changes={name: weight})


def _strange(folder: Path, inputs: int = 3) -> Path:
    """A Llama under other names, with a config key of its own and a matrix more, of so many columns."""
    config = tiny_config("llama", tied=False, num_hidden_layers=1)
    arrays = tiny_arrays(config)
    for ours, theirs in (("self_attn.", "attention."), ("model.embed_tokens", "model.tokens")):
        arrays = {name.replace(ours, theirs, 1): array for name, array in arrays.items()}
    arrays["model.layers.0.attention.gain.weight"] = np.ones((64, inputs), np.float32)
    config |= {"model_type": "strange", "architectures": ["StrangeForCausalLM"]}
    config["width"] = config.pop("hidden_size")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_file(folder / "model.safetensors", arrays)
    return folder


def _act_order_mlp(folder: Path) -> Path:
    """GPTQ whose down projections alone are in activation order, which the rows before them take over."""
    from safetensors.numpy import load_file, save_file

    from tests.support.commands import made

    model = tiny(folder / "m", "qwen2", dtype="f16", num_hidden_layers=1)
    out = made("convert", model, "--to", "gptq", "--scheme", "int4-g32", "-o", folder / "gptq")
    arrays = load_file(out / "model.safetensors")
    groups = np.random.default_rng(0).permutation(np.arange(384) // 32).astype(np.int32)
    arrays["model.layers.0.mlp.down_proj.g_idx"] = groups
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    return out


def _file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / name

    return make


def _imatrix(folder: Path) -> Path:
    """An importance matrix for `wide`, in the older binary."""
    random = np.random.default_rng(0)
    entries: dict[str, tuple[int, list[float]]] = {}
    widths = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"), 256)
    for part, width in {**widths, "ffn_down": 512}.items():
        entries[f"blk.0.{part}.weight"] = (4, random.uniform(0.01, 4, width).round(3).tolist())
    return _file("imatrix.dat", imatrix_dat(entries, b"\7\0\0\0\7\0\0\0cal.txt"))(folder)


def zoo(name: str, assets: Path, folder: Path) -> Path:
    """A recorded checkpoint of a family, with a byte-level tokenizer as large as its vocabulary."""
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(assets / "fixtures" / "zoo" / name / file, folder / file)
    tokenizer = json.loads(byte_tokenizer().to_str())
    symbols = sorted(tokenizer["model"]["vocab"])[:255]
    tokenizer["model"]["vocab"] = {symbol: i for i, symbol in enumerate(["<|endoftext|>", *symbols])}
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


RECIPE = """
scheme: int4-asym-g64
rules:
  - {select: mlp.down, scheme: int8-g64}
  - {select: 're:[qkv]_proj', scheme: int6-g32}
keep: [layers.0-0.attn.o]
fuse: [gate_up]
search: false
"""
DECLARED = """
scheme: int4-g64
architecture:
  like: llama
  rename: {self_attn.: attention., model.embed_tokens: model.tokens}
  keys: {hidden_size: width}
  slots:
    - {role: attn.gain, module: "model.layers.{layer}.attention.gain", shape: [head_dim, 3], kind: other}
"""
# What a command's line may name in braces.
SOURCES: dict[str, Callable[[Path], Path]] = {
    "dense": _tiny(),
    "wide": _tiny(intermediate_size=512),
    "llama-f16": _tiny("llama", tied=False, biases=True, dtype="f16", num_hidden_layers=2),
    "qwen2-f32": _tiny("qwen2", dtype="f32", biases=True),
    "shards": _tiny("mistral", tied=False, shards=3, num_hidden_layers=2),
    "uneven": _tiny("qwen2", intermediate_size=320),
    "odd": _tiny("qwen2", intermediate_size=300),
    "card": _with_card,
    "equal-head": _equal_head,
    "nonfinite": _nonfinite,
    "strange": _strange,
    "stranger": partial(_strange, inputs=40),
    "gpt-oss": gpt_oss,
    "act-order": PAIRS["gptq, activation order"],
    "act-order-mlp": _act_order_mlp,
    "torchao": PAIRS["torchao int8"],
    "imatrix": _imatrix,
    "recipe": _file("recipe.yaml", RECIPE),
    "declared": _file("declared.yaml", DECLARED),
    "misspelt": _file("misspelt.yaml", "scheme: int4\nruls: []\n"),
    "misruled": _file("misruled.yaml", "scheme: int4\nrules:\n  - {select: mlp.dwn, scheme: int8}\n"),
    **{name: partial(family, name) for name in FAMILIES},
}
