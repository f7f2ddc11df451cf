"""What options of weights cost: rows find their gradients in every container, and measured KL agrees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.measure_sensitivity import sensitivities_of
from qconvert.calibrate.run import calibrate
from qconvert.calibrate.sensitivity import (
    Sensitivity,
    TextStatistics,
    stored_sensitivities,
)
from qconvert.calibrate.statistics_file import merge, read_statistics, write_statistics
from qconvert.calibrate.text import CalibrationText, calibration_windows
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.execute import open_model, prepare
from qconvert.convert.job import Job, OpenedModel, RunOptions
from qconvert.convert.prices import priced_groups
from qconvert.core.dtypes import DType
from qconvert.core.schemes import parse_scheme
from qconvert.core.statistics import StatisticsKey
from qconvert.core.values import DenseRows, Value
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.models import Parameter
from qconvert.models.statistics_keys import input_key
from qconvert.plan.budget import smallest_cost
from qconvert.plan.recipe import Recipe, Rule
from qconvert.plan.request import GGUFTarget, Request
from qconvert.quant.dequantize import numbers
from qconvert.quant.ggml import decode_rows, encode_rows
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from qconvert.runtime.scoring import Outputs, score_hidden
from qconvert.runtime.weight_source import Weights
from tests.support.decoder_models import tokens
from tests.support.gguf_models import save_transformers_model

OPTIONS = RunOptions(jobs=2)
TEXT = tokens(2, 24, vocab=96).numpy()


def q8_0(w_RI: np.ndarray) -> np.ndarray:
    """What Q8_0 makes of rows."""
    return decode_rows(encode_rows(DenseRows(w_RI, DType.F32), "Q8_0"), "Q8_0", w_RI.shape[1])


def by_hand(checkpoint: Checkpoint, found: Mapping[int | None, Sensitivity], *, fused: bool) -> float:
    """The cost of Q8_0 in every linear and table, weight by weight as the unfused model has them.

    Where they are stored `fused`, what q, k and v do to a token is added up, and what gate and up do.
    """
    weights, total = CheckpointWeights(checkpoint), 0.0
    moved: dict[tuple[int | None, str], Any] = defaultdict(float)
    for parameter in checkpoint.architecture.parameters.values():
        head_of_tied = checkpoint.architecture.tied and parameter.role == "lm_head"
        if parameter.param != "weight" or parameter.kind not in ("linear", "embedding"):
            continue
        value = weights.get("embed" if head_of_tied else parameter.role, parameter.layer)
        if parameter.kind == "linear" and "router" in parameter.role:
            continue
        w_RI = rows_of(parameter, value, weights)
        delta_RI = q8_0(w_RI) - w_RI
        samples = found[parameter.layer].samples.get(input_key(parameter))
        if samples is None:
            total += cost_of(parameter, delta_RI, found[parameter.layer])
        else:
            stem, _, part = parameter.role.rpartition(".")
            one = (
                f"{stem} {part in 'qkv'}"
                if fused and part in ("q", "k", "v", "gate", "up")
                else parameter.role
            )
            root = np.sqrt(samples.weight / 2)
            moved[parameter.layer, one] += root * np.einsum(
                "ni,ri,nr->n", samples.x_NI.astype(float), delta_RI, samples.g_NO
            )
    return total + float(sum(moved_N @ moved_N for moved_N in moved.values()))


def rows_of(parameter: Parameter, value: Value | None, weights: CheckpointWeights) -> np.ndarray:
    if value is not None:
        return numbers(value, DType.F32).rows_RI
    prefix, _, part = parameter.role.rpartition(".")
    whole = weights.get(f"{prefix}.qkv" if part in "qkv" else f"{prefix}.gate_up", parameter.layer)
    assert whole is not None, parameter.role
    w_RI, count = numbers(whole, DType.F32).rows_RI, parameter.shape[0]
    first = {"q": 0, "k": len(w_RI) - 2 * count, "v": len(w_RI) - count, "gate": 0, "up": count}[part]
    return w_RI[first : first + count]


def cost_of(parameter: Parameter, delta_RI: np.ndarray, sensitivity: Sensitivity) -> float:
    key = input_key(parameter) if parameter.layer is not None else StatisticsKey(parameter.role)
    squares_R = sensitivity.outputs.get(key)
    if squares_R is None:  # no token came to this expert
        same = [each for other, each in sensitivity.outputs.items() if other.role == key.role]
        squares_R = np.mean(same, axis=0)
    return sensitivity.cost(delta_RI, squares_R, key.role)


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},  # rows of q and k in another order
    "Qwen2": {"tie_word_embeddings": True},  # one table, two uses
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    | {"norm_topk_prob": True},
    "Phi3": {"pad_token_id": 0},  # fused, and cut in the middle of a tensor
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_keep_their_gradients_in_a_gguf(family: str, tmp_path: Path) -> None:
    source = opened(family, tmp_path)
    found = {each.layer: each for each in sensitivities_of(source.checkpoint, TEXT)}
    job = gguf_job(source, "Q8_0")
    groups = priced_groups({"q8_0": job, "f32": gguf_job(source, "F32")}, found.values())
    cost = sum(option.cost for group in groups for option in group.options if option.label == "q8_0")
    want = by_hand(source.checkpoint, found, fused=family == "Phi3")
    assert cost == pytest.approx(want, rel=1e-4) and cost > 0
    for group in groups:
        kept = next(option for option in group.options if option.label == "f32")
        assert kept.cost == 0 and kept.nbytes > group.options[0].nbytes


def opened(family: str, folder: Path) -> OpenedModel:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    save_transformers_model(folder, family, sizes | heads | FAMILIES[family])
    return open_model(str(folder))


def gguf_job(source: OpenedModel, kind: str) -> Job:
    return prepare(source, Request("to-gguf", Recipe(), target=GGUFTarget(kind, pure=True)), OPTIONS)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_stored_statistics_give_the_diagonal(family: str, tmp_path: Path) -> None:
    """What the file holds is what a run for a target finds, but for products of two inputs."""
    source = opened(family, tmp_path)
    text = CalibrationText(TEXT, ("t",), (), "packed")
    write_statistics(tmp_path / "s.safetensors", calibrate(source.checkpoint, "m", text, scratch=tmp_path))
    stored = read_statistics(tmp_path / "s.safetensors")
    assert stored.gradients is not None and stored.gradients.tokens == TEXT.size
    found = {each.layer: each for each in stored_sensitivities(stored.gradients, stored.statistics)}
    want = {each.layer: each for each in sensitivities_of(source.checkpoint, TEXT)}
    assert found.keys() == want.keys()
    for layer, each in want.items():
        same = found[layer]
        assert same.outputs.keys() == each.outputs.keys() and same.inputs.keys() == each.inputs.keys()
        for key, squares_O in each.outputs.items():
            np.testing.assert_allclose(same.outputs[key], squares_O, rtol=1e-5)
        for role, moments in each.inputs.items():
            assert same.inputs[role].hessian_II is None
            np.testing.assert_allclose(
                same.inputs[role].second_moments_I, moments.second_moments_I, rtol=1e-5
            )


def test_sensitivities_of_two_texts_add_up(tmp_path: Path) -> None:
    source = opened("Qwen3Moe", tmp_path)
    texts = [CalibrationText(ids_WT, ("t",), (), "packed") for ids_WT in (TEXT[:1], TEXT[1:])]
    parts = [calibrate(source.checkpoint, "m", text, scratch=tmp_path) for text in texts]
    both, gradients = merge(parts), [part.gradients for part in parts]
    assert both.gradients is not None and both.gradients.tokens == TEXT.size
    for key, squares in both.gradients.squares.items():
        ones = [each.squares[key] for each in gradients if each is not None and key in each.squares]
        np.testing.assert_allclose(squares, np.sum(ones, axis=0))
    plain = calibrate(source.checkpoint, "m", texts[1])
    assert plain.gradients is None
    mixed = merge([plain, parts[0]])
    assert mixed.gradients is parts[0].gradients and mixed.statistics.tokens == TEXT.size


@pytest.mark.parametrize("what", ["negative", "tokens", "head"])
def test_gradients_that_are_none_are_refused(what: str, tmp_path: Path) -> None:
    import safetensors.numpy

    source, path = opened("Llama", tmp_path), tmp_path / "s.safetensors"
    text = CalibrationText(TEXT, ("t",), (), "packed")
    write_statistics(path, calibrate(source.checkpoint, "m", text, scratch=tmp_path))
    tensors = dict(safetensors.numpy.load_file(path))
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    if what == "negative":
        tensors["layers.1.mlp.down.gradients"] = -tensors["layers.1.mlp.down.gradients"]
    elif what == "tokens":
        tensors["gradient_tokens"] = np.zeros(1, np.int64)
    else:
        del tensors["model.lm_head.gradients"]
    safetensors.numpy.save_file(tensors, path, metadata)
    with pytest.raises(CorruptCheckpoint, match=r"s.safetensors: .*gradients"):
        read_statistics(path)


def test_a_window_that_is_too_long_is_told(tmp_path: Path) -> None:
    source = opened("Llama", tmp_path)
    with pytest.raises(BadRecipe, match="--window 65: the model has 64 positions"):
        next(sensitivities_of(source.checkpoint, np.zeros((1, 65), np.int64)))


SCHEMES = ("int3-g128", "int4-g128", "int8-g128")


class Swapped:
    """A model's weights, some of them as plans of other schemes make them."""

    def __init__(self, source: OpenedModel, jobs: Mapping[str, Job], labels: Mapping[str, str]) -> None:
        self.weights = CheckpointWeights(source.checkpoint)
        self.values: dict[tuple[str, int | None, str], Value] = {}
        for name, label in labels.items():
            unit = {unit.output.name: unit for unit in jobs[label].compiled.plan.units}[name]
            value = source.checkpoint.reader.read(unit.source, 0, unit.source.rows)
            for op in unit.ops:
                value, _ = op.apply(value)
            parameter = source.checkpoint.architecture.parameters[name]
            self.values[parameter.role, parameter.layer, "weight"] = value

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        return self.values.get((role, layer, kind)) or self.weights.get(role, layer, kind)


def outputs_of(config: DecoderConfig, weights: Weights, tokens_WT: np.ndarray) -> Outputs:
    decoder = load_decoder(config, weights)
    return decoder.outputs(decoder.hidden(torch.from_numpy(tokens_WT)).flatten(0, 1))


def divergence(reference: Outputs, other: Outputs) -> float:
    """The mean KL over all positions."""
    kl_N = score_hidden([reference, other], torch.zeros(len(reference.h_ND), dtype=torch.int64))[1].kl_N
    assert kl_N is not None
    return float(kl_N.mean())


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def test_costs_rank_and_predict_what_is_measured(assets: Path) -> None:
    """int3 in one group of linears at a time, and three mixes, on a text that was not calibrated on."""
    source = open_model(str(assets / "models" / "tiny-qwen3"))
    texts = [assets / "text" / name for name in ("calibration-novels.txt", "heldout-novel.txt")]
    learnt, held = (
        calibration_windows(source.location.path, [str(text)], tokens, 256).tokens_BT
        for text, tokens in zip(texts, (1024, 512), strict=True)
    )
    recipes = {label: Recipe(scheme=parse_scheme(label)) for label in SCHEMES}
    jobs = {label: prepare(source, Request("quantize", each), OPTIONS) for label, each in recipes.items()}
    groups = priced_groups(jobs, sensitivities_of(source.checkpoint, learnt))
    assert len(groups) == 8 * 4  # q, k, v; o; gate, up; down
    config = DecoderConfig.of(source.checkpoint.architecture)
    reference = outputs_of(config, CheckpointWeights(source.checkpoint), held)

    def measured(labels: Mapping[str, str]) -> float:
        return divergence(reference, outputs_of(config, Swapped(source, jobs, labels), held))

    found = [measured(dict.fromkeys(group.members, "int3-g128")) for group in groups]
    expected = [group.options[0].cost for group in groups]
    assert np.corrcoef(ranks(found), ranks(expected))[0, 1] > 0.9
    for most_bytes in (2_700_000, 3_300_000, 4_300_000):
        mix = smallest_cost(groups, most_bytes)
        assert len(set(mix.labels.values())) > 1
        assert 1 / 1.5 < mix.cost / measured(mix.labels) < 1.5


def test_a_weight_that_a_rule_names_is_no_choice(tmp_path: Path) -> None:
    source = opened("Llama", tmp_path)
    rules = (Rule("mlp.down", parse_scheme("int8-g32")), Rule("attn.o", None))
    recipes = [Recipe(scheme=parse_scheme(label), rules=rules) for label in ("int3-g32", "int4-g32")]
    jobs = {str(i): prepare(source, Request("quantize", each), OPTIONS) for i, each in enumerate(recipes)}
    groups = priced_groups(jobs, sensitivities_of(source.checkpoint, TEXT))
    by_name = {group.name.split(".", 3)[3]: group for group in groups if ".1." in group.name}
    assert sorted(by_name) == ["mlp.down_proj.weight", "mlp.gate_proj.weight", "self_attn.q_proj.weight"]
    fixed = by_name["mlp.down_proj.weight"].options
    assert fixed[0].cost == fixed[1].cost and fixed[0].nbytes == fixed[1].nbytes
    free = by_name["mlp.gate_proj.weight"].options
    assert free[0].cost > 2 * free[1].cost and free[0].nbytes < free[1].nbytes


def test_many_rows_are_priced_by_some_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened("Llama", tmp_path)
    found = list(sensitivities_of(source.checkpoint, TEXT))
    jobs = {kind: gguf_job(source, kind) for kind in ("Q4_0", "Q8_0")}
    monkeypatch.setattr("qconvert.convert.prices.MOST_ROWS", 24)
    groups = {group.name: group.options[1].cost for group in priced_groups(jobs, found)}
    last = {each.layer: each for each in found}[1]
    key, w_RI = StatisticsKey("mlp.gate", 1), rows_of_role(source.checkpoint, "mlp.gate")
    f_R, some_R = last.outputs[key], np.arange(0, 96, 4)  # of 96 rows
    some = last.change(key, (q8_0(w_RI) - w_RI)[some_R], some_R, f_R[some_R], f_R.sum() / f_R[some_R].sum())
    assert groups["blk.1.ffn_gate.weight"] == pytest.approx(some.cost, rel=1e-4)


def rows_of_role(checkpoint: Checkpoint, role: str) -> np.ndarray:
    value = CheckpointWeights(checkpoint).get(role, 1)
    assert value is not None
    return numbers(value, DType.F32).rows_RI


def test_error_feedback_is_priced_as_it_rounds(assets: Path) -> None:
    """Its codes cost less on tokens that they were not chosen for; mean squares stay, Hessians go."""
    source = open_model(str(assets / "models" / "tiny-qwen3"))
    text = str(assets / "text" / "calibration-novels.txt")
    tokens_WT = calibration_windows(source.location.path, [text], 1024, 256).tokens_BT
    found = list(sensitivities_of(source.checkpoint, tokens_WT, holds=True))
    costs = []
    for damping in (None, 0.01):
        statistics = TextStatistics(damping=damping)
        ask = Request("quantize", Recipe(scheme=parse_scheme("int4")), statistics=statistics)
        jobs = {"int4": prepare(source, ask, OPTIONS)}
        groups = priced_groups(jobs, statistics.keeping(found))
        costs.append(sum(group.options[0].cost for group in groups))
        key = StatisticsKey("mlp.down", 7)
        assert statistics.second_moments(key).shape == (768,) and statistics.rounding(key) is None
    assert costs[1] < 0.8 * costs[0]


def test_a_tied_embedding_is_priced_as_the_head_that_is_rounded(tmp_path: Path) -> None:
    """As in a conversion, whose codes of a tied embedding are chosen for what the head reads."""
    source = opened("Qwen2", tmp_path)
    found, costs = list(sensitivities_of(source.checkpoint, TEXT, holds=True)), []
    for tied in (False, True):
        statistics = TextStatistics(damping=0.01, tied=tied)
        target = GGUFTarget("Q4_0", pure=True)
        job = prepare(source, Request("to-gguf", Recipe(), target=target, statistics=statistics), OPTIONS)
        groups = priced_groups({"q4_0": job}, statistics.keeping(found))
        (cost,) = (group.options[0].cost for group in groups if group.name == "token_embd.weight")
        costs.append(cost)
    assert costs[1] != costs[0]
    key = StatisticsKey("embed")
    np.testing.assert_array_equal(
        statistics.second_moments(key), statistics.second_moments(StatisticsKey("lm_head"))
    )
