"""Declares, per family, what a decoder computes beyond what the names and shapes of its parameters tell.

Which biases, norms, fused linears, experts and attention sinks a model has follows from its parameters
(`qconvert.models`). The rest is a `Graph`: kinds of norms and activations, scalings, attention windows,
and the defaults of transformers' configuration classes for keys that a config.json may leave out.
To run another family, add a line to GRAPHS, and a field to `Graph` for what no other family computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from qconvert.core.config_json import optional_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families.gemma4 import SLIDING, kind_of

Slides = Callable[[Json, int], bool]
"""Whether a layer of a model with these settings has the window; else it attends to all positions."""
Rotates = Callable[[Json, int, bool], bool]
"""Whether a layer, which has a window or has not, rotates its queries and keys."""


def all_but_every(n: int) -> Slides:
    """Every n-th layer attends to all positions, the others have the window."""
    return lambda settings, i: (i + 1) % (optional_int(settings, "sliding_window_pattern") or n) != 0


def _edge(settings: Json) -> int:
    edge = settings.get("max_window_layers")
    return edge if isinstance(edge, int) else 28


def _listed_or_not_fourth(settings: Json, i: int, windowed: bool = False) -> bool:
    """Llama 4's and SmolLM3's rule: `no_rope_layers` (0: no rotation), else all layers but every fourth."""
    listed = whole_numbers(settings, "no_rope_layers")
    if not listed:
        return (i + 1) % (optional_int(settings, "no_rope_layer_interval") or 4) != 0
    if i >= len(listed):
        raise CorruptCheckpoint(f"config.json: no_rope_layers has no entry {i}")
    return listed[i] != 0


@dataclass(frozen=True, slots=True)
class Graph:
    """What the models of a family compute; the defaults are Llama's.

    `activation`, `norm_eps` and `experts_per_token` are config keys; `fixed_eps` stands where no key does.
    `score_scale` is what scores are multiplied by whatever the config says. `values_have_norm`: values are
    normalised as queries and keys are, and layers may share keys and values (Gemma 4). `layer_norm` subtracts
    the mean, as RMS norms do not; `weightless_norms` says that the norms before both blocks have no
    parameters. `parallel`: both blocks read the same normalised input. `slides` is the rule for layers with a
    window, `explicit_layers` whether `layer_types` overrides it, `window_flag` whether `sliding_window`
    counts only beside `use_sliding_window: true` (Qwen2.5 configs carry a window of 131072 beside `false`).
    `window` is the key of its length, and `chunked` says that it does not slide: the text is cut into such
    chunks. `rotates` is the rule for layers that are rotated, `partial_rope`: a part of each head may be;
    `norm_after_rope`: queries and keys are normalised then, without weights, unless `use_qk_norm: false`.
    `normalise_experts`: whether the weights of a token's experts sum to 1 (None: `norm_topk_prob`).
    `routing`: a softmax over all experts; one whose experts stand in groups where `topk_method` says so
    (DeepSeek-V2); or sigmoids of experts in groups (DeepSeek-V3). `weighs_inputs`: the weight of an expert
    multiplies what it reads, not what it gives. `latent`: attention is DeepSeek's.
    `clamped_swiglu` is gpt-oss' activation. `gelu_is_tanh`: the config says gelu and means the tanh form.
    """

    activation: str = "hidden_act"
    gelu_is_tanh: bool = False
    clamped_swiglu: bool = False
    experts_per_token: str = "num_experts_per_tok"
    score_scale: float | None = None
    values_have_norm: bool = False
    norm_eps: str = "rms_norm_eps"
    fixed_eps: float | None = None
    layer_norm: bool = False
    weightless_norms: bool = False
    parallel: bool = False
    scaled_embedding: bool = False
    interleaved_rope: bool = False
    rotates: Rotates = lambda settings, i, windowed: True
    partial_rope: bool = False
    norm_after_rope: bool = False
    window: str = "sliding_window"
    chunked: bool = False
    slides: Slides = lambda settings, i: False
    explicit_layers: bool = False
    window_flag: bool = False
    normalise_experts: bool | None = None
    routing: Literal["softmax", "grouped softmax", "sigmoid"] = "softmax"
    weighs_inputs: bool = False
    latent: bool = False
    defaults: Json = field(default_factory=dict)


LLAMA = Graph()
MISTRAL = Graph(slides=lambda settings, i: True)
QWEN2 = Graph(slides=lambda settings, i: i >= _edge(settings), explicit_layers=True, window_flag=True)
GEMMA = Graph(
    gelu_is_tanh=True,
    scaled_embedding=True,
    defaults={"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
)
GEMMA2 = replace(
    GEMMA,
    activation="hidden_activation",
    slides=all_but_every(2),
    explicit_layers=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
)
GEMMA3 = replace(
    GEMMA2,
    slides=all_but_every(6),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
GEMMA4 = replace(
    GEMMA,
    activation="hidden_activation",
    slides=lambda settings, i: kind_of(settings, i, 6) == SLIDING,
    score_scale=1.0,
    values_have_norm=True,
    normalise_experts=True,
    experts_per_token="top_k_experts",
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
)
COHERE = Graph(
    norm_eps="layer_norm_eps",
    layer_norm=True,
    parallel=True,
    interleaved_rope=True,
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192},
)
GLM = Graph(
    interleaved_rope=True,
    partial_rope=True,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131_072},
)
GPT_OSS = Graph(
    clamped_swiglu=True,
    slides=all_but_every(2),
    explicit_layers=True,
    normalise_experts=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
)
DEEPSEEK_V2 = Graph(latent=True, interleaved_rope=True, routing="grouped softmax", normalise_experts=False)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2, routing="sigmoid", normalise_experts=None, defaults={"norm_topk_prob": True}
)

LLAMA4 = Graph(
    interleaved_rope=True,
    rotates=_listed_or_not_fourth,
    norm_after_rope=True,
    window="attention_chunk_size",
    chunked=True,
    slides=_listed_or_not_fourth,
    explicit_layers=True,
    normalise_experts=False,
    routing="sigmoid",
    weighs_inputs=True,
    defaults={
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "max_position_embeddings": 131_072,
    },
)
QWEN_HYBRID = Graph(
    partial_rope=True,
    normalise_experts=True,
    defaults={
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 32_768,
    },
)

GRAPHS: Mapping[str, Graph] = {
    "llama": LLAMA,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "mistral": MISTRAL,
    "mixtral": replace(MISTRAL, normalise_experts=True, defaults={"rms_norm_eps": 1e-5}),
    "qwen2": QWEN2,
    "qwen3": QWEN2,
    "qwen2_moe": replace(QWEN2, slides=lambda settings, i: i % 2 == 0 and i < _edge(settings)),
    "qwen3_moe": replace(QWEN2, slides=MISTRAL.slides, explicit_layers=False),
    "qwen3_next": replace(
        QWEN_HYBRID,
        normalise_experts=None,
        defaults={**QWEN_HYBRID.defaults, "num_experts_per_tok": 10, "norm_topk_prob": True},
    ),
    "qwen3_5": QWEN_HYBRID,
    "qwen3_5_text": QWEN_HYBRID,
    "qwen3_5_moe": QWEN_HYBRID,
    "qwen3_5_moe_text": QWEN_HYBRID,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "phi3": replace(
        MISTRAL, partial_rope=True, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    ),
    "cohere": replace(COHERE, defaults={**COHERE.defaults, "rope_theta": 5e5}),
    "cohere2": replace(
        COHERE,
        slides=all_but_every(4),
        explicit_layers=True,
        rotates=lambda settings, i, windowed: windowed,
        defaults={**COHERE.defaults, "sliding_window": 4096},
    ),
    "olmo": Graph(layer_norm=True, weightless_norms=True, fixed_eps=1e-5),
    "olmo2": Graph(defaults={"rms_norm_eps": 1e-5}),
    "smollm3": Graph(
        rotates=_listed_or_not_fourth,
        slides=lambda settings, i: True,
        explicit_layers=True,
        window_flag=True,
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 2e6, "max_position_embeddings": 32_768},
    ),
    "seed_oss": Graph(defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 524_288}),
    "ernie4_5": Graph(
        interleaved_rope=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131_072},
    ),
    "glm": GLM,
    "glm4": GLM,
    "deepseek": LLAMA,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "glm4_moe": Graph(
        partial_rope=True,
        routing="sigmoid",
        defaults={"norm_topk_prob": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    ),
    "gpt_oss": GPT_OSS,
}
"""The families that run here, by `model_type`."""
