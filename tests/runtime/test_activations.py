"""Inputs of linears, rounded as loaders do it: against compressed-tensors, bitsandbytes and transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.activations import ActivationScheme, InputQuantization
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.evaluate.measure import load_runtime
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.compressed_tensors.activations import activations, scheme_of
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.input_rounding import round_inputs
from qconvert.runtime.load import load_decoder
from tests.support.commands import made, qconvert
from tests.support.models import tiny

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8 = {**INT8, "type": "float"}
STATIC = {"strategy": "tensor", "dynamic": False}
NVFP4 = {
    **{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    "scale_dtype": "torch.float8_e4m3fn",
}
MX = {"type": "float", "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"}


def inputs_2TI() -> torch.Tensor:
    """Rows of many magnitudes, one of zeros alone, and one that begins with a group of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 256, generator=generator) * 10 ** torch.randn(2, 5, 1, generator=generator)
    x[0, 0] = 0
    x[1, 1, :32] = 0
    return x


@pytest.mark.parametrize(
    ("args", "label"),
    [
        (INT8, "int8 per token"),
        ({**INT8, "symmetric": False}, "int8-asym per token"),
        ({**INT8, "num_bits": 4}, "int4 per token"),
        ({**INT8, "strategy": "tensor"}, "int8 per tensor"),
        ({**INT8, "strategy": "group", "group_size": 32}, "int8 per group of 32"),
        (FP8, "fp8 per token"),
        ({**FP8, "strategy": "tensor"}, "fp8 per tensor"),
        ({**FP8, "strategy": "group", "group_size": 128}, "fp8 per group of 128"),
        (NVFP4, "fp4 per group of 16"),
        ({**MX, "num_bits": 4}, "fp4 per group of 32"),
        ({**MX, "num_bits": 8}, "fp8 per group of 32"),
        ({**INT8, **STATIC}, "static int8"),
        ({**INT8, **STATIC, "symmetric": False}, "static int8-asym"),
        ({**FP8, **STATIC}, "static fp8"),
    ],
)
def test_inputs_are_rounded_to_the_numbers_of_compressed_tensors(args: dict[str, Any], label: str) -> None:
    x, theirs = inputs_2TI(), QuantizationArgs(**args)
    shared = torch.tensor([123.4]) if args["dynamic"] == "local" else None
    scale, zero = torch.tensor([0.037]), torch.tensor([0 if args.get("symmetric", True) else 3])
    stored = (123.4,) if shared is not None else () if args["dynamic"] else (0.037, float(zero))
    if args["dynamic"]:
        scale, zero = compute_dynamic_scales_and_zp(x, theirs, torch.nn.Identity(), global_scale=shared)
    expected = fake_quantize(x, scale, zero, theirs, global_scale=shared)
    scheme = scheme_of(args)
    assert scheme.label == label
    found = round_inputs(x, InputQuantization(scheme, *stored))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (found != x).any()


def test_a_row_that_is_no_multiple_of_the_group_is_rounded_as_if_zeros_followed() -> None:
    x, how = torch.randn(3, 200), InputQuantization(ActivationScheme(8, True, "group", 128))
    padded = round_inputs(torch.nn.functional.pad(x, (0, 56)), how)
    assert torch.equal(round_inputs(x, how), padded[:, :200])


def test_inputs_beyond_the_bound_of_fbgemm_are_cut_to_it() -> None:
    """`quantize_fp8_per_row`: the largest magnitude of a row is at most `scale_ub`, and codes at most 448."""
    x, scheme = inputs_2TI(), ActivationScheme(8, True, "token", most=2.0)
    assert scheme.label == "fp8 per token up to 2" and x.abs().max() > 2 > x.abs().amax(-1).min()
    largest = x.abs().amax(-1, keepdim=True).clamp(1e-12, 2.0)
    scale = largest / 448
    expected = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    found = round_inputs(x, InputQuantization(scheme))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.abs().max() == 2


@pytest.mark.parametrize("threshold", [6.0, math.inf])
def test_llm_int8_multiplies_what_bitsandbytes_does(threshold: float) -> None:
    functions = pytest.importorskip("bitsandbytes.autograd._functions")
    torch.manual_seed(0)
    x, w_OI = torch.randn(7, 64).half(), torch.randn(16, 64).half()
    x[3, 5], x[:, 9] = 20.0, 7.0
    state = functions.MatmulLtState()
    state.threshold = 0.0 if threshold == math.inf else threshold
    state.CB, state.SCB, _ = functions.F.int8_vectorwise_quant(w_OI)
    theirs = functions.MatMul8bitLt.apply(x, w_OI, None, None, state).float()
    decoded_OI = state.CB.float() * state.SCB[:, None] / 127
    scheme = ActivationScheme(8, False, "token", outliers=threshold)
    ours = round_inputs(x.float(), InputQuantization(scheme)) @ decoded_OI.T
    assert ("but for outliers" in scheme.label) is (threshold == 6)
    # Theirs are sums in half precision, up to 40.
    assert (ours - theirs).abs().max() < 0.03
    assert (x.float() @ decoded_OI.T - theirs).abs().max() > 0.1


def declared(folder: Path, out: Path, args: dict[str, Any], stored: Callable[[str], dict[str, Any]]) -> Path:
    """A copy of a folder whose linears have these input_activations and, by module, these arrays."""
    shutil.copytree(folder, out)
    (out / "qconvert.json").unlink(missing_ok=True)
    config = json.loads((out / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = args
    (out / "config.json").write_text(json.dumps(config))
    arrays = load_file(out / "model.safetensors")
    for name in [name for name in arrays if name.endswith(".weight_scale")]:
        arrays |= {k: torch.tensor([v]) for k, v in stored(name.removesuffix(".weight_scale")).items()}
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    return out


def log_p(network: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return network(tokens_BT).logits.double().log_softmax(-1)


def loaded(folder: Path) -> torch.nn.Module:
    network: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return network.eval()


@pytest.mark.parametrize(
    ("scheme", "args", "step"),
    [
        ("int8-channel", None, 0.0),
        ("int8-channel", {**INT8, **STATIC}, 127.5),
        ("fp8-channel", None, 0.0),
        ("fp8-channel", {**FP8, **STATIC}, 448.0),
        ("fp8-block", None, 0.0),
    ],
)
def test_the_decoder_computes_what_transformers_computes(
    assets: Path, tmp_path: Path, scheme: str, args: dict[str, Any] | None, step: float
) -> None:
    """Two layers of a trained model: there a rounding that falls the other way has little to spoil.

    On 8 layers, 32 windows of 256 tokens, KL is 3.508e-4 here and 3.499e-4 there for int8, 1.1668e-3 and
    1.1636e-3 for FP8, 4.189e-3 and 4.187e-3 for static int8; with exact inputs 2.2e-5 and 3.0e-4.
    """
    source = assets / "fixtures" / "quantized" / "source-cut"
    layout = "int-quantized" if scheme.startswith("int8") else "compressed-tensors"
    folder = made("convert", source, "--to", layout, "--scheme", scheme, "-o", tmp_path / "q")
    if args is not None:
        folder = declared(folder, tmp_path / "s", args, lambda module: {f"{module}.input_scale": 6 / step})
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    tokens_BT = torch.randint(0, vocab, (4, 128), generator=torch.Generator().manual_seed(1))
    theirs, plain = log_p(loaded(folder), tokens_BT), log_p(loaded(source), tokens_BT)
    checkpoint = open_checkpoint(folder)
    decoder = load_runtime(checkpoint)
    ours = decoder.logits(decoder.hidden(tokens_BT)).double().log_softmax(-1)
    weights = CheckpointWeights(checkpoint)
    exact = load_decoder(DecoderConfig.of(checkpoint.architecture), weights)
    without = exact.logits(exact.hidden(tokens_BT)).double().log_softmax(-1)

    def distance(other: torch.Tensor) -> float:
        return float((plain.exp() * (plain - other)).sum(-1).mean())

    assert distance(ours) == pytest.approx(distance(theirs), rel=0.02)
    assert distance(without) < 0.7 * distance(theirs)


@pytest.mark.parametrize("layout", [Layout.REFERENCE, Layout.AUTO])
def test_the_layouts_of_the_cpu_round_alike(tmp_path: Path, layout: Layout) -> None:
    model = tiny(tmp_path / "m", num_hidden_layers=1)
    folder = made("convert", model, "--to", "int-quantized", "--scheme", "int8-channel", "-o", tmp_path / "q")
    checkpoint = open_checkpoint(folder)
    weights, config = CheckpointWeights(checkpoint), DecoderConfig.of(checkpoint.architecture)
    reference = load_decoder(config, weights, inputs=weights.inputs)
    decoder = load_decoder(config, weights, layout=layout, inputs=weights.inputs)
    tokens_BT = torch.arange(40)[None] % 200
    expected, found = reference.hidden(tokens_BT), decoder.hidden(tokens_BT)
    assert decoder.step is None and (found - expected).abs().max() < 2e-3 * expected.abs().max()
    cache = decoder.cache(1, 2)
    decoder.prefill(tokens_BT[:, :1], cache)
    following = decoder.decode(tokens_BT[0, 1:2], cache)
    assert (following - reference.logits(expected[:, 1])).abs().max() < 0.05 * following.abs().max()


def test_a_quantized_head_rounds_its_inputs_too(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", num_hidden_layers=1, tie_word_embeddings=False)
    keep = ("--rule", "lm_head=int8-channel")
    asked = ("quantize", model, "--layout", "int-quantized", "--scheme", "int8-channel", *keep)
    decoder = load_runtime(open_checkpoint(made(*asked, "-o", tmp_path / "q")))
    h_ND = torch.randn(3, decoder.config.hidden)
    assert decoder.head_inputs is not None
    rounded = round_inputs(h_ND, decoder.head_inputs)
    assert torch.equal(decoder.outputs(h_ND).h_ND, rounded) and not torch.equal(rounded, h_ND)


@pytest.fixture(scope="module")
def eight_bits(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trained model, and its W8A8."""
    model = assets / "models" / "tiny-qwen3"
    out = tmp_path_factory.mktemp("w8a8") / "int8"
    return model, made("convert", model, "--to", "int-quantized", "--scheme", "int8-channel", "-o", out)


def test_eval_measures_what_is_served_and_says_so(assets: Path, eight_bits: tuple[Path, Path]) -> None:
    model, folder = eight_bits
    text = ("--text", assets / "text" / "tinyshakespeare.txt", "--context", 128, "--chunks", 2)
    asked = ("eval", "perplexity", folder, "--reference", model, *text, "--json")
    served, exact = (qconvert(*asked, *how).json["models"][1] for how in ((), ("--activations", "exact")))
    assert served["versus"]["kl"]["mean"]["value"] > 5 * exact["versus"]["kl"]["mean"]["value"]
    assert served["activations"] == "int8 per token, as loaders round them"
    assert exact["activations"] == "exact, though loaders use int8 per token"
    assert served["activations"] in served["arithmetic"] and exact["activations"] in exact["arithmetic"]


def test_generate_is_exact_unless_asked_and_says_so(eight_bits: tuple[Path, Path]) -> None:
    asked = ("generate", eight_bits[1], "-p", "It was", "-n", 2)
    ran = qconvert(*asked)
    assert ran.code == 0 and "exact, though loaders use int8 per token; see --activations" in ran.err
    served = qconvert(*asked, "--activations", "as-loaded", "--json")
    assert served.json["computed"]["activations"] == "int8 per token, as loaders round them"
    assert served.json["computed"]["step"] is None and "exact" not in served.err


def test_inspect_check_and_the_card_name_the_widths(eight_bits: tuple[Path, Path], tmp_path: Path) -> None:
    model, folder = eight_bits
    said = "W8A8 (inputs int8 per token)"
    assert f"products: {said}\n" in qconvert("inspect", folder).out
    assert qconvert("inspect", folder, "--json").json["products"] == [said]
    assert f"note: linears: vllm computes {said}\n" in qconvert("check", folder, "--for", "vllm").out
    assert f"Loaders compute {said} in the quantized linears." in (folder / "README.md").read_text()
    mixed = made("quantize", model, "--bits", 4, "--rule", "mlp.down=int8", "-o", tmp_path / "mixed")
    assert qconvert("inspect", mixed, "--json").json["products"] == ["W4A16", "W8A16"]
    assert qconvert("inspect", model, "--json").json["products"] == []


def test_numbers_stored_for_inputs_are_read_and_not_lost(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", num_hidden_layers=1)
    folder = made("convert", model, "--to", "compressed-tensors", "--scheme", "nvfp4", "-o", tmp_path / "q")
    name = "input_global_scale"
    four = declared(folder, tmp_path / "w4a4", NVFP4, lambda module: {f"{module}.{name}": 300.0})
    assert qconvert("inspect", four, "--json").json["products"] == ["W4A4 (inputs fp4 per group of 16)"]
    weights = CheckpointWeights(open_checkpoint(four))
    assert weights.inputs("mlp.down", 0) == InputQuantization(scheme_of(NVFP4), 300.0)
    assert load_runtime(open_checkpoint(four)).hidden(torch.arange(5)[None]).isfinite().all()
    ran = qconvert("fuse", four, "-o", tmp_path / "f")
    assert ran.code == 1 and "inputs of linears are fp4 per group of 16" in ran.err
    assert qconvert("dequantize", four, "-o", tmp_path / "d").code == 0
    arrays = load_file(four / "model.safetensors")
    arrays.pop("model.layers.0.mlp.down_proj.input_global_scale")
    save_file(arrays, four / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"down_proj\.input_global_scale: missing"):
        open_checkpoint(four)


def test_targets_and_ignored_names_say_whose_inputs_are_rounded() -> None:
    groups = {
        "all": {"targets": ["Linear"], "input_activations": INT8},
        "some": {"targets": ["re:.*down_proj$"], "input_activations": FP8},
        "none": {"targets": ["model.layers.0.mlp.up_proj"], "input_activations": None},
    }
    config = {"quantization_config": {"config_groups": groups, "ignore": ["lm_head", "re:.*gate$"]}}

    def label(module: str) -> str | None:
        tensor = ModelTensor(f"{module}.weight", (8, 8), AffineInt(8, None, True, DType.BF16))
        scheme = activations(config, tensor)
        return scheme.label if scheme else None

    assert label("model.layers.0.self_attn.q_proj") == "int8 per token"
    assert label("model.layers.0.mlp.down_proj") == "fp8 per token"
    assert [label(each) for each in ("model.layers.0.mlp.up_proj", "lm_head", "mlp.gate")] == [None] * 3


@pytest.mark.parametrize(
    "args",
    [
        {"num_bits": 6},
        {**INT8, "strategy": "channel"},
        {**INT8, "dynamic": False},
        {**INT8, "strategy": ["token"]},
        {**INT8, "dynamic": {}},
        {**MX, "num_bits": 4, "group_size": 0},
        {**FP8, "symmetric": False},
        {**FP8, "scale_dtype": "torch.int8"},
    ],
)
def test_other_schemes_are_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"^config\.json: input_activations \{"):
        scheme_of(args)


def test_fp8_has_a_scale_for_each_block_of_a_row_or_one_that_is_stored() -> None:
    tensor = ModelTensor("a.weight", (256, 256), Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128))
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config: dict[str, Any] = {"quantization_config": settings}
    scheme = registry.activations(config, tensor)
    assert scheme is not None and scheme.label == "fp8 per group of 128"
    config["quantization_config"]["activation_scheme"] = "static"
    scheme = registry.activations(config, tensor)
    assert scheme is not None and (scheme.label, scheme.stored) == ("static fp8", ("activation_scale",))


@pytest.mark.parametrize(
    ("pattern", "error"),
    [("re:(a+)+$", UnsupportedModel), ("re:" + "a?" * 9, UnsupportedModel), ("re:(", CorruptCheckpoint)],
)
def test_patterns_of_a_file_that_may_take_for_ever_are_not_run(pattern: str, error: type[Exception]) -> None:
    groups = {"g": {"targets": [pattern], "input_activations": INT8}}
    tensor = ModelTensor("a" * 40 + "!.weight", (8, 8), AffineInt(8, None, True, DType.BF16))
    with pytest.raises(error, match=r"^config\.json: "):
        activations({"quantization_config": {"config_groups": groups}}, tensor)
