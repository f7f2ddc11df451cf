"""Small GGUF models for the tests of everything that llama.cpp is asked about."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor
from qconvert.formats.gguf.writer import plan_files
from qconvert.formats.tokenizers.pretokenizer_patterns import QWEN2

WIDTH = 32


def write_gguf(path: Path, kv: Sequence[KV], tensors: Sequence[GGUFTensor]) -> Path:
    """A file of this content whose tensors are all zero."""
    (plan,) = plan_files(path.name, kv, tensors)
    path.write_bytes(plan.head + bytes(plan.size - len(plan.head)))
    return path


def one_layer_llama(path: Path, tokenizer: Iterable[KV], rows: int) -> Path:
    """The smallest model llama.cpp loads, with a real tokenizer."""
    kv = (
        KV.text("general.architecture", "llama"),
        KV.u32("llama.block_count", 1),
        KV.u32("llama.context_length", 64),
        KV.u32("llama.embedding_length", WIDTH),
        KV.u32("llama.feed_forward_length", WIDTH),
        KV.u32("llama.attention.head_count", 1),
        KV.f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
        *tokenizer,
    )
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = (
        GGUFTensor("token_embd.weight", GGMLType.Q4_0, (rows, WIDTH)),
        GGUFTensor("output_norm.weight", GGMLType.F32, (WIDTH,)),
        *(GGUFTensor(f"blk.0.{name}.weight", GGMLType.F32, (WIDTH,)) for name in ("attn_norm", "ffn_norm")),
        *(GGUFTensor(f"blk.0.{name}.weight", GGMLType.F32, (WIDTH, WIDTH)) for name in square),
    )
    return write_gguf(path, kv, tensors)


def llama_cpp_vocab(llama_cpp: Any, path: Path) -> tuple[Any, Any]:
    """llama.cpp's tokenizer of a GGUF, and the model that must outlive it."""
    model = llama_cpp.LlamaModel(str(path), llama_cpp.LlamaModelParams(), verbose=False)
    return model.get_vocab(), model


def test_strings(assets: Path, name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's own test strings for a vocabulary, with the tokens it must find."""
    folder = assets / "ggml-vocab"
    with (folder / f"ggml-vocab-{name}.gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=False)]


test_strings.__test__ = False  # type: ignore[attr-defined]


TEXT = "The quick brown fox jumps over the lazy dog; it's 1234 o'clock. " * 4
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MOE_SIZES: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# The class in transformers and the config of each model that the tests write as GGUF.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "llama": ("Llama", {"num_attention_heads": 8, "head_dim": 16}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2moe": ("Qwen2Moe", MOE_SIZES | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", MOE_SIZES | {"head_dim": 16, "norm_topk_prob": True}),
}  # fmt: skip


def transformers_model(folder: Path, name: str, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A random model of `TRANSFORMERS` and its tokenizer, saved by transformers."""
    class_name, sizes = TRANSFORMERS[name]
    return save_transformers_model(folder, class_name, {**SIZES, **sizes, **changes}, dtype)


def save_transformers_model(
    folder: Path, class_name: str, config: dict[str, Any], dtype: str = "float32", spread: float = 0.15
) -> Path:
    """A random model of a class (without `ForCausalLM`) and its tokenizer, saved by transformers."""
    import torch
    import transformers

    stem = class_name.removesuffix("Text")
    ending = "LMHeadModel" if class_name == "GPT2" else "ForCausalLM"
    made = getattr(transformers, f"{class_name}Config")(**config)
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}{ending}")(made)
    for weight in model.parameters():  # far from the defaults, so that a forgotten or turned one shows
        torch.nn.init.normal_(weight, float(weight.ndim == 1), spread)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    qwen2_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def qwen2_tokenizer() -> Any:
    """A byte-level BPE with Qwen2's structure and a few dozen merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def llama_cpp_logits(path: Path, ids: Sequence[int], rows: int, context: int = 256) -> np.ndarray:
    """llama.cpp's logits float32 [len(ids), rows] for a text, with room for `context` tokens."""
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):  # type: ignore[misc, name-defined]
        n_vocab = rows  # the binding's get_logits_ith asks the model for it, which lacks it

    model = Model(str(path), llama_cpp.LlamaModelParams(), verbose=False)
    params = llama_cpp.LlamaContextParams()
    params.n_ctx, params.n_threads = context, 1
    running = llama_cpp.LlamaContext(model, params, verbose=False)
    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1, verbose=False)
    batch.set_batch(list(ids), 0, True)
    assert running.decode(batch) == 0
    return np.array([running.get_logits_ith(i) for i in range(len(ids))], np.float32)


def log_probabilities(logits_TV: np.ndarray) -> np.ndarray:
    """log softmax in float64."""
    shifted = logits_TV.astype(np.float64) - logits_TV.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def transformers_logits(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """transformers' float32 logits [len(ids), vocabulary] for a text."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV: np.ndarray = model(torch.tensor([list(ids)])).logits[0].numpy()
    return logits_TV


def imatrix_dat(entries: dict[str, tuple[int, list[float]]], end: bytes = b"") -> bytes:
    """An importance matrix as llama-imatrix used to write it: name, calls and sums of every tensor."""
    raw = struct.pack("<i", len(entries))
    for name, (calls, sums) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(sums))
        raw += np.array(sums, "<f4").tobytes()
    return raw + end
