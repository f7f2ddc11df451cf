"""142 real config.json files: each is known, counted as its class counts, and planned, by config alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.schemes import Scheme
from qconvert.models import Architecture, bind
from qconvert.models.parameter_table import census_of_config
from qconvert.plan.recipe import Recipe
from tests.support.compiling import compiled

Config = dict[str, Any]
# Parameters and saved buffers as transformers' class counts them on the meta device, vision towers too where
# config.json describes them; of Nemotron-NAS as they are declared, of Kimi-K3 what its files hold.
TOTALS = {
    "Qwen2.5-VL": 3_754_622_976,
    "Qwen--Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen--Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen--Qwen3-Next-80B-A3B-Thinking": 79_674_391_296,
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": 107_769_861_120,
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": 400_711_848_960,
    "google--gemma-4-26B-A4B": 25_805_936_206,
    "nvidia--Gemma-4-31B-IT-NVFP4": 31_273_088_876,
    "Gemma3": 4_300_079_472,
    "GLM-4.7-Flash": 29_943_393_920,
    "zai-org--GLM-5": 743_911_218_432,
    "zai-org--GLM-5.2": 743_377_019_904,
    "deepseek-ai--DeepSeek-V3.2": 671_877_944_064,
    "deepseek-ai--DeepSeek-V4-Flash": 284_334_567_511,
    "sgl-project--DeepSeek-V4-Pro-FP8": 1_572_999_528_803,
    "moonshotai--Kimi-K2.5": 1_026_879_376_368,
    "moonshotai--Kimi-K3": 2_779_931_837_184,
    "MiniMax-M2.1": 228_689_764_864,
    "XiaomiMiMo--MiMo-V2-Flash": 308_778_780_864,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": 31_577_940_288,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549_308_993_536,
    "nvidia--Nemotron-H-56B-Base-8K": 56_324_350_464,
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": 49_867_145_216,
    "MiniCPM3-4B": 4_073_875_968,
    "WizardCoder-15B": 15_517_462_528,
    "openai-gpt": 116_534_784,
}
# Why nothing can be planned from a config.
NOT_PLANNED: dict[str, str] = {}
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def configs(assets: Path) -> Iterator[tuple[str, Config]]:
    """Every model's config, without what says how its files are quantized."""
    for path in sorted((assets / "metadata" / "configs").glob("*_config.json")):
        if path.name.endswith("_hf_quant_config.json"):
            continue
        config = json.loads(path.read_text())
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part.pop("quantization_config", None)
        yield path.name.removesuffix("_config.json"), config


def with_few_experts(config: Config) -> Config:
    """The same model with at most two experts in a layer: its plan has a unit for each."""
    few = {key: min(config[key], 2) for key in EXPERTS if isinstance(config.get(key), int)}
    text = config.get("text_config")
    return {**config, **few, **({"text_config": with_few_experts(text)} if isinstance(text, dict) else {})}


def test_every_config_is_known_and_counted(assets: Path) -> None:
    found = list(configs(assets))
    assert len(found) == 142
    for name, config in found:
        parameters = census_of_config(Architecture.of(with_few_experts(config))).parameters
        assert 10**7 < parameters < 10**12, name


def test_every_config_is_planned(assets: Path) -> None:
    """Each linear of a layer is quantized and nothing else is, and the plan holds every parameter."""
    refused, done = {}, set()
    for name, config in configs(assets):
        architecture = Architecture.of(with_few_experts(config))
        stored = architecture.stored.values()
        shapes = hash(tuple((p.name, p.shape) for p in stored))
        if shapes in done:  # the same model in another encoding
            continue
        done.add(shapes)
        tensors = {p.name: ModelTensor(p.name, p.shape, Unquantized(DType.BF16)) for p in stored}
        try:
            plan = compiled(bind(architecture, tensors), recipe=Recipe(scheme=Scheme(8, None))).plan
        except Exception as error:
            refused[name] = str(error)
            continue
        quantized = {n for n, t in plan.outputs.items() if not isinstance(t.encoding, Unquantized)}
        kinds = {p.kind for n in quantized if (p := architecture.parameter(n)) is not None}
        assert kinds == {"linear"}, name
        assert sum(t.count for t in plan.outputs.values()) == sum(t.count for t in tensors.values()), name
    assert refused == NOT_PLANNED


@pytest.mark.parametrize("name", TOTALS)
def test_counts_are_those_of_the_class(assets: Path, name: str) -> None:
    config = next(config for found, config in configs(assets) if found == name)
    assert census_of_config(Architecture.of(config)).parameters == TOTALS[name]
