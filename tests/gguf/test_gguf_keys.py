"""Model metadata: what llama.cpp's converter wrote for the same configs, key by key and in order."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.formats.gguf.writer import plan_files
from qconvert.formats.tokenizers.to_gguf import read_tokenizer
from qconvert.models import Architecture
from qconvert.models.gguf.families import facts_of, gguf_model
from qconvert.models.gguf.identity import ParameterCounts, identify
from qconvert.models.gguf.keys import file_keys, head_size, rope_freqs
from qconvert.models.gguf.names import gguf_name
from qconvert.plan.gguf.file_types import find_file_type
from qconvert.plan.gguf.mixture import MixFacts, choose_types
from qconvert.quant.llama3_rope import llama3_factors
from tests.support.gguf_models import write_gguf

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "vocab_size": 32000,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def keys(model_type: str, drop: tuple[str, ...] = (), **changes: Any) -> list[tuple[str, object]]:
    """The keys of a model between the tokenizer's and the general ones."""
    config = {"model_type": model_type, **BASE, **changes}
    for key in drop:
        del config[key]
    facts = facts_of(Architecture.of(config))
    found = file_keys(facts, file_type=1, general=(), tokenizer=(), requantized=False)
    arch = facts.model.arch
    return [(e.key.removeprefix(f"{arch}."), e.value) for e in found]


def expected(
    arch: str, *middle: tuple[str, object], late: tuple[tuple[str, object], ...] = ()
) -> list[tuple[str, object]]:
    return [
        ("general.architecture", arch),
        ("general.type", "model"),
        ("block_count", 2),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        *middle,
        ("general.file_type", 1),
        *late,
        ("general.quantization_version", 2),
    ]


EPS = ("attention.layer_norm_rms_epsilon", 1e-6)
HEADS_16 = (("attention.key_length", 16), ("attention.value_length", 16))
HEADS_32 = (("attention.key_length", 32), ("attention.value_length", 32))
LLAMA_LATE = (("vocab_size", 32000), ("rope.dimension_count", 16))
EXPERTS = (("expert_count", 4), ("expert_used_count", 2))


def theta(value: float) -> tuple[str, object]:
    return ("rope.freq_base", value)


# Recorded from convert_hf_to_gguf.py of llama.cpp at commit 0c1e57098 with transformers 5.23.
CONVERTER = [
    (keys("qwen2", rope_theta=1e6), expected("qwen2", theta(1e6), EPS)),
    (
        keys(
            "qwen2",
            rope_theta=1e6,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        expected(
            "qwen2",
            ("rope.scaling.type", "yarn"),
            ("rope.scaling.factor", 4.0),
            ("rope.scaling.original_context_length", 32768),
            theta(1e6),
            EPS,
        ),
    ),
    (keys("qwen3", rope_theta=1000000, head_dim=32), expected("qwen3", theta(1e6), EPS, *HEADS_32)),
    (
        keys("qwen3_moe", rope_theta=1000000, head_dim=32, norm_topk_prob=True, **MOE),
        expected(
            "qwen3moe", theta(1e6), EPS, *EXPERTS, *HEADS_32, late=(("expert_feed_forward_length", 32),)
        ),
    ),
    (
        keys("qwen3_moe", norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **MOE),
        expected("qwen3moe", theta(1e4), EPS, *EXPERTS, late=(("expert_feed_forward_length", 32),)),
    ),
    (
        keys("qwen2_moe", rope_theta=1e6, shared_expert_intermediate_size=64, norm_topk_prob=False, **MOE),
        expected(
            "qwen2moe",
            theta(1e6),
            EPS,
            *EXPERTS,
            late=(("expert_feed_forward_length", 32), ("expert_shared_feed_forward_length", 64)),
        ),
    ),
    (keys("llama"), expected("llama", theta(1e4), EPS, *HEADS_16, late=LLAMA_LATE)),
    (
        keys("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}),
        expected(
            "llama",
            ("rope.scaling.type", "linear"),
            ("rope.scaling.factor", 2.0),
            theta(5e5),
            EPS,
            *HEADS_16,
            late=LLAMA_LATE,
        ),
    ),
    (
        keys("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        expected("llama", theta(5e5), EPS, *HEADS_16, late=LLAMA_LATE),
    ),
    (
        keys(
            "llama",
            rope_parameters={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2,
                "rope_theta": 20000.0,
            },
        ),
        expected(
            "llama",
            ("rope.scaling.type", "yarn"),
            ("rope.scaling.factor", 8.0),
            ("rope.scaling.original_context_length", 64),
            ("rope.scaling.yarn_attn_factor", 1.2),
            ("rope.scaling.yarn_beta_fast", 32.0),
            ("rope.scaling.yarn_beta_slow", 1.0),
            theta(2e4),
            EPS,
            *HEADS_16,
            late=LLAMA_LATE,
        ),
    ),
    (
        keys("mistral", rope_theta=1e6, sliding_window=None),
        expected("llama", theta(1e6), EPS, *HEADS_16, late=LLAMA_LATE),
    ),
    (
        keys("mixtral", rope_theta=1e6, num_local_experts=4, num_experts_per_tok=2),
        expected("llama", theta(1e6), EPS, *EXPERTS, late=LLAMA_LATE),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), CONVERTER)
def test_keys_and_order_of_the_converter(
    ours: list[tuple[str, object]], theirs: list[tuple[str, object]]
) -> None:
    assert ours == theirs


def test_what_transformers_assumes_is_written() -> None:
    missing = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    llama = dict(keys("llama", drop=missing))
    assert (llama["attention.head_count_kv"], llama["context_length"]) == (4, 2048)
    mistral = dict(keys("mistral", drop=missing, num_attention_heads=8))
    assert (mistral["attention.head_count_kv"], mistral["context_length"]) == (8, 131072)
    assert dict(keys("qwen3", rope_theta=None))["attention.key_length"] == 128


def test_the_whole_header_of_a_model_llama_cpp_converted(assets: Path) -> None:
    """tiny-qwen3 by convert_hf_to_gguf.py, and by llama-quantize, which writes what it sets last."""
    golden = json.loads((assets / "fixtures" / "gguf" / "golden.json").read_text())
    folder = assets / "models" / "tiny-qwen3"
    config = json.loads((folder / "config.json").read_text())
    shapes = [(name, tuple(t["shape"])) for name, t in golden["files"]["BF16"]["tensors"].items()]
    identity = identify("tiny-qwen3", config, ParameterCounts.of(shapes))
    tokenizer = read_tokenizer(folder, config["vocab_size"], config, pre_tokenizer="qwen2").kv

    def ours(name: str, *, requantized: bool) -> tuple[KV, ...]:
        number = find_file_type(name).number
        return file_keys(
            facts_of(Architecture.of(config)),
            file_type=number,
            general=identity.kv,
            tokenizer=tokenizer,
            requantized=requantized,
        )

    converted = {e.key: e.value for e in ours("BF16", requantized=False)}
    assert list(converted) == list(golden["bf16_metadata"])
    for key, value in golden["bf16_metadata"].items():
        if isinstance(value, dict):
            assert len(converted[key]) == value["array"]
            spelled = json.dumps(list(converted[key]), ensure_ascii=False)
            variants = {spelled, json.dumps(list(converted[key]))}
            assert value["sha256_of_json"] in {hashlib.sha256(v.encode()).hexdigest() for v in variants}
        else:
            assert converted[key] == pytest.approx(value)
    path = assets / "fixtures" / "gguf" / "tiny-qwen3-Q4_K_M.gguf"
    chosen = choose_types("Q4_K_M", shapes, MixFacts("qwen3", 8, 4, 2))
    tensors = [GGUFTensor(name, choice.type, dict(shapes)[name]) for name, choice in chosen.items()]
    (plan,) = plan_files(path.name, ours("Q4_K_M", requantized=True), tensors)
    assert path.read_bytes()[: len(plan.head)] == plan.head
    assert path.stat().st_size == plan.size


def test_llama_3_frequencies_are_the_converters() -> None:
    """Some values of rope_freqs.weight that the converter wrote for Llama 3.1 8B, to the bit."""
    config = {
        **BASE,
        "model_type": "llama",
        "head_dim": 128,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    (constant,) = rope_freqs(facts_of(Architecture.of(config)))
    assert constant.name == "rope_freqs.weight" and constant.rope is not None
    rope = constant.rope
    factors = llama3_factors(rope.head_dim, rope.theta, *astuple(rope.scaling))
    assert factors.dtype == np.float32
    digest = hashlib.sha256(factors.tobytes()).hexdigest()
    assert digest == "8b516af9cb5db26ed32831eb6f493dd620843d1cd69ca7bbad760c76061cd565"
    assert not list(rope_freqs(facts_of(Architecture.of({**BASE, "model_type": "llama"}))))


@pytest.mark.parametrize(
    ("model_type", "normalises", "right"),
    [
        ("qwen2_moe", False, True),
        ("qwen2_moe", True, False),
        ("qwen3_moe", True, True),
        ("qwen3_moe", False, False),
    ],
)
def test_llama_cpp_decides_whether_expert_weights_are_normalised(
    model_type: str, normalises: bool, right: bool
) -> None:
    if right:
        assert keys(model_type, norm_topk_prob=normalises, **MOE)
        return
    with pytest.raises(UnsupportedModel, match=f"norm_topk_prob is {str(normalises).lower()}"):
        keys(model_type, norm_topk_prob=normalises, **MOE)


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "names"),
    [
        ("openai-gpt", {}, UnsupportedModel, "openai-gpt"),
        ("qwen3_moe", {}, CorruptCheckpoint, "num_local_experts"),
        ("qwen3_moe", MOE, UnsupportedModel, "norm_topk_prob is false"),
        (
            "qwen3_moe",
            {**MOE, "norm_topk_prob": True, "mlp_only_layers": [0]},
            UnsupportedModel,
            "no experts",
        ),
        (
            "qwen3_moe",
            {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2},
            UnsupportedModel,
            "no experts",
        ),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, UnsupportedModel, "'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, UnsupportedModel, "'longrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, CorruptCheckpoint, "factor is None"),
        ("llama", {"rope_scaling": [1]}, CorruptCheckpoint, "rope_scaling"),
        ("llama", {"rms_norm_eps": "1e-5"}, CorruptCheckpoint, "rms_norm_eps"),
        ("llama", {"rope_theta": -1}, CorruptCheckpoint, "rope_theta"),
        ("llama", {"num_hidden_layers": 10**9}, CorruptCheckpoint, "num_hidden_layers"),
    ],
)
def test_what_llama_cpp_would_read_as_another_model_is_refused(
    model_type: str, changes: dict[str, Any], error: type[QConvertError], names: str
) -> None:
    with pytest.raises(error) as caught:
        keys(model_type, **changes)
    assert names in caught.value.fact


def test_head_sizes() -> None:
    assert head_size({"hidden_size": 64, "num_attention_heads": 4}) == 16
    assert head_size({"head_dim": 32}) == 32


SMALL_VOCABULARY = (
    KV.text("tokenizer.ggml.model", "gpt2"),
    KV.text("tokenizer.ggml.pre", "qwen2"),
    KV.texts("tokenizer.ggml.tokens", [chr(33 + i) for i in range(64)]),
    KV.i32s("tokenizer.ggml.token_type", [1] * 64),
    KV.texts("tokenizer.ggml.merges", ["! #"]),
)


def every_tensor(config: dict[str, Any]) -> list[GGUFTensor]:
    """A model's tensors under the names of the tables, as large as its config says."""
    arch, hidden = gguf_model(config).arch, config["hidden_size"]
    head, heads, kv_heads = head_size(config), config["num_attention_heads"], config["num_key_value_heads"]
    roles: dict[str, tuple[int, ...]] = {
        "attn.norm": (hidden,),
        "attn.q": (heads * head, hidden),
        "attn.k": (kv_heads * head, hidden),
        "attn.v": (kv_heads * head, hidden),
        "attn.o": (hidden, heads * head),
        "mlp.norm": (hidden,),
    }
    if arch.startswith("qwen3"):
        roles |= {"attn.q_norm": (head,), "attn.k_norm": (head,)}
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    stem, lead = ("mlp.experts", (experts,)) if experts else ("mlp", ())
    roles |= {f"{stem}.{part}": (*lead, inner, hidden) for part in ("gate", "up")}
    roles[f"{stem}.down"] = (*lead, hidden, inner)
    if experts:
        roles["mlp.router"] = (experts, hidden)
    if shared := config.get("shared_expert_intermediate_size"):
        roles |= {"mlp.shared.gate": (shared, hidden), "mlp.shared.up": (shared, hidden)}
        roles |= {"mlp.shared.down": (hidden, shared), "mlp.shared_gate": (1, hidden)}
    parameters = [
        ("embed", None, (64, hidden)),
        ("lm_head", None, (64, hidden)),
        ("final_norm", None, (hidden,)),
    ]
    parameters += [(role, layer, shape) for layer in range(2) for role, shape in roles.items()]
    tensors = [GGUFTensor(gguf_name(role, layer), GGMLType.F32, shape) for role, layer, shape in parameters]
    if arch.startswith("qwen2"):
        rows = {"attn.q": heads * head, "attn.k": kv_heads * head, "attn.v": kv_heads * head}
        tensors += [
            GGUFTensor(gguf_name(role, layer, "bias"), GGMLType.F32, (rows[role],))
            for layer in range(2)
            for role in rows
        ]
    return tensors


# The models whose tensors all have the names of the shared table, and nothing else.
@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]
)
def test_llama_cpp_loads_what_keys_and_names_promise(tmp_path: Path, model_type: str) -> None:
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    config = {**BASE, "model_type": model_type, "vocab_size": 64}
    if model_type == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    elif model_type.endswith("moe"):
        config |= {**MOE, "norm_topk_prob": model_type == "qwen3_moe"}
        if model_type == "qwen2_moe":
            config["shared_expert_intermediate_size"] = 64
    elif model_type == "qwen3":
        config["head_dim"] = 32
    kv = file_keys(
        facts_of(Architecture.of(config)),
        file_type=0,
        general=(),
        tokenizer=SMALL_VOCABULARY,
        requantized=False,
    )
    path = write_gguf(tmp_path / "m.gguf", kv, every_tensor(config))
    model = llama_cpp.LlamaModel(str(path), llama_cpp.LlamaModelParams(), verbose=False)
    assert (model.n_layer, model.n_embd, model.n_head, model.n_head_kv) == (2, 64, 4, 2)
    assert model.n_ctx_train == 512
