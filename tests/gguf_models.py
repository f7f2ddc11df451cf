"""Small GGUF models for the tests of everything that llama.cpp is asked about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qconvert.formats.gguf_sink import plan_files
from qconvert.gguf_types import KV, GGMLType, GGUFTensor

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
