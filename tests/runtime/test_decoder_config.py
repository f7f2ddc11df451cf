"""Configs as they lie on the Hub and as transformers 5 writes them; broken ones refused with a reason."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from qconvert.runtime.config import DecoderConfig, Experts

QWEN2: Json = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
MOE: Json = QWEN2 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
YARN: Json = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3: Json = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(**changes: object) -> DecoderConfig:
    return DecoderConfig.from_hf(QWEN2 | changes)


def test_qwen2_as_on_the_hub() -> None:
    config = read()
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (4, 4, 2, 32)
    assert config.rope.theta == 1e6 and config.rope.scaling is None
    assert config.windows == (None,) * 4
    assert {"attn.q", "attn.qkv"} <= config.biased and "attn.o" not in config.biased


@pytest.mark.parametrize("absent", [{}, {"num_key_value_heads": None}])
def test_absent_and_null_take_the_default_of_the_family(absent: Json) -> None:
    bare = {key: value for key, value in QWEN2.items() if key not in ("num_key_value_heads", "rope_theta")}
    config = DecoderConfig.from_hf(bare | absent)
    assert (config.kv_heads, config.head_dim, config.rope.theta) == (4, 32, 10_000.0)
    assert DecoderConfig.from_hf(bare | absent | {"model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_rope_theta_in_old_and_new_places(spelling: Json) -> None:
    bare = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    assert DecoderConfig.from_hf(bare | spelling).rope.theta == 5e5


def test_yarn_defaults() -> None:
    yarn = read(rope_scaling=YARN).rope.scaling
    assert yarn == YarnScaling(4.0, 0.1 * math.log(4.0) + 1.0, 32.0, 1.0, 32768, True)
    implied = read(
        rope_scaling={"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192}
    )
    assert isinstance(implied.rope.scaling, YarnScaling) and implied.rope.scaling.factor == 4.0
    equal = read(rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}).rope.scaling
    assert isinstance(equal, YarnScaling) and equal.attention_factor == 1.0


def test_linear_and_llama3() -> None:
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope.scaling == LinearScaling(2.0)
    assert read(rope_parameters=LLAMA3).rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 32768)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 9}, (None, None, None, 9)),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
        ({"model_type": "mistral", "sliding_window": 9}, (9,) * 4),
        ({"model_type": "llama", "use_sliding_window": True}, (None,) * 4),
    ],
)
def test_which_layers_slide(changes: Json, windows: tuple[int | None, ...]) -> None:
    assert read(**changes).windows == windows


def test_experts() -> None:
    config = DecoderConfig.from_hf(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.experts == Experts(per_token=2, normalise=False)
    assert [layer for layer in range(4) if config.has("mlp.router", layer)] == [1]
    assert not config.has("mlp.shared.gate", 1)
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert DecoderConfig.from_hf(renamed).experts == DecoderConfig.from_hf(MOE).experts


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model_type": "rwkv"}, UnsupportedModel, "not run here"),
        ({"model_type": None}, CorruptCheckpoint, "no model_type"),
        ({"hidden_act": "relu"}, UnsupportedModel, "relu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModel, "dynamic"),
        (
            {"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}}},
            UnsupportedModel,
            "by layer",
        ),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "0.5"),
        ({"num_key_value_heads": 3}, CorruptCheckpoint, "4 heads over 3"),
        ({"num_hidden_layers": 10**7}, CorruptCheckpoint, "10000000"),
        ({"hidden_size": "128"}, CorruptCheckpoint, "'128'"),
        ({"rms_norm_eps": math.nan}, CorruptCheckpoint, "nan"),
        ({"rope_theta": 1.0}, CorruptCheckpoint, "rope_theta"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, CorruptCheckpoint, "low_freq_factor"),
        ({"rope_scaling": [1]}, CorruptCheckpoint, "rope"),
        (
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": [[]] * 4},
            UnsupportedModel,
            "layer_types",
        ),
    ],
)
def test_refuses(changes: Json, error: type[QConvertError], says: str) -> None:
    with pytest.raises(error, match=says):
        read(**changes)


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 9}, {"mlp_only_layers": 7}, {"num_experts": 0}])
def test_refuses_experts(changes: Json) -> None:
    with pytest.raises(CorruptCheckpoint):
        DecoderConfig.from_hf(MOE | changes)


def test_real_configs_are_read_or_refused_with_a_reason(assets: Path) -> None:
    read_types = set()
    for path in sorted((assets / "metadata" / "configs").glob("*_config.json")):
        try:
            config = DecoderConfig.from_hf(json.loads(path.read_text()))
        except QConvertError:
            continue
        read_types.add(config.model_type)
        if config.model_type.startswith("qwen"):
            assert config.windows == (None,) * config.layers, path.name
    assert read_types == {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "gpt_oss"),
        *("deepseek_v3", "kimi_k2", "glm4_moe", "llama4"),
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "gemma4"),
    }
