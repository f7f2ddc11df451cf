"""Inputs whose channels may be scaled: every declared family computes the same with any factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import RunOptions
from qconvert.convert.runner import gather
from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.models import Architecture
from qconvert.models.scale_pairs import ScalableInput, scalable_inputs
from qconvert.plan.plan import Plan, copy_of
from qconvert.plan.request import Request
from qconvert.plan.scales import ScaledInput, with_factors
from qconvert.quant.casts import cast
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.compiling import unfused
from tests.support.decoder_models import tiny
from tests.support.family_models import ALONE, RELATIVES, ROWS

CONFIGS = {
    **{name: row.config for name, row in ROWS.items()},
    **{name: config for name, (config, _) in RELATIVES.items()},
    **{name: config for name, (config, _, _) in ALONE.items()},
}
# Families in which nothing can be scaled: what norms make is the residual too, or other things come between.
NONE = {
    *("bert", "bert-masked", "bert-pretraining", "xlm-roberta", "roberta-masked", "modernbert"),
    *("modernbert-masked", "t5", "t5-1.1", "rwkv", "rwkv5"),
}
# What makes an input in some layer, where it is not as in Llama: both norms, up, and v if no heads share it.
MAKERS = {
    "olmo": {"mlp.up"},
    "olmo3": {"mlp.up"},
    "exaone4": {"mlp.up"},
    "arcee": {"attn.norm", "mlp.norm"},
    "apertus": {"attn.norm", "mlp.norm"},
    "gpt-neox": {"attn.norm", "mlp.norm", "attn.v"},
    "phi": {"attn.norm"},
    "starcoder2": {"attn.norm", "mlp.norm"},
    "stablelm-parallel": {"attn.norm", "mlp.up"},
    "mamba": {"norm"},
    "mamba2": {"norm"},
    "falcon-7b": {"attn.norm"},
    "falcon-rw": {"attn.norm", "mlp.norm", "attn.v"},
    "falcon-40b": {"attn.norm_2", "mlp.norm_2"},
    "falcon-11b": {"attn.norm"},
    "command-r": {"attn.norm", "mlp.up"},
    "command-r-plus": {"attn.norm", "mlp.up"},
    "command-r7b": {"attn.norm", "mlp.up"},
    "gpt2": {"attn.norm", "mlp.norm", "attn.v"},
    "openai-gpt": {"attn.v"},
    "gpt-oss": {"attn.norm", "mlp.norm"},
    "deepseek-v2": {"attn.norm", "attn.q_a_norm", "attn.kv_a_norm", "mlp.norm", "mlp.up"},
    "deepseek-v2-lite": {"attn.norm", "attn.kv_a_norm", "mlp.norm"},
    "yuan2": {"mlp.norm", "attn.v", "mlp.up"},
}
SHARED_HEADS = {"baichuan", "qwen1", "deepseek-moe", *MAKERS}


def random_factors(inputs: tuple[ScalableInput, ...], seed: int = 0) -> list[ScaledInput]:
    rng = np.random.default_rng(seed)
    made = (rng.lognormal(0, 0.7, each.channels).astype(np.float32) for each in inputs)
    return [ScaledInput(each, factors_I, 0.5, 1.0) for each, factors_I in zip(inputs, made, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_input_is_scaled_once_and_whole(name: str) -> None:
    architecture = Architecture.of(CONFIGS[name])
    inputs = scalable_inputs(architecture)
    assert bool(inputs) == (name not in NONE)
    makers = [source.name for each in inputs for source in each.sources]
    readers = [reader.name for each in inputs for reader in each.readers]
    assert len(makers) == len(set(makers)) and len(readers) == len(set(readers))
    for each in inputs:
        assert {reader.shape[-1] for reader in each.readers} == {each.channels}
        assert all(reader.layer == each.sources[0].layer for reader in each.readers)
        assert {source.shape[0] for source in each.sources} == {each.channels}
    tables = {p.name for p in architecture.parameters.values() if p.role in ("embed", "lm_head")}
    assert not tables & {*makers, *readers}
    found = {each.sources[0].role for each in inputs}
    if name in MAKERS:
        dense = {role for role in found if ".experts." not in role and ".shared." not in role}
        assert dense == MAKERS[name]
    elif inputs:
        assert {"attn.norm", "mlp.norm"} <= found and any(role.endswith(".up") for role in found)
        assert ("attn.v" in found) == (name in SHARED_HEADS)
    # All of a layer's fused linears that are stored as one read one input.
    by_reader = {reader.name: each.name for each in inputs for reader in each.readers}
    for entry in architecture.fused.values():
        if not entry.fusion.per_expert and entry.whole.param == "weight":
            assert len({by_reader.get(member.name) for member in entry.members}) == 1


def scaled_copy(source: Path, out: Path, scaled: list[ScaledInput]) -> Path:
    """The model written again, its inputs scaled and nothing quantized."""
    job = prepare(open_model(str(source)), Request("convert"), RunOptions(verify=False))
    plan = with_factors(job.compiled.plan, job.compiled.architecture, scaled)
    compiled = replace(job.compiled, plan=plan)
    result = execute(replace(job, compiled=compiled, container=job.container.of(compiled)), out)
    assert result.outcome.certificates(plan.units)["folded"] >= len(scaled)
    return out


def spread(model: object) -> None:
    """Random weights far from the defaults, so that a forgotten tensor shows."""
    import torch

    torch.manual_seed(0)
    assert isinstance(model, torch.nn.Module)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.8 + 0.3 * noise if "norm" in name or "ln_" in name else 0.15 * noise)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in NONE])
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    auto = transformers.AutoModelForCausalLM
    latent = {"head_dim": 4, "num_key_value_heads": 4} if name.startswith("deepseek") else {}
    config = transformers.AutoConfig.for_model(**(ROWS[name].config | latent))
    model = auto.from_config(config).float().eval()
    spread(model)
    model.save_pretrained(tmp_path / "model")
    inputs = scalable_inputs(open_checkpoint(tmp_path / "model").architecture)
    out = scaled_copy(tmp_path / "model", tmp_path / "scaled", random_factors(inputs))
    ids = torch.tensor([[1, 5, 9, 2, 77, 30, 31, 20]])
    with torch.no_grad():
        before, after = (
            auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()(ids).logits
            for path in (tmp_path / "model", out)
        )
    assert float((before - after).abs().max()) < 1e-5 * float(before.abs().max())


def test_a_clamped_input_would_not_compute_the_same(tmp_path: Path) -> None:
    """The comparison finds a pair that a family's graph forbids: gpt-oss adds 1 to what up makes."""
    import torch
    import transformers

    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(**ROWS["gpt-oss"].config)).float().eval()
    spread(model)
    model.save_pretrained(tmp_path / "model")
    parameters = open_checkpoint(tmp_path / "model").architecture.parameters.values()
    by_key = {(p.role, p.layer, p.param): p for p in parameters}
    up, bias, down = (
        by_key[f"mlp.experts.0.{role}", 0, param]
        for role, param in (("up", "weight"), ("up", "bias"), ("down", "weight"))
    )
    out = scaled_copy(
        tmp_path / "model", tmp_path / "scaled", random_factors((ScalableInput((up, bias), (down,)),))
    )
    ids = torch.tensor([[1, 5, 9, 2, 77, 30, 31, 20]])
    with torch.no_grad():
        before, after = (auto.from_pretrained(p)(ids).logits for p in (tmp_path / "model", out))
    assert float((before - after).abs().max()) > 1e-3 * float(before.abs().max())


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "cohere", "qwen2_moe"])
def test_the_decoder_computes_the_same(name: str, tmp_path: Path) -> None:
    import torch

    tiny(name, num_key_value_heads=6).save_pretrained(tmp_path / "model")
    inputs = scalable_inputs(open_checkpoint(tmp_path / "model").architecture)
    assert any(each.sources[0].role == "attn.v" for each in inputs)
    out = scaled_copy(tmp_path / "model", tmp_path / "scaled", random_factors(inputs))

    def logits(path: Path) -> torch.Tensor:
        checkpoint = open_checkpoint(path)
        decoder = load_decoder(DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint))
        return decoder.logits(decoder.hidden(torch.arange(40)[None] * 3))

    before, after = logits(tmp_path / "model"), logits(out)
    assert float((before - after).abs().max()) < 1e-5 * float(before.abs().max())


Key = tuple[str, int | None, str]


def rows_by_role(checkpoint: Checkpoint, plan: Plan) -> dict[Key, np.ndarray]:
    """The rows of every output of a plan, by what they are, as they are read."""
    found = {}
    for unit in unfused(plan, checkpoint.architecture).units:
        value, _ = gather(unit.inputs, checkpoint.reader, 0, unit.output.rows)
        assert isinstance(value, DenseRows)
        parameter = checkpoint.architecture.parameter(unit.output.name)
        assert parameter is not None
        found[parameter.role, parameter.layer, parameter.param] = cast(value, DType.F32)[0].rows_RI
    return found


def by_hand(rows: Mapping[Key, np.ndarray], scaled: list[ScaledInput]) -> dict[Key, np.ndarray]:
    made = {key: each_RI.astype(np.float64) for key, each_RI in rows.items()}
    for each in scaled:
        for reader in each.input.readers:
            made[reader.role, reader.layer, reader.param] *= each.factors_I
        for source in each.input.sources:
            made[source.role, source.layer, source.param] /= each.factors_I[:, None]
    return made


@pytest.mark.parametrize(
    "name", ["baichuan", "chatglm2", "falcon-new-decoder", "internlm2", "openelm", "phi3", "grok-1", "gpt2",
             "deepseek-v2", "mixtral", "yuan2"]
)  # fmt: skip
def test_stored_tensors_have_the_factors_of_what_they_hold(assets: Path, name: str) -> None:
    """However a class fuses, groups and turns its linears."""
    checkpoint = open_checkpoint(assets / "fixtures" / "zoo" / name)
    plan, inputs = copy_of(checkpoint.bind()), scalable_inputs(checkpoint.architecture)
    scaled = random_factors(inputs)
    rows = rows_by_role(checkpoint, plan)
    made = rows_by_role(checkpoint, with_factors(plan, checkpoint.architecture, scaled))
    expected = by_hand(rows, scaled)
    assert made.keys() == expected.keys()
    for key, rows_RI in made.items():
        np.testing.assert_allclose(rows_RI, expected[key], rtol=3e-7, err_msg=str(key))
