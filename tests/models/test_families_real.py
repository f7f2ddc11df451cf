"""Real models by their config.json: published totals, weight maps, and the time to plan the largest."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.schemes import Scheme
from qconvert.models import Architecture, bind
from qconvert.models.parameter_table import census_of_config, table_of_tensors
from qconvert.plan.recipe import Recipe
from tests.support.compiling import compiled

# Totals as the models' own pages and papers give them, or half the bytes that their 16-bit index counts.
TOTALS = {
    "Qwen--Qwen3-235B-A22B": 235_093_634_560,
    "Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3.5-25B-REAP-A3B": 25_091_371_648,
    "Qwen-72B": 72_287_920_128,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai--Mixtral-8x22B-v0.1": 140_620_634_112,
    "meta-llama--Meta-Llama-3.1-405B": 405_853_388_800,
    "deepseek-ai--DeepSeek-V3": 671_026_419_200,
    "openai--gpt-oss-20b": 20_914_757_184,
    "openai--gpt-oss-120b": 116_829_156_672,
    "falcon-40b": 41_303_293_952,
    "chatglm3-6b": 6_243_584_000,
    "glm-4-9b-chat": 9_399_951_360,
    "gpt2": 124_439_808,
    "Baichuan2-7B": 7_505_973_248,
    "Yi-6B-Chat": 6_061_035_520,
}
MAPS = {
    "chatglm3-6b": "chatglm3-6b-32k.pytorch_model.bin",
    "Qwen-72B": "Qwen-72B.model.safetensors",
    "Qwen3-4B": "Qwen3-4B.model.safetensors",
    "Qwen3.5-25B-REAP-A3B": "Qwen3.5-25B-REAP-A3B.model.safetensors",
}
# Qwen3-235B-A22B.
LARGEST = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


@pytest.fixture
def metadata(assets: Path) -> Path:
    return assets / "metadata"


def config_of(metadata: Path, name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((metadata / "configs" / f"{name}_config.json").read_text())
    return config


@pytest.mark.parametrize("name", TOTALS)
def test_totals_from_config_alone(metadata: Path, name: str) -> None:
    assert census_of_config(Architecture.of(config_of(metadata, name))).parameters == TOTALS[name]


@pytest.mark.parametrize("name", MAPS)
def test_every_name_of_a_weight_map_is_known_and_every_weight_is_in_it(metadata: Path, name: str) -> None:
    index = json.loads((metadata / "index" / f"{MAPS[name]}.index.json").read_text())
    names = set(index["weight_map"])
    architecture = Architecture.of(config_of(metadata, name)).spelled_like(names)
    placed = {n for n in names if architecture.parameter(n)}
    parts = {part.name for n in placed & set(architecture.fused) for part in architecture.fused[n].members}
    assert all(architecture.ignores(n) for n in names - placed)
    assert placed | parts >= {
        n for n in architecture.parameters if n != "lm_head.weight" or not architecture.tied
    }


def test_the_largest_has_the_names_and_shapes_of_its_class(metadata: Path) -> None:
    shapes = json.loads((metadata / "index-computed" / "Qwen3-235B-A22B.shapes.json").read_text())
    stored = Architecture.of(LARGEST).stored
    assert {name: list(parameter.shape) for name, parameter in stored.items()} == shapes


def test_planning_the_largest_takes_seconds_and_little_memory() -> None:
    parameters = Architecture.of(LARGEST).stored
    tensors = {
        name: ModelTensor(name, parameter.shape, Unquantized(DType.BF16))
        for name, parameter in parameters.items()
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()  # other work on the machine is not the plan's
    binding = bind(Architecture.of(LARGEST), tensors)
    made = compiled(binding, recipe=Recipe(scheme=Scheme(4)))
    seconds, grown = (
        time.process_time() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
    )
    assert len(made.plan.units) == 36_945
    assert table_of_tensors(tensors, binding).parameters == 235_093_634_560
    assert seconds < 3 and grown < 500_000, (seconds, grown)
