"""Names and shapes of every family, held against published totals and transformers' own classes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.models import FAMILIES, Architecture, Binding, bind
from qconvert.models.gguf.families import MODELS
from qconvert.models.parameter_table import census_of_config
from tests.support.models import EMBED, HEAD, tiny_config, tiny_shapes

BF16 = Unquantized(DType.BF16)
QWEN25_3B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN25_1B5 = QWEN25_3B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
}
QWEN3_0B6 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
LLAMA2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
MISTRAL_7B = LLAMA2_7B | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
}
TOTALS = {
    "Qwen2.5-1.5B": (QWEN25_1B5, 1_543_714_304),
    "Qwen2.5-3B": (QWEN25_3B, 3_085_938_688),
    "Qwen3-0.6B": (QWEN3_0B6, 596_049_920),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Llama-2-7B": (LLAMA2_7B, 6_738_415_616),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2-untied": {"family": "qwen2", "tied": False},
    "qwen3": {"family": "qwen3"},
    "qwen3-biases": {"family": "qwen3", "biases": True, "tied": False, "head_dim": 32},
    "llama": {"family": "llama", "tied": False},
    "llama-biases": {"family": "llama", "tied": True, "biases": True},
    "mistral": {"family": "mistral", "tied": False},
    "mistral-headdim": {"family": "mistral", "tied": False, "head_dim": 16},
}


def bound(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], **how: bool) -> Binding:
    tensors = {name: ModelTensor(name, shape, BF16) for name, shape in shapes.items()}
    return bind(Architecture.of(config), tensors, **how)


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals_from_the_config_alone(name: str) -> None:
    config, total = TOTALS[name]
    assert census_of_config(Architecture.of(config)).parameters == total


@pytest.mark.parametrize(
    ("file", "total"),
    [
        ("Qwen2-1.5B-Instruct", 1_543_714_304),
        ("Qwen3-0.6B", 596_049_920),
        ("Mistral-7B-Instruct-v0.2", 7_241_732_096),
        ("Llama-2-7b", 6_738_415_616),
    ],
)
def test_published_totals_from_the_published_configs(assets: Path, file: str, total: int) -> None:
    config = json.loads((assets / "metadata" / "configs" / f"{file}_config.json").read_text())
    assert census_of_config(Architecture.of(config)).parameters == total


@pytest.mark.parametrize(
    "file", ["Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2-72B", "Qwen3-8B", "Qwen3-32B"]
)
def test_every_name_and_shape_of_large_models(assets: Path, file: str) -> None:
    shapes = json.loads((assets / "metadata" / "index-computed" / f"{file}.shapes.json").read_text())
    stem = {"Qwen3-8B": "Qwen--Qwen3-8B", "Qwen3-32B": "Qwen--Qwen3-32B"}.get(file, f"{file}-Instruct")
    config = json.loads((assets / "metadata" / "configs" / f"{stem}_config.json").read_text())
    assert {name: list(p.shape) for name, p in Architecture.of(config).parameters.items()} == shapes


def test_a_model_type_and_a_class_belong_to_one_family() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    classes = [name for family in FAMILIES for name in family.classes]
    assert len(types) == len(set(types)) and len(classes) == len(set(classes))
    assert set(MODELS) - set(types) <= {"rwkv5"}, "a GGUF declaration for a type that the catalogue lacks"


def test_every_published_config_is_known_or_refused_in_words(assets: Path) -> None:
    refused = 0
    for path in sorted((assets / "metadata" / "configs").glob("*_config.json")):
        try:
            assert Architecture.of(json.loads(path.read_text())).layers > 0
        except QConvertError as error:
            assert error.fact.startswith("config.json: ") and error.hint, path.name
            refused += 1
    assert refused > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_those_of_the_class_in_transformers(name: str) -> None:
    import torch
    import transformers

    config = tiny_config(**VARIANTS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    state = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    architecture = Architecture.of(config)
    assert {n: p.shape for n, p in architecture.parameters.items()} == state
    assert census_of_config(architecture).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_whole_checkpoint_binds_with_nothing_left_over(name: str) -> None:
    config = tiny_config(**VARIANTS[name])
    binding = bound(tiny_shapes(config), config)
    assert set(binding.parameters) == set(tiny_shapes(config))
    assert (binding.unknown, binding.dropped, binding.stored_tied_head) == ((), (), None)


def test_roles_and_layers_of_places() -> None:
    parameters = Architecture.of(tiny_config("qwen2")).parameters
    bias = parameters["model.layers.1.self_attn.k_proj.bias"]
    assert (bias.role, bias.layer, bias.param, bias.kind) == ("attn.k", 1, "bias", "bias")
    assert (parameters[EMBED].role, parameters[EMBED].layer, parameters[EMBED].kind) == (
        "embed",
        None,
        "embedding",
    )
    assert parameters["model.layers.0.mlp.down_proj.weight"].module == "model.layers.0.mlp.down_proj"
    assert parameters["model.layers.0.input_layernorm.weight"].kind == "norm"
    assert parameters[HEAD].role == "lm_head"


def test_fused_places_stack_their_parts_in_order() -> None:
    architecture = Architecture.of(tiny_config("qwen2", num_hidden_layers=1))
    prefix = "model.layers.0."
    assert set(architecture.fused) == {
        f"{prefix}self_attn.qkv_proj.weight",
        f"{prefix}self_attn.qkv_proj.bias",
        f"{prefix}mlp.gate_up_proj.weight",
    }
    qkv = architecture.fused[f"{prefix}self_attn.qkv_proj.weight"]
    assert qkv.whole.shape == (256 + 128 + 128, 256)
    assert [part.name for part in qkv.members] == [f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"]
    assert architecture.fused[f"{prefix}self_attn.qkv_proj.bias"].whole.shape == (512,)
    assert architecture.fused[f"{prefix}mlp.gate_up_proj.weight"].whole.shape == (768, 256)
    assert qkv.whole.role == "attn.qkv" and {"attn.qkv", "mlp.gate_up"} <= set(architecture.roles)


def test_fused_weights_stand_for_their_parts() -> None:
    config = tiny_config("qwen2", num_hidden_layers=1)
    architecture, shapes = Architecture.of(config), tiny_shapes(config)
    for entry in architecture.fused.values():
        for part in entry.members:
            del shapes[part.name]
        shapes[entry.whole.name] = entry.whole.shape
    binding = bound(shapes, config)
    assert binding.fusions_found == ("attn.qkv", "mlp.gate_up")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recomputed_buffers_are_dropped_not_refused(family: str) -> None:
    config = tiny_config(family)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert bound(tiny_shapes(config) | {buffer: (32,)}, config).dropped == (buffer,)


def test_a_stored_head_of_a_tied_model_is_noticed() -> None:
    config = tiny_config()
    binding = bound(tiny_shapes(config) | {HEAD: (320, 256)}, config)
    assert binding.stored_tied_head == HEAD


def test_unknown_tensors_pass_only_when_allowed() -> None:
    config = tiny_config()
    shapes = tiny_shapes(config) | {"model.extra": (3,)}
    with pytest.raises(UnsupportedModel, match=r"^model\.extra: not a tensor of Qwen3") as caught:
        bound(shapes, config)
    assert "--allow-unknown" in str(caught.value.hint)
    assert bound(shapes, config, allow_unknown=True).unknown == ("model.extra",)


def test_a_prefix_on_every_name_is_named() -> None:
    config = tiny_config()
    with pytest.raises(UnsupportedModel) as caught:
        bound({f"base_model.{n}": s for n, s in tiny_shapes(config).items()}, config)
    assert "prefix 'base_model.'" in str(caught.value.hint)


def test_hostile_names_are_shown_escaped_and_short() -> None:
    config = tiny_config()
    for name in ("a\u202eb", "x" * 100_000, "a\nb"):
        with pytest.raises(UnsupportedModel) as caught:
            bound(tiny_shapes(config) | {name: (1,)}, config)
        assert caught.value.fact.isprintable() and len(caught.value.fact) < 300


@pytest.mark.parametrize("name", [EMBED, "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(name: str) -> None:
    config = tiny_config()
    shapes = tiny_shapes(config)
    del shapes[name]
    with pytest.raises(CorruptCheckpoint, match=f"^{name}: missing"):
        bound(shapes, config)


def test_the_missing_head_of_an_untied_model_names_the_config_key() -> None:
    config = tiny_config(tied=False)
    shapes = tiny_shapes(config)
    del shapes[HEAD]
    with pytest.raises(CorruptCheckpoint, match=r"lm_head\.weight: missing.*tie_word_embeddings"):
        bound(shapes, config)


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [
        ("vocab_size", 640, EMBED),
        ("hidden_size", 128, EMBED),
        ("intermediate_size", 400, "model.layers.0.mlp.gate_proj.weight"),
        ("num_attention_heads", 8, "model.layers.0.self_attn.q_proj.weight"),
        ("num_key_value_heads", 4, "model.layers.0.self_attn.k_proj.weight"),
        ("head_dim", 32, "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_shape_that_contradicts_the_config_names_the_key(key: str, value: int, tensor: str) -> None:
    config = tiny_config()
    with pytest.raises(CorruptCheckpoint) as caught:
        bound(tiny_shapes(config), config | {key: value})
    assert caught.value.fact.startswith(f"{tensor}: ") and key in caught.value.fact
    stored = list(tiny_shapes(config)[tensor])
    assert str(stored) in caught.value.fact


def test_more_and_fewer_layers_than_the_config_says() -> None:
    shapes = tiny_shapes(tiny_config())
    with pytest.raises(CorruptCheckpoint, match=r"model\.layers\.2\..*num_hidden_layers = 3"):
        bound(shapes, tiny_config(num_hidden_layers=3))
    with pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.") as caught:
        bound(shapes, tiny_config(num_hidden_layers=1))
    assert "num_hidden_layers = 1" in str(caught.value.hint)


def test_a_part_stored_beside_the_fused_tensor_is_refused() -> None:
    config = tiny_config()
    entry = Architecture.of(config).fused["model.layers.0.self_attn.qkv_proj.weight"]
    shapes = tiny_shapes(config) | {entry.whole.name: entry.whole.shape}
    with pytest.raises(CorruptCheckpoint, match=r"qkv_proj\.weight: stored beside .*q_proj\.weight"):
        bound(shapes, config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 0),
        ("hidden_size", -256),
        ("hidden_size", "256"),
        ("hidden_size", 256.0),
        ("hidden_size", True),
        ("vocab_size", None),
        ("vocab_size", 1 << 70),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("model_type", "qwen99"),
        ("model_type", ["qwen3"]),
        ("architectures", ["LlamaForCausalLM"]),
        ("architectures", "Qwen3ForCausalLM"),
        ("architectures", [3]),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_key(key: str, value: object) -> None:
    started = time.perf_counter()
    config = tiny_config()
    with pytest.raises((CorruptCheckpoint, UnsupportedModel)) as caught:
        bound(tiny_shapes(config), config | {key: value})
    assert caught.value.fact.startswith("config.json: ") and key in caught.value.fact
    assert time.perf_counter() - started < 1


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    config = tiny_config("llama", num_attention_heads=5)
    del config["head_dim"]
    with pytest.raises(CorruptCheckpoint, match=r"hidden_size = 256.*num_attention_heads = 5"):
        census_of_config(Architecture.of(config))


def test_a_misspelt_config_key_is_guessed() -> None:
    config = tiny_config()
    config["hidden_sizes"] = config.pop("hidden_size")
    with pytest.raises(CorruptCheckpoint, match="hidden_size is missing") as caught:
        _ = Architecture.of(config).parameters
    assert "'hidden_sizes'" in str(caught.value.hint)


def test_no_two_families_claim_one_model_type() -> None:
    claimed = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(claimed) == len(set(claimed))
    assert all(family.slot("embed").kind == "embedding" for family in FAMILIES)
