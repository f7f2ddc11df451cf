"""`--method awq`: scaled columns lose less, the model stays what it was, and verify finds the factors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema import validate

from qconvert.calibrate.calibration import Calibration
from qconvert.check.compare import locate
from qconvert.check.verify import verify
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.facts import numbers_of
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.convert.activation_scales import with_scales
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import Job, RunOptions
from qconvert.convert.runner import gather
from qconvert.core.dtypes import DType
from qconvert.core.schemes import parse_scheme
from qconvert.core.values import DenseRows
from qconvert.models.scale_pairs import scalable_inputs
from qconvert.models.statistics_keys import input_key
from qconvert.plan.passes.scale_inputs import statistics_key
from qconvert.plan.passes.transcode import Target
from qconvert.plan.recipe import Recipe, parse_rule
from qconvert.plan.request import GGUFTarget, Request
from qconvert.plan.scales import with_factors
from qconvert.quant.activation_scales import POWERS, candidates, factors_of_norm
from qconvert.quant.casts import cast
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.convert.test_calibrated import text
from tests.support import decoder_models
from tests.support.commands import failed, files_of, made, qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.models import byte_tokenizer, tiny, tiny_config, tiny_shapes

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SCHEMA = json.loads((Path(__file__).parents[2] / "qconvert" / "manifest.schema.json").read_text())


def uneven(family: str, seed: int = 3) -> dict[str, np.ndarray]:
    """Norms that make some channels far larger than others, as trained ones do."""
    rng, shapes = np.random.default_rng(seed), tiny_shapes(tiny_config(family, **SIZES))
    norms = [name for name in shapes if "layernorm" in name]
    return {name: rng.lognormal(0, 0.8, shapes[name]).astype(np.float32) for name in norms}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("m") / "qwen", "qwen3", changes=uneven("qwen3"), **SIZES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of q and k are permuted in GGUF; biases; no heads share values, so that v is scaled too."""
    folder = tmp_path_factory.mktemp("m") / "llama"
    changes = {name: weight for name, weight in uneven("llama").items()}
    return tiny(folder, "llama", tied=False, biases=True, changes=changes, num_key_value_heads=4, **SIZES)


def request_of(kind: str) -> Request:
    if kind.startswith("int"):
        return Request("quantize", Recipe(scheme=parse_scheme(kind)))
    if kind.startswith("gguf-"):
        return Request("to-gguf", target=GGUFTarget(kind.removeprefix("gguf-")))
    layout, _, scheme = kind.partition(":")
    return Request("convert", target=Target(layout, table=scheme))


CALIBRATION = Calibration(text(8), {"texts": ["words"]}, method="awq")


def job_of(model: Path, kind: str, calibration: Calibration = CALIBRATION, jobs: int = 1) -> Job:
    return prepare(open_model(str(model)), request_of(kind), RunOptions(jobs), calibration=calibration)


def rows_of(checkpoint: Checkpoint, name: str) -> np.ndarray:
    pieces = tuple(locate(checkpoint, name))
    value, _ = gather(pieces, checkpoint.reader, 0, sum(piece.rows for piece in pieces))
    return cast(numbers_of(value), DType.F32)[0].rows_RI.astype(np.float64)


def losses(job: Job, out: Path, squares: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What the readers of every input lose per token, from the files alone: sum of m (w - w')^2."""
    source, made = job.source.checkpoint, open_checkpoint(out)
    inputs = scalable_inputs(source.architecture)
    factors = {each.input.name: each.factors_I for each in job.compiled.scaled if each.power}
    divided = {s.name: factors[each.name] for each in inputs for s in each.sources if each.name in factors}
    found = {}
    for each in inputs:
        lost = 0.0
        for reader in each.readers:
            back_RI = rows_of(made, reader.name) / factors.get(each.name, 1.0)
            back_RI *= divided.get(reader.name, np.ones(len(back_RI)))[:, None]
            lost += float((squares[each.name] * (back_RI - rows_of(source, reader.name)) ** 2).sum())
        found[each.name] = lost
    return found


KINDS = ("int4-g128", "int3-asym-g64", "gguf-q4_k_m", "compressed-tensors:mxfp4", "bitsandbytes:nf4-nested")


@pytest.mark.parametrize("kind", KINDS)
def test_readers_lose_less_and_never_more(kind: str, qwen: Path, tmp_path: Path) -> None:
    suffix = ".gguf" if kind.startswith("gguf-") else ""
    job = with_scales(job_of(qwen, kind))
    weighted = prepare(
        open_model(str(qwen)), replace(request_of(kind), statistics=job.compiled.request.statistics),
        RunOptions(),
    )  # fmt: skip
    outs = [tmp_path / f"{name}{suffix}" for name in ("weighted", "scaled")]
    execute(weighted, outs[0])
    execute(job, outs[1])
    statistics = job.compiled.request.statistics
    assert statistics is not None
    inputs = scalable_inputs(job.source.checkpoint.architecture)
    squares = {each.name: statistics.second_moments(input_key(each.readers[0])) for each in inputs}
    plain, scaled = (losses(each, out, squares) for each, out in zip((weighted, job), outs, strict=True))
    for each in job.compiled.scaled:
        name = each.input.name
        # Rows that are divided get other scales where these are powers of two, or of many rows.
        near = 0.02 if kind.startswith(("int", "gguf")) else 0.1
        assert scaled[name] == pytest.approx(each.error * plain[name], rel=near), name
        assert each.error < 1 if each.power else each.error == 1
    assert sum(scaled.values()) < 0.98 * sum(plain.values())
    assert not verify(open_checkpoint(outs[1]), open_checkpoint(qwen)).problems


@pytest.mark.parametrize("kind", ["int8-g128", "gguf-q8_0", "gptq:int8-g128", "mlx:int8-g64"])
def test_the_model_stays_what_it_was(kind: str, llama: Path, tmp_path: Path) -> None:
    """Biases are divided too; in GGUF rows are permuted, and norms stored in float32."""
    layout, _, scheme = kind.rpartition(":")
    if layout:
        request = Request("quantize", Recipe(scheme=parse_scheme(scheme), layout=layout))
    else:
        request = request_of(kind)
    suffix = ".gguf" if kind.startswith("gguf-") else ""
    outs = [tmp_path / f"{name}{suffix}" for name in ("plain", "scaled")]
    for out, calibration in zip(outs, (None, CALIBRATION), strict=True):
        execute(prepare(open_model(str(llama)), request, RunOptions(), calibration=calibration), out)

    def hidden(path: Path) -> torch.Tensor:
        checkpoint = open_checkpoint(path)
        decoder = load_decoder(DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint))
        return decoder.hidden(torch.from_numpy(text(2, seed=5)))

    wanted, plain, scaled = map(hidden, (llama, *outs))
    lost, lost_scaled = (float((each - wanted).square().mean()) for each in (plain, scaled))
    assert lost_scaled < lost < 0.02 * float(wanted.square().mean())
    found = verify(open_checkpoint(outs[1]), open_checkpoint(llama))
    assert not found.problems and "inputs have scaled channels" in found.findings["scaled"]


def test_the_record_and_the_card_say_what_is_scaled(qwen: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    read = ("--text", words, "--tokens", 512, "--window", 64)
    out = made("quantize", qwen, "--bits", 4, "--method", "awq", *read, "-o", tmp_path / "out")
    manifest = json.loads((out / "qconvert.json").read_text())
    validate(manifest, SCHEMA)
    scaling = manifest["scaling"]
    assert scaling["inputs"] == 6 and manifest["statistics"]["tensors"] == 14
    assert manifest["statistics"]["texts"][0]["files"][0]["name"] == "words.txt"
    norm = "model.layers.0.input_layernorm.weight"
    assert scaling["sources"][norm]["readers"] == 3 and scaling["sources"][norm]["error"] < 1
    assert manifest["tensors"][norm]["certificate"]["kind"] == "folded"
    assert manifest["tensors"]["model.norm.weight"]["certificate"]["kind"] == "exact"
    card = (out / "README.md").read_text()
    assert f"Columns that read {len(scaling['sources'])} of 6 inputs are multiplied by" in card
    # Statistics that were collected before give the same bytes.
    made("calibrate", qwen, *read, "-o", tmp_path / "stats")
    how = ("--method", "awq", "--calibration", tmp_path / "stats", "--jobs", 2)
    again = made("quantize", qwen, "--bits", 4, *how, "-o", tmp_path / "again")
    assert files_of(again)["model.safetensors"] == files_of(out)["model.safetensors"]
    ran = qconvert("verify", out, "--against", qwen)
    assert ran.code == 0 and "inputs have scaled channels" in ran.out
    planned = qconvert("quantize", qwen, "--bits", 4, *how, "-o", tmp_path / "dry", "--dry-run")
    assert planned.code == 0 and not (tmp_path / "dry").exists()


def test_verify_finds_what_the_record_does_not_say(qwen: Path, tmp_path: Path) -> None:
    job = with_scales(job_of(qwen, "int4-g128"))
    execute(job, tmp_path / "out")
    path = tmp_path / "out" / "qconvert.json"
    manifest = json.loads(path.read_text())
    norm = "model.layers.0.input_layernorm.weight"
    assert norm in manifest["scaling"]["sources"]

    def problems(change: Mapping[str, object]) -> tuple[str, ...]:
        path.write_text(json.dumps(manifest | change))
        return verify(open_checkpoint(tmp_path / "out"), open_checkpoint(qwen)).problems

    assert not problems({})
    factors = manifest["scaling"]["sources"][norm] | {"factors": [0.9, 1.1]}
    wrong = manifest["scaling"] | {"sources": manifest["scaling"]["sources"] | {norm: factors}}
    assert any(f"{norm}: divided by" in each for each in problems({"scaling": wrong}))
    # Without a record, the norms are not the source's.
    assert any(f"{norm}: differs from the source" in each for each in problems({"scaling": {}}))


def test_verify_finds_columns_that_were_not_multiplied(qwen: Path, tmp_path: Path) -> None:
    """An output whose norms are divided, and nothing else, although its record says so."""
    job = with_scales(job_of(qwen, "int4-g128"))
    halves = [
        replace(each, input=replace(each.input, readers=())) for each in job.compiled.scaled if each.power
    ]
    plan = with_factors(prepare_plain(qwen).compiled.plan, job.compiled.architecture, halves)
    compiled = replace(job.compiled, plan=plan, scalable=())
    execute(replace(job, compiled=compiled, container=job.container.of(compiled)), tmp_path / "out")
    found = verify(open_checkpoint(tmp_path / "out"), open_checkpoint(qwen)).problems
    assert any("q_proj.weight: differs from the source" in each for each in found), found


def prepare_plain(model: Path) -> Job:
    return prepare(open_model(str(model)), request_of("int4-g128"), RunOptions())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_columns_make_up_for_the_rounding_of_norms(dtype: DType, offset: float) -> None:
    rng = np.random.default_rng(0)
    weight_I = rng.normal(1 - offset, 0.4, 512).astype(np.float32)
    weight_I[:2] = -offset  # a channel that is 0
    asked_I = rng.lognormal(0, 0.5, 512).astype(np.float32)
    weight_I = cast(cast(DenseRows(weight_I[:, None], DType.F32), dtype)[0], DType.F32)[0].rows_RI[:, 0]
    factors_I = factors_of_norm(weight_I, asked_I, offset, dtype)
    assert (factors_I[:2] == 1).all()
    stored = (weight_I + np.float32(offset)) / factors_I - np.float32(offset)
    kept_I = cast(cast(DenseRows(stored[:, None], DType.F32), dtype)[0], DType.F32)[0].rows_RI[:, 0]
    used_I = weight_I.astype(np.float64) + offset
    np.testing.assert_allclose((kept_I.astype(np.float64) + offset) * factors_I, used_I, rtol=1e-6, atol=1e-6)
    largest = {DType.BF16: 1 / 64, DType.F16: 1 / 512, DType.F32: 1e-6}[dtype]
    close_I = np.abs(used_I) > 0.2
    assert np.abs(factors_I / asked_I - 1)[close_I & (asked_I > 0.5)].max() < largest * (1 + 4 * offset)


def test_candidates_begin_with_no_scaling_and_are_centred() -> None:
    squares_I = np.array([0.0, 1e-4, 1.0, 9.0], np.float32)
    found = list(candidates(squares_I))
    assert [power for power, _ in found] == list(POWERS)
    assert (found[0][1] == 1).all()
    for power, factors_I in found:
        assert factors_I.dtype == np.float32 and factors_I.max() * factors_I.min() == pytest.approx(1)
        assert factors_I[3] / factors_I[2] == pytest.approx(3**power)
    assert all((factors_I == 1).all() for _, factors_I in candidates(np.zeros(4, np.float32)))


def importances(path: Path, layers: int = 2, width: int = 256) -> Path:
    random = np.random.default_rng(1)
    names = [f"blk.{i}.attn_{part}.weight" for i in range(layers) for part in "qkv"]
    path.write_bytes(imatrix_dat({name: (1, random.lognormal(0, 2, width).tolist()) for name in names}))
    return path


def test_an_importance_matrix_is_enough(tmp_path: Path) -> None:
    """For a family that does not run here; inputs that it has nothing of are left alone."""
    sizes = {"bias": False, "num_key_value_heads": 2, "head_dim": 64, **SIZES}
    model = tiny(tmp_path / "m", "llama", tied=False, **SIZES)
    config = json.loads((model / "config.json").read_text())
    names = {"model_type": "skywork", "architectures": ["SkyworkForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config | names | sizes))
    ran = qconvert("quantize", model, "--bits", 4, "--method", "awq")
    failed(
        ran,
        "config.json: model_type 'skywork' is not run here, so what its weights read cannot be measured",
        "give --calibration FILE: an importance matrix that llama-imatrix measured",
    )
    (model / "config.json").write_text(json.dumps(config))
    file = importances(tmp_path / "i.dat")
    how = ("--method", "awq", "--calibration", file)
    out = made("quantize", model, "--bits", 4, *how, "-o", tmp_path / "out")
    sources = json.loads((out / "qconvert.json").read_text())["scaling"]["sources"]
    assert set(sources) == {f"model.layers.{i}.input_layernorm.weight" for i in range(2)}


def test_what_cannot_be_scaled_is_refused(assets: Path, qwen: Path, tmp_path: Path) -> None:
    file = importances(tmp_path / "i.dat")
    how = ("--method", "awq", "--calibration", file)
    out = ("-o", tmp_path / "out")
    bert = assets / "fixtures" / "zoo" / "bert"
    names = {f"blk.0.attn_{part}.weight": (1, [1.0] * 32) for part in "qkv"}
    width = open_checkpoint(bert).architecture.dimensions[0]["hidden"]
    names = {name: (1, [1.0] * width) for name in names}
    (tmp_path / "bert.dat").write_bytes(imatrix_dat(names))
    ran = qconvert(
        "quantize", bert, "--scheme", "int8-channel", "--method", "awq", "--calibration",
        tmp_path / "bert.dat", *out,
    )  # fmt: skip
    hint = "--method nearest weighs errors by the same statistics, and scales nothing"
    failed(ran, "--method awq: BERT has no inputs whose channels can be scaled", hint)
    narrow = importances(tmp_path / "narrow.dat", width=128)
    ran = qconvert("quantize", qwen, "--bits", 4, "--method", "awq", "--calibration", narrow, *out)
    failed(
        ran,
        "blk.0.attn_q.weight: the importance matrix has 128 columns for it, the model 256",
        "give one that llama-imatrix measured on this model",
    )
    ran = qconvert("quantize", qwen, "--rule", "attn.o=int4", *how, *out)
    failed(
        ran,
        "the statistics have none of the weights that are quantized",
        "give those of this model",
    )
    ran = qconvert("quantize", qwen, "--bits", 4, *how, "--text", "default", *out)
    failed(ran, "--text: --calibration has what is measured", "leave out one of the two", code=2)
    ran = qconvert("quantize", qwen, "--target-size", "5bpw", "--method", "awq", *out)
    failed(
        ran,
        "--method awq: given together with a target, which would not know what scaling wins",
        "leave out one of the two",
        code=2,
    )
    quantized = made("quantize", qwen, "--bits", 8, "-o", tmp_path / "q8")
    ran = qconvert(
        "to-gguf", quantized, "--type", "q4_0", "--allow-requantize", *how, "-o", tmp_path / "out.gguf"
    )
    failed(
        ran,
        "model.layers.0.mlp.down_proj.weight: already quantized (int8-g128); its numbers would be scaled",
        "start from the 16-bit model, or run `qconvert dequantize` first",
    )
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_nobody_declared_may_read_what_is_scaled(qwen: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.adapter.weight": np.ones((8, 256), np.float32)}
    model = tiny(tmp_path / "m", "qwen3", changes=extra, **SIZES)
    ran = qconvert(
        "quantize", model, "--bits", 4, "--allow-unknown", "--method", "awq", "--calibration",
        importances(tmp_path / "i.dat"), "-o", tmp_path / "out",
    )  # fmt: skip
    failed(
        ran,
        "model.layers.0.adapter.weight: not a tensor of Qwen3; it may read what would be scaled",
        "--method nearest weighs errors by the same statistics, and scales nothing",
    )


def test_weights_that_are_kept_are_scaled_with_the_others(qwen: Path, tmp_path: Path) -> None:
    """A linear that makes an input and stays plain is rounded once more."""
    recipe = Recipe(scheme=parse_scheme("int4-g128"), rules=(parse_rule("mlp.gate_up=keep"),))
    request = Request("quantize", recipe)
    job = prepare(open_model(str(qwen)), request, RunOptions(), calibration=CALIBRATION)
    execute(job, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "qconvert.json").read_text())
    kinds = {name: entry["certificate"]["kind"] for name, entry in manifest["tensors"].items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "folded"
    assert not verify(open_checkpoint(tmp_path / "out"), open_checkpoint(qwen)).problems


@pytest.mark.parametrize("kind", ["int4-g32", "gguf-q4_0"])
def test_experts_are_scaled_each_by_its_own(kind: str, tmp_path: Path) -> None:
    """Stored as stacks by the class, as linears by layouts of integers, as stacks again in GGUF."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320, "norm_topk_prob": True}
    layers = {"num_hidden_layers": 2, "mlp_only_layers": []}
    model = decoder_models.tiny("qwen3_moe", **sizes, **heads, **layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" in name:
                weight.mul_(torch.exp(torch.randn_like(weight)))
    model.save_pretrained(tmp_path / "m")
    byte_tokenizer().save(str(tmp_path / "m" / "tokenizer.json"))
    job = with_scales(job_of(tmp_path / "m", kind))
    statistics = job.compiled.request.statistics
    assert statistics is not None
    weighted = prepare(
        open_model(str(tmp_path / "m")), replace(request_of(kind), statistics=statistics), RunOptions()
    )
    suffix = ".gguf" if kind.startswith("gguf-") else ""
    outs = [tmp_path / f"{name}{suffix}" for name in ("weighted", "scaled")]
    execute(weighted, outs[0])
    execute(job, outs[1])
    inputs = scalable_inputs(job.source.checkpoint.architecture)
    keys = {each.name: statistics_key(each, statistics) for each in inputs}
    squares = {name: statistics.second_moments(key) for name, key in keys.items() if key is not None}
    # Each of two layers has six experts, whose up makes what their own down reads.
    experts = [each for each in job.compiled.scaled if ".experts." in each.input.sources[0].role]
    assert len(experts) == 12 and sum(bool(each.power) for each in experts) > 1
    plain, scaled = (losses(each, out, squares) for each, out in zip((weighted, job), outs, strict=True))
    for each in experts:
        assert scaled[each.input.name] == pytest.approx(each.error * plain[each.input.name], rel=0.1)
    assert sum(scaled.values()) < 0.97 * sum(plain.values())
    assert not verify(open_checkpoint(outs[1]), open_checkpoint(tmp_path / "m")).problems
