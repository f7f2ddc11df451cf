"""`to-gguf` of every family: llama.cpp loads what we write, and computes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_models import (
    SIZES,
    llama_cpp_logits,
    llama_cpp_vocab,
    log_probabilities,
    save_transformers_model,
    transformers_logits,
)

IDS = [3, 17, 250, 9, 9, 101, 0, 44, 260, 271, 5, 120, 33, 2, 199, 299, 8, 71, 33, 90, 14, 7, 202, 31]
ROWS = 320
TEXTS = [
    "Hello World",
    " leading",
    "  two  spaces ",
    "na\u00efve caf\u00e9 3.14!",
    "\n\n\ttab",
    "it's 'LL 1234567",
    "\U0001f999 \u0442\u0435\u0441\u0442 \u8bd5\u9a8c",
]
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LONG = [1.0 + 0.25 * i for i in range(8)]
SHORT = [1.0 + 0.05 * i for i in range(8)]
GPT2_SIZES = {"vocab_size": ROWS, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 96}
# The class in transformers and a config of each family; what they leave out is in SIZES.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("Olmo", {"clip_qkv": 1.5}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-long": (
        "Phi3",
        {
            "pad_token_id": 0,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": LONG, "short_factor": SHORT,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "gemma": ("Gemma", {"head_dim": 32, **TIED}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, **TIED}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **TIED,
        },
    ),
    "command-r": ("Cohere", {"logit_scale": 0.5, **TIED}),
    "command-r-plus": ("Cohere", {"num_hidden_layers": 64, "use_qk_norm": True, "logit_scale": 0.5, **TIED}),
    "command-r7b": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 8, "head_dim": 16, "logit_scale": 0.5, **TIED},
    ),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 32, "pad_token_id": 0, "attention_bias": True}),
    "gpt2": ("GPT2", GPT2_SIZES),
    "falcon-7b": ("Falcon", {"multi_query": True, "layer_norm_epsilon": 1e-4, **TIED}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, **UNTIED}),
    "falcon-11b": (
        "Falcon",
        {
            "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 160, **UNTIED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500042.0},
        },
    ),
    "falcon-multihead": ("Falcon", {"multi_query": False, "alibi": False, **TIED}),
}  # fmt: skip


def made(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of a family, saved by transformers in float32."""
    class_name, sizes = CONFIGS[name]
    config = {**({} if "n_embd" in sizes else SIZES), **sizes, **changes}
    return save_transformers_model(folder / "model", class_name, config, spread=0.08)


def as_gguf(folder: Path, file_type: str = "f32", *flags: object) -> Path:
    out = folder.parent / f"{folder.name}-{file_type}.gguf"
    ran = qconvert("to-gguf", folder, "--type", file_type, "-o", out, "-q", *flags)
    assert ran.code == 0, ran.err
    return out


def difference_of_files(one: Path, other: Path) -> float:
    """The largest |delta log p| between two GGUF files in llama.cpp."""
    a, b = (log_probabilities(llama_cpp_logits(path, IDS, ROWS)) for path in (one, other))
    return float(np.abs(a - b).max())


def difference(folder: Path, gguf: Path, ids: list[int] = IDS, context: int = 256) -> float:
    """The largest |delta log p| between transformers in float32 and llama.cpp."""
    expected = log_probabilities(transformers_logits(folder, ids))
    assert expected.std() > 0.3
    return float(np.abs(log_probabilities(llama_cpp_logits(gguf, ids, ROWS, context)) - expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = made(tmp_path, name)
    # Measured: 0.0008 (command-r7b) to 0.0075 (gemma). Gemma 3's normed keys lose more in llama.cpp's
    # float16 cache: 0.031, of which rounding transformers' own keys and values makes 0.012.
    assert difference(folder, as_gguf(folder)) < {"gemma3": 0.05}.get(name, 0.01)


# Measured: 0.023 (command-r) to 0.17 (gemma2).
@pytest.mark.parametrize("name", ["olmo", "phi3", "gemma2", "command-r", "glm", "gpt2", "falcon-40b"])
def test_eight_bits_load_and_stay_near(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = made(tmp_path, name)
    assert difference(folder, as_gguf(folder, "q8_0")) < 0.3


def test_long_texts_have_factors_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = made(tmp_path, "phi3-long")
    assert difference(folder, as_gguf(folder), IDS * 11, context=512) < 0.01


# Buffers, heads, towers


def test_gpt2_with_its_mask_buffers(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    import torch
    from safetensors.torch import load_file, save_file

    folder = made(tmp_path, "gpt2")
    plain = as_gguf(folder).read_bytes()
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        weights[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128)
        weights[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert as_gguf(folder, "f32", "--overwrite").read_bytes() == plain


def test_a_vision_tower_stays_behind(tmp_path: Path) -> None:
    """Gemma 3 as it is published: the language model's config and names inside those of the whole."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    import torch
    from safetensors.torch import load_file, save_file

    folder = made(tmp_path, "gemma3")
    plain = as_gguf(folder)
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    weights = load_file(folder / "model.safetensors")
    weights = {f"language_model.{name}": weight for name, weight in weights.items()}
    weights["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(8, 3, 2, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "seen.gguf"
    ran = qconvert("to-gguf", folder, "--type", "f32", "-o", out)
    assert ran.code == 0, ran.err
    assert "vision: 1 tensor is left out; the GGUF holds the language model" in ran.err
    with GGUFFile(plain) as text_alone, GGUFFile(out) as seen:
        ours, theirs = ({k: e for k, e in f.kv.items() if "gemma3." in k} for f in (seen, text_alone))
        assert ours == theirs and len(ours) == 14
        assert list(seen.tensors.values()) == list(text_alone.tensors.values())
    assert difference_of_files(plain, out) == 0


@pytest.mark.parametrize(("window", "told"), [(64, True), (128, False), (None, False)])
def test_a_window_that_llama_cpp_leaves_out_is_told(tmp_path: Path, window: int | None, told: bool) -> None:
    folder = made(tmp_path, "phi3", sliding_window=window)
    ran = qconvert("to-gguf", folder, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 0, ran.err
    assert (f"sliding_window is {window}, which llama.cpp's phi3 leaves out" in ran.err) == told


# Real tokenizers, in files of their own family


@pytest.mark.parametrize(
    ("name", "tokenizer", "rows"),
    [("gpt2", "gpt2", 50257), ("falcon-7b", "falcon", 65024), ("phi3", "llama-2", 32064)],
)
def test_llama_cpp_cuts_texts_as_the_familys_tokenizer_does(
    assets: Path, tmp_path: Path, name: str, tokenizer: str, rows: int
) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    folder = made(tmp_path, name, vocab_size=rows)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    for path in (assets / "tokenizers" / tokenizer).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    files = [str(folder / file) for file in ("vocab.json", "merges.txt")]
    theirs = (
        ByteLevelBPETokenizer(*files)
        if tokenizer == "gpt2"
        else Tokenizer.from_file(str(folder / "tokenizer.json"))
    )
    ours, model = llama_cpp_vocab(llama_cpp, as_gguf(folder))
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert list(ours.tokenize(text, add_special=False, parse_special=False)) == expected, text
    del model


def test_a_name_that_llama_cpp_expects_tokens_of(tmp_path: Path) -> None:
    """A model is Phi-3 to llama.cpp by its name; without that name, the same tokenizer loads."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = made(tmp_path, "phi3").rename(tmp_path / "my-phi3")
    ran = qconvert("to-gguf", folder, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and "takes the model for Phi-3" in ran.err and "</s>, <unk>, <s>, which" in ran.err
    assert not list(tmp_path.glob("*.gguf*"))
    folder = folder.rename(tmp_path / "my-model")
    assert difference(folder, as_gguf(folder)) < 0.01


# Mixtures: names and fusions that Qwen and Llama do not have


@pytest.mark.parametrize("name", ["gemma", "phi3", "falcon-40b"])
@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q8_0"])
def test_llama_quantize_writes_the_same_tensors(tmp_path: Path, name: str, file_type: str) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    from qconvert.plan.gguf.file_types import find_file_type

    wide = {"hidden_size": 256, "intermediate_size": 512, "ffn_hidden_size": 512, "num_hidden_layers": 9}
    folder = made(tmp_path, name, **wide)
    params = llama_cpp.LlamaModelQuantizeParams()
    params.ftype, params.nthread = find_file_type(file_type).number, 1
    llama_cpp.model_quantize(str(as_gguf(folder)), str(tmp_path / "theirs.gguf"), params)
    with GGUFFile(as_gguf(folder, file_type)) as ours, GGUFFile(tmp_path / "theirs.gguf") as theirs:
        assert {n: (t.type, t.shape) for n, t in ours.tensors.items()} == {
            n: (t.type, t.shape) for n, t in theirs.tensors.items()
        }
        assert len({t.type for t in ours.tensors.values()}) >= {"Q4_K_M": 3, "Q8_0": 2}[file_type]
        for tensor in ours.tensors:
            rows = ours.specs[tensor].rows
            assert np.array_equal(ours.read(tensor, 0, rows), theirs.read(tensor, 0, rows)), tensor


# What llama.cpp would compute otherwise


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma", {"tie_word_embeddings": False}, "lm_head.weight: a head of its own"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm is true in a model of 2 layers"),
        ("olmo", {"attention_bias": True}, "attention_bias is true"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("phi3", {"hidden_size": 128, "head_dim": 16}, "4 heads of 16 are not the hidden 128"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("falcon-7b", {"alibi": True}, "alibi is true"),
        ("falcon-7b", {"parallel_attn": False}, "parallel_attn is false"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    folder = made(tmp_path, name, **changes)
    ran = qconvert("to-gguf", folder, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and says in ran.err and "safetensors" in ran.err
    assert not list(tmp_path.glob("*.gguf*"))
