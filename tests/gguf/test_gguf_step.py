"""`to-gguf` of Step-3.5 and 3.7: llama.cpp computes what transformers does, and files come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, distance, logits_of, saved_seeing, written
from tests.support.gguf_models import SIZES
from tests.support.models import stored

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING, SLIDING, FULL]
LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TEXT: dict[str, Any] = {
    **SIZES, "head_dim": 32, "num_hidden_layers": 4, "layer_types": KINDS, "sliding_window": 8,
    "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "share_expert_dim": 48,
    "moe_router_scaling_factor": 3.0, "swiglu_limits": [0.0, 0.5, 0.0, 0.7],
    "swiglu_limits_shared": [0.4, 0.0, 0.0, 0.3],
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


def made(folder: Path, **changes: Any) -> Any:
    """A random model that sees, saved by transformers in float32 with a tokenizer."""
    return saved_seeing(folder, "step3p7", {**TEXT, **changes})


def scaled() -> dict[str, Any]:
    ropes = TEXT["rope_parameters"]
    return {**ropes, FULL: {**ropes[FULL], **LLAMA3}}


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": scaled()}], ids=["plain", "llama3"])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    # Measured: 0.0023 and 0.0020.
    assert distance(tmp_path, logits_of(made(tmp_path, **changes))) < 0.01


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": scaled()}], ids=["plain", "llama3"])
def test_files_go_back_to_the_same_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    made(tmp_path, **changes)
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == "step35"
        assert file.kv["step35.attention.head_count"].value == (4, 6, 6, 4)
    back = qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q", "--dtype", "f32")
    assert back.code == 0, back.err
    ours, theirs = stored(tmp_path / "back"), stored(tmp_path)
    assert set(theirs) - set(ours) == {name for name in theirs if "vision" in name or "vit" in name}
    for name in ours:
        if "norm" not in name:  # 1 + w loses low bits
            assert ours[name] == theirs[name], name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "num_sliding_attention_heads", "swiglu_limits"):
        assert config[key] == TEXT[key]
    assert config["rope_parameters"] == changes.get("rope_parameters", TEXT["rope_parameters"])


def content(gguf: Path) -> Any:
    """The keys of the architecture, and the bytes of all tensors."""
    with GGUFFile(gguf) as file:
        keys = {key: entry.value for key, entry in file.kv.items() if key.startswith("step35.")}
        return keys, {name: file.read(name, 0, spec.rows).tobytes() for name, spec in file.specs.items()}


def test_published_words_for_the_same_make_the_same_file(tmp_path: Path) -> None:
    """Lists by layer, with entries of the layers that predict further tokens, as Step-3.5-Flash has them."""
    made(tmp_path / "new", rope_parameters=scaled())
    expected = content(written(tmp_path / "new"))
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    text = config.pop("text_config")
    for key in ("rope_parameters", "num_sliding_attention_heads", "mlp_layer_types", "num_experts_per_tok"):
        text.pop(key)
    old = {
        **config, **text, "model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "moe_top_k": 2,
        "attention_other_setting": {"num_attention_heads": 6}, "moe_layers_enum": "1,2,3",
        "layer_types": [*KINDS, SLIDING], "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4], "rope_scaling": LLAMA3,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0], "yarn_only_types": [FULL],
        "swiglu_limits": [*TEXT["swiglu_limits"], 0.0], "swiglu_limits_shared": [0.4, 0, 0, 0.3, 0],
    }  # fmt: skip
    for key in ("vision_config", "num_key_value_heads", "n_routed_experts"):
        old.pop(key, None)
    old |= {"num_attention_groups": 2, "n_routed_experts": 8}
    (tmp_path / "new" / "config.json").write_text(json.dumps(old))
    assert content(written(tmp_path / "new")) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": None}, "partial_rotary_factor of full_attention is 1.0"),
        ({"attention_bias": True}, "attention_bias is true"),
    ],
)
def test_what_the_graph_does_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    made(tmp_path, **{key: value for key, value in changes.items() if value is True})
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf", "--dry-run")
    assert ran.code == 1 and said in ran.err


def test_the_window_and_the_gate_matter(tmp_path: Path) -> None:
    """What the others would not notice: a file without them computes something else."""
    model = made(tmp_path)
    before = logits_of(model)
    language = model.model.language_model
    language.layers[1].self_attn.g_proj.weight.data.zero_()
    assert np.abs(logits_of(model) - before).max() > 0.05
    assert len(IDS) > TEXT["sliding_window"]
