"""Models whose language part is nested: the table is of that part, the rest is carried along."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import UnsupportedModel
from qconvert.models import Architecture, Binding, bind
from qconvert.models.parameter_table import census_of_config, table_of_tensors
from tests.support.family_models import DELTA, small

BF16 = Unquantized(DType.BF16)
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_attention_heads": 2, "depth": 1}
NESTED: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": small("qwen3_5_text", "x", num_hidden_layers=4, head_dim=16, **DELTA),
        "vision_config": {**VISION, "out_hidden_size": 32, "patch_size": 14, "deepstack_visual_indexes": []},
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": small("gemma3_text", "x", head_dim=16, tie_word_embeddings=True),
        "vision_config": {
            **VISION,
            "num_hidden_layers": 1,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
}


def nested(name: str) -> tuple[Any, Binding]:
    """The class's own model, and its tensors held against the architecture."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**NESTED[name])
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    tensors = {n: ModelTensor(n, tuple(t.shape), BF16) for n, t in model.state_dict().items()}
    return model, bind(Architecture.of(NESTED[name]), tensors)


@pytest.mark.parametrize("name", NESTED)
def test_the_language_model_is_bound_and_the_rest_is_carried(name: str) -> None:
    model, binding = nested(name)
    parameter_table = table_of_tensors(binding.tensors, binding)
    architecture = Architecture.of(NESTED[name])
    language = sum(prod(p.shape) for p in architecture.stored.values())
    vision = next(row for row in parameter_table.rows if row.role == "vision").parameters
    assert len(binding.unknown) > 5 and all(
        "vision" in n or "visual" in n or "projector" in n for n in binding.unknown
    )
    assert language + vision == parameter_table.parameters == sum(p.numel() for p in model.parameters())
    assert census_of_config(architecture).parameters == parameter_table.parameters


@pytest.mark.parametrize(
    "extra", ["mtp.layers.0.mlp.up_proj.weight", "model.visual.blocks.7.attn.qkv.weight"]
)
def test_next_token_prediction_is_carried_and_nothing_else(extra: str) -> None:
    _, binding = nested("qwen3.5")
    more = {extra: ModelTensor(extra, (4, 4), BF16)}
    assert extra in bind(binding.architecture, {**binding.tensors, **more}).unknown
    strange = {"model.strange.weight": ModelTensor("model.strange.weight", (4, 4), BF16)}
    with pytest.raises(UnsupportedModel, match="strange"):
        bind(binding.architecture, {**binding.tensors, **strange})
