"""`to-gguf` of families from OLMoE to Mamba-2: llama.cpp computes what transformers does; files go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, written
from tests.support.gguf_models import llama_cpp_logits, log_probabilities
from tests.support.models import stored
from tests.support.newer_families import CONFIGS, STRETCHED, made, restated
from tests.support.newer_llama_cpp import newer_logits

LONGER = [(7 * i + i * i) % 300 for i in range(100)]
# llama.cpp of the older binding takes the heads of Mamba-2 for 0, and does not load it.
OLDER = [name for name in CONFIGS if name != "mamba2"]
# gelu is approximated by a table of float16 numbers in llama.cpp.
GELU = ("phi", "gpt-neox", "starcoder2")


def computed(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return log_probabilities(model(torch.tensor([ids])).logits[0].numpy())


@pytest.mark.parametrize("name", OLDER)
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    model, gguf = made(tmp_path, name), written(tmp_path)
    for ids in (IDS, LONGER):
        expected = computed(model, ids)
        assert expected.std() > 0.3
        # Measured: 0.000003 (mamba) to 0.0055 (the 64 layers of exaone4-32b); keys are cached in float16.
        found = log_probabilities(llama_cpp_logits(gguf, ids, expected.shape[-1]))
        assert np.abs(found - expected).max() < 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_newer_llama_cpp_computes_the_same_in_float32(tmp_path: Path, name: str) -> None:
    model, gguf = made(tmp_path, name), written(tmp_path)
    expected = computed(model, LONGER)
    found = log_probabilities(newer_logits(gguf, LONGER, expected.shape[-1]))
    # Measured: at most 0.000007, with gelu 0.0008.
    assert np.abs(found - expected).max() < (0.002 if name.startswith(GELU) else 3e-5)


# Measured: 0.014 (granite) to 0.22 (hunyuan-moe, whose router then chooses otherwise).
@pytest.mark.parametrize("name", [name for name in OLDER if name != "exaone4-32b"])
def test_eight_bits_load_and_stay_near(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    model, gguf = made(tmp_path, name), written(tmp_path, "--type", "q8_0")
    expected = computed(model, IDS)
    found = log_probabilities(llama_cpp_logits(gguf, IDS, expected.shape[-1]))
    assert np.abs(found - expected).max() < 0.3


# Without layers of Mamba, Granite 4 is a Granite, and a file is read as the first with this graph.
READ_AS_ANOTHER = "granite4-dense"


@pytest.mark.parametrize("name", CONFIGS)
def test_files_go_back_to_the_same_weights(tmp_path: Path, name: str) -> None:
    import torch
    import transformers

    model, gguf = made(tmp_path, name), written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == CONFIGS[name][1]
    back = qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q", "--dtype", "f32")
    assert back.code == 0, back.err
    ours, theirs = stored(tmp_path / "back"), stored(tmp_path)
    assert (ours.keys() == theirs.keys()) == (name != READ_AS_ANOTHER)
    # A GGUF holds -exp(A_log), whose logarithm may differ in the last bit, and the products of Falcon-H1's
    # weights and multipliers, which come back as weights.
    assert name.startswith("falcon") or all(
        ours[each] == theirs[each] for each in ours if not each.endswith("A_log") and each in theirs
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
    )
    assert np.abs(computed(again.eval(), IDS) - computed(model, IDS)).max() < 1e-5


# Words of published configs, which transformers 5 writes otherwise


def contents(gguf: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The keys and tensors of a file, whose order is that of the model's files."""
    with GGUFFile(gguf) as file:
        rows = {name: file.read(name, 0, file.specs[name].rows).tobytes() for name in file.tensors}
        return {key: entry.value for key, entry in file.kv.items()}, rows


def test_published_words_for_layers_make_the_same_file(tmp_path: Path) -> None:
    made(tmp_path, "granite4")
    plain = contents(written(tmp_path))
    restated(tmp_path, layer_types=["mamba", "attention", "mamba"], time_step_limit=[0.0, float("inf")])
    assert contents(written(tmp_path)) == plain


def test_published_words_for_rotation_and_the_head_make_the_same_file(tmp_path: Path) -> None:
    """Pythia's config and names, and the buffers in its files."""
    import torch
    from safetensors.torch import load_file, save_file

    made(tmp_path, "gpt-neox-serial")
    plain = contents(written(tmp_path))
    restated(tmp_path, rope_parameters=None, rotary_pct=0.5, rotary_emb_base=30000)
    weights = load_file(tmp_path / "model.safetensors")
    assert "embed_out.weight" in weights
    for layer in range(2):
        module = f"gpt_neox.layers.{layer}.attention"
        weights[f"{module}.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool)
        weights[f"{module}.masked_bias"] = torch.tensor(-1e9)
        weights[f"{module}.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert contents(written(tmp_path)) == plain
    weights["lm_head.weight"] = weights.pop("embed_out.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert contents(written(tmp_path)) == plain


def test_lfm2_as_it_was_published_first(tmp_path: Path) -> None:
    """The layers with attention by number, and the width under another key."""
    made(tmp_path, "lfm2")
    plain = contents(written(tmp_path))
    restated(tmp_path, layer_types=None, full_attn_idxs=[1, 3], block_ff_dim=96, intermediate_size=None)
    assert contents(written(tmp_path)) == plain


# What llama.cpp would compute otherwise


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("olmoe", {"clip_qkv": 1.5}, "clip_qkv is 1.5"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("granite4", {"mamba_expand": 4, "mamba_d_head": 32}, "mamba_expand is 4"),
        ("granite4", {"mamba_proj_bias": True}, "mamba_proj_bias is true"),
        ("granite4", {"time_step_limit": [0.1, 1.0]}, "time_step_limit is [0.1, 1.0]"),
        ("granite4-attention", {"position_embedding_type": None}, "positions are not rotated"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is true"),
        ("gpt-neox", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("gpt-neox", {"attention_bias": False}, "attention_bias is false"),
        ("starcoder2", {"use_bias": False}, "use_bias is false"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is true"),
        ("exaone4", {"sliding_window": 8, "layer_types": None}, "sliding_window is 8 in a model of 2 layers"),
        ("hunyuan", {"rope_parameters": {**STRETCHED, "alpha": None}}, "rope scaling 'dynamic'"),
        ("hunyuan-moe", {"moe_topk": [2, 1]}, "moe_topk differs from layer to layer"),
        ("arcee", {"mlp_bias": True}, "mlp_bias is true"),
        ("ernie4.5-moe", {"moe_layer_end_index": 1}, "moe_layer_end_index is 1"),
        ("lfm2", {"conv_bias": True}, "conv_bias is true"),
        ("lfm2-moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0"),
        ("mamba", {"use_bias": True}, "use_bias is true"),
        ("falcon-h1", {"tie_word_embeddings": True}, "lm_head_multiplier 0.5 and embedding_multiplier 3.0"),
        ("falcon-h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is true"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    made(tmp_path, name, **changes)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and says in ran.err and "safetensors" in ran.err
    assert not list(tmp_path.glob("*.gguf*"))
