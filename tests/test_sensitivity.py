"""What options of weights cost: rows find their gradients in every container, and measured KL agrees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.measure_sensitivity import SecondMomentSums, sensitivities_of
from qconvert.calibrate.row_samples import RowSampler
from qconvert.calibrate.run import calibrate
from qconvert.calibrate.sensitivity import (
    Change,
    RowSamples,
    SecondMoments,
    Sensitivity,
    TextStatistics,
    stored_sensitivities,
    word_frequencies,
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
from qconvert.runtime.observers import InputKey
from qconvert.runtime.scoring import Outputs, score_hidden
from qconvert.runtime.weight_source import Weights
from tests.decoder_models import tokens
from tests.gguf_models import save_transformers_model

OPTIONS = RunOptions(jobs=2)
TEXT = tokens(2, 24, vocab=96).numpy()


def test_the_cost_is_the_quadratic_form() -> None:
    draw = np.random.default_rng(0)
    x_NI, delta_RI = (draw.standard_normal((rows, 6)).astype(np.float32) for rows in (40, 3))
    squares_R = np.array([1.0, 0.25, 4.0], np.float32)
    sums = SecondMomentSums()
    sums(InputKey(("mlp.gate", "mlp.up"), 2), torch.from_numpy(x_NI[:15]))
    sums(InputKey(("mlp.gate", "mlp.up"), 2), torch.from_numpy(x_NI[15:]))
    found = Sensitivity(2, {}, sums.moments())
    outputs_NR = x_NI @ delta_RI.T
    want = (np.square(outputs_NR).mean(0) * squares_R).sum() / 2
    assert found.cost(delta_RI, squares_R, "mlp.up") == pytest.approx(want, rel=1e-5)
    light = replace(found, inputs={"mlp.up": SecondMoments(found.inputs["mlp.up"].second_moments_I)})
    diagonal = (np.square(delta_RI) @ np.square(x_NI).mean(0) * squares_R).sum() / 2
    assert light.cost(delta_RI, squares_R, "mlp.up") == pytest.approx(diagonal, rel=1e-5)


def test_a_hessian_without_room_is_its_diagonal_and_experts_share_one() -> None:
    draw, sums = np.random.default_rng(0), SecondMomentSums(most_bytes=4 * 6 * 6)
    x_NI = torch.from_numpy(draw.standard_normal((8, 6)).astype(np.float32))
    sums(InputKey(("mlp.experts.down",), 0, 3), x_NI[:2])
    sums(InputKey(("mlp.experts.down",), 0, 5), x_NI[2:])
    sums(InputKey(("attn.o",), 0), x_NI)
    found = sums.moments()
    assert found["mlp.experts.down"].hessian_II is not None and found["attn.o"].hessian_II is None
    for each in found.values():
        np.testing.assert_allclose(each.second_moments_I, x_NI.square().mean(0), rtol=1e-5)


def test_rows_that_are_held_out_are_in_no_sum_and_price_errors() -> None:
    draw = np.random.default_rng(0)
    x_NI = draw.standard_normal((64, 6)).astype(np.float32)
    sums = SecondMomentSums(sampler=RowSampler(8), holds=True)
    for batch in np.split(x_NI, 2):
        sums(InputKey(("attn.o",), 0), torch.from_numpy(batch))
    found = sums.moments()["attn.o"]
    assert found.held_NI is not None and found.hessian_II is not None
    held_N = (x_NI[:, None] == found.held_NI).all(-1).any(1)
    assert held_N.reshape(8, 8).sum(1).tolist() == [1] * 8  # one of every eight, wherever it is
    kept_NI = x_NI[~held_N]
    np.testing.assert_allclose(found.hessian_II, kept_NI.T @ kept_NI / 56, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.second_moments_I, np.square(kept_NI).mean(0), rtol=1e-5)
    delta_RI = draw.standard_normal((3, 6)).astype(np.float32)
    want_R = np.square(found.held_NI @ delta_RI.T).mean(0)
    np.testing.assert_allclose(found.row_errors(delta_RI), want_R, rtol=1e-5)


def sampled(rows: int, every: int) -> tuple[RowSamples, np.ndarray, np.ndarray]:
    """Samples of a linear of 6 columns and 5 rows, and all the rows that they are of."""
    draw, sampler = np.random.default_rng(1), RowSampler(every)
    x_NI, g_NO = (draw.standard_normal((rows, width)).astype(np.float32) for width in (6, 5))
    for batch in (slice(0, 24), slice(24, rows)):
        sampler.take(InputKey(("attn.q", "attn.k"), 3), torch.from_numpy(x_NI[batch]))
        sampler(StatisticsKey("attn.k", 3), torch.from_numpy(g_NO[batch]))
    return sampler.samples(3, rows)[StatisticsKey("attn.k", 3)], x_NI, g_NO


def test_errors_of_rows_that_go_together_count_together() -> None:
    samples, x_NI, g_NO = sampled(64, 1)
    delta_RI = np.random.default_rng(2).standard_normal((3, 6)).astype(np.float32)
    row_R = np.array([4, 0, 1])
    key, squares_R = StatisticsKey("attn.k", 3), np.ones(3, np.float32)
    found = Sensitivity(3, {}, {}, {key: samples})
    want_N = np.einsum("ni,ri,nr->n", x_NI.astype(float), delta_RI, g_NO[:, row_R])
    change = found.change(key, delta_RI, row_R, squares_R)
    assert change.cost == pytest.approx(np.square(want_N).mean() / 2, rel=1e-5)
    parts = [found.change(key, delta_RI[r : r + 1], row_R[r : r + 1], squares_R[:1]) for r in range(3)]
    assert sum(parts, Change()).cost == pytest.approx(change.cost, rel=1e-5)  # not the sum of their costs
    assert sum(part.cost for part in parts) != pytest.approx(change.cost, rel=1e-2)
    assert Change(unsampled=2.5).cost == 2.5


def test_a_sample_is_the_same_token_at_every_input_and_stands_for_many() -> None:
    samples, x_NI, g_NO = sampled(64, 4)
    at_N = [int((x_NI == row_I).all(1).argmax()) for row_I in samples.x_NI]
    assert [number // 4 for number in at_N] == list(range(16)) and len({n % 4 for n in at_N}) > 1
    np.testing.assert_array_equal(samples.g_NO, g_NO[at_N])
    assert samples.weight == 4 / 64


def test_some_rows_stand_for_all_without_bias() -> None:
    """Over all choices of one row of three, the mean is the cost of all rows."""
    samples, _, _ = sampled(64, 1)
    key, draw = StatisticsKey("attn.k", 3), np.random.default_rng(3)
    found = Sensitivity(3, {}, {}, {key: samples})
    delta_RI = draw.standard_normal((5, 6)).astype(np.float32) + 1
    whole = found.change(key, delta_RI, np.arange(5), np.ones(5, np.float32)).cost
    # Each row drawn or not, all by itself, with a chance of 1 / 2: 32 subsets, each as likely.
    subsets = [np.array([r for r in range(5) if bits >> r & 1], np.int64) for bits in range(32)]
    changes = [found.change(key, delta_RI[R], R, np.ones(len(R), np.float32), 2.0) for R in subsets]
    squares = [sum(w * m @ m / 2 for m, w in c.moved.values()) - c.surplus for c in changes]
    assert np.mean(squares) == pytest.approx(whole, rel=1e-5)


def test_words_that_were_not_there_are_expected_as_often_as_words_that_were_there_once() -> None:
    found = word_frequencies(np.array([5, 1, 1, 0, 0, 3]))
    assert found.sum() == pytest.approx(1) and found[3] == found[4] == pytest.approx(2 / 6 / 12)
    assert found[0] == pytest.approx((5 + 2 / 6) / 12)


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for products, which waste the time of other tests otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_costs_rank_and_predict_what_is_measured(assets: Path, one_thread: None) -> None:
    """int3 in one group of linears at a time, and three mixes, on a text that was not calibrated on."""
    source = open_model(str(assets / "models" / "tiny-qwen3"))
    texts = [assets / "text" / name for name in ("calibration-novels.txt", "heldout-novel.txt")]
    learnt, held = (
        calibration_windows(source.location.path, [str(text)], 1024, 256).tokens_BT for text in texts
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
