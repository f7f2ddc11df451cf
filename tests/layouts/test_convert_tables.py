"""Conversions to codes of tables: the bytes of the field's own tools, and files that they load, on a CPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook
from qconvert.core.values import CodebookRows, DenseRows
from qconvert.formats.layouts import registry
from qconvert.quant import nested_scales
from qconvert.quant.codebook_encode import encode
from qconvert.quant.dequantize import numbers
from tests.layouts.test_loads_elsewhere import IDS, WHOLE, decoded, loaded, logits, widened
from tests.support.commands import made, qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.models import stored, tiny, tiny_config

# The codebook schemes of every layout that has any.
TABLES = {
    traits.name: [scheme.name for scheme in traits.codebooks]
    for traits in registry.all_traits()
    if traits.codebooks
}
DOWN = "model.layers.1.mlp.down_proj.weight"
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@pytest.fixture(scope="module", autouse=True)
def silence() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity_warning()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "m", "qwen3")


@pytest.fixture(scope="module")
def importance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importance matrix of the MLPs of the tiny model."""
    means = np.random.default_rng(3).lognormal(0, 2, 4096)
    widths = {"ffn_gate": 256, "ffn_up": 256, "ffn_down": tiny_config("qwen3")["intermediate_size"]}
    entries = {
        f"blk.{layer}.{name}.weight": (1, means[:width].tolist())
        for layer in range(2)
        for name, width in widths.items()
    }
    path = tmp_path_factory.mktemp("importance") / "i.dat"
    path.write_bytes(imatrix_dat(entries))
    return path


def encoded(model: Path, layout: str, scheme: str, out: Path, *flags: object) -> Path:
    return made("convert", model, "--to", layout, "--scheme", scheme, *flags, "-o", out)


@pytest.mark.parametrize(
    ("layout", "scheme", "golden"),
    [
        ("compressed-tensors", "fp8-block", "cut-ct-fp8-block"),
        ("compressed-tensors", "mxfp4", "cut-ct-mf-mxfp4"),
        ("compressed-tensors", "nvfp4", "cut-ct-mf-nvfp4"),
        ("mlx", "mxfp4", "cut-mlx-mxfp4"),
        ("bitsandbytes", "int8", "cut-bnb-int8"),
    ],
)
def test_new_codes_are_those_of_the_tool_to_the_byte(
    assets: Path, tmp_path: Path, layout: str, scheme: str, golden: str
) -> None:
    """The same arrays, but for the embedding that mlx-lm quantizes too."""
    folder = assets / "fixtures" / "quantized"
    ours = stored(encoded(folder / "source-cut", layout, scheme, tmp_path / "out", "--max-memory", "1MB"))
    theirs = stored(folder / golden)
    names = {name for name in {*ours, *theirs} if layout != "mlx" or "embed_tokens" not in name}
    assert len(names) > 30
    for name in names:
        assert ours.get(name) == theirs.get(name), name


def test_numbers_are_divided_by_rounded_scales_in_every_dtype(tmp_path: Path) -> None:
    """llm-compressor computes in the weights' dtype; torch's own operations stand in for it here."""
    for dtype, kind in (("f16", torch.float16), ("f32", torch.float32)):
        model = tiny(tmp_path / dtype, dtype=dtype)
        arrays = load_file(encoded(model, "compressed-tensors", "fp8-channel", tmp_path / f"{dtype}-o")
                           / "model.safetensors")  # fmt: skip
        weight = load_file(model / "model.safetensors")[DOWN]
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert weight.dtype is kind and torch.equal(arrays[f"{DOWN}_scale"], scale)
        assert torch.equal(arrays[DOWN].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("scheme", TABLES["compressed-tensors"])
def test_transformers_decodes_compressed_tensors_as_we_do(model: Path, tmp_path: Path, scheme: str) -> None:
    out = encoded(model, "compressed-tensors", scheme, tmp_path / "out")
    network = loaded(out, torch.bfloat16, quantization_config=WHOLE)
    theirs = network.get_parameter(DOWN).detach().view(torch.uint16).numpy()
    np.testing.assert_array_equal(theirs, decoded(out, DOWN, DType.BF16))
    plain = made("dequantize", out, "--dtype", "bf16", "-o", tmp_path / "plain")
    assert torch.equal(logits(network), logits(loaded(plain, torch.bfloat16)))


@pytest.mark.parametrize(
    ("layout", "scheme"), [("compressed-tensors", "mxfp4"), ("compressed-tensors", "nvfp4")]
)
def test_transformers_decodes_what_importance_weighed(
    model: Path, importance: Path, tmp_path: Path, layout: str, scheme: str
) -> None:
    out = encoded(model, layout, scheme, tmp_path / "out", "--imatrix", importance)
    theirs = loaded(out, torch.bfloat16, quantization_config=WHOLE).get_parameter(DOWN).detach()
    ours = decoded(out, DOWN, DType.BF16)
    np.testing.assert_array_equal(theirs.view(torch.uint16).numpy(), ours)
    assert (decoded(encoded(model, layout, scheme, tmp_path / "plain"), DOWN, DType.BF16) != ours).any()


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("scheme", TABLES["bitsandbytes"])
def test_bitsandbytes_decodes_as_we_do(
    model: Path, importance: Path, tmp_path: Path, scheme: str, weighed: bool
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    flags = ("--imatrix", importance) if weighed else ()
    out = encoded(model, "bitsandbytes", scheme, tmp_path / "out", *flags)
    module = loaded(out, torch.bfloat16).model.layers[1].mlp.down_proj
    if scheme == "int8":
        theirs = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).numpy()
        np.testing.assert_array_equal(theirs, decoded(out, DOWN, DType.F32))
    else:
        state = module.weight.quant_state
        assert state.nested is scheme.endswith("-nested")
        dense = functional.dequantize_4bit(module.weight.data, state)
        np.testing.assert_array_equal(dense.float().numpy(), widened(decoded(out, DOWN, DType.BF16)))


@pytest.mark.parametrize("scheme", TABLES["mlx"])
def test_mlx_decodes_as_we_do(model: Path, tmp_path: Path, scheme: str) -> None:
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    out = encoded(model, "mlx", scheme, tmp_path / "out")
    network, _ = load_model(out)
    linear = network.model.layers[1].mlp.down_proj
    theirs = mx.dequantize(linear.weight, linear.scales, mode=scheme)
    ours = decoded(out, DOWN, DType.BF16)
    np.testing.assert_array_equal(np.array(theirs.view(mx.uint16)), ours.view(np.uint16))
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    found = torch.from_numpy(np.array(network(mx.array(IDS.numpy())).astype(mx.float32)))
    assert (found - logits(loaded(plain))).abs().max() < 0.5


def test_nvfp4_codes_are_those_of_mlx(model: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    rows = load_file(model / "model.safetensors")[DOWN].float().numpy()
    rows[0, :64], rows[1, :16], rows[2, 5], rows[3] = 0, 1e-6, 3000, rows[3] * 300
    rows[4, :8] = [6, 0.25, 0.75, 2.5, 5, -0.25, 1.75, 3.5]
    changed = tiny(tmp_path / "m", "qwen3", changes={DOWN: rows})
    arrays = load_file(encoded(changed, "mlx", "nvfp4", tmp_path / "out") / "model.safetensors")
    bf16 = load_file(changed / "model.safetensors")[DOWN].view(torch.uint16).numpy()
    codes, scales = mx.quantize(mx.array(bf16).view(mx.bfloat16), mode="nvfp4")
    np.testing.assert_array_equal(arrays[DOWN].numpy(), np.array(codes))
    np.testing.assert_array_equal(arrays[DOWN.replace("weight", "scales")].numpy(), np.array(scales))


@pytest.mark.parametrize(("divisor", "fits"), [(1.0, True), (4.0, True), (2.0**14, False), (3.0, False)])
def test_nvfp4_scales_are_divided_for_mlx_where_that_is_exact(
    model: Path, tmp_path: Path, divisor: float, fits: bool
) -> None:
    """By a power of two that leaves E4M3 numbers; any other is refused, and requantized on request."""
    mx = pytest.importorskip("mlx.core")
    source = encoded(model, "compressed-tensors", "nvfp4", tmp_path / "source")
    arrays = load_file(source / "model.safetensors")
    globals_ = {name: torch.full_like(a, divisor) for name, a in arrays.items() if "global" in name}
    save_file(arrays | globals_, source / "model.safetensors", {"format": "pt"})
    asked = ("convert", source, "--to", "mlx", "-o", tmp_path / "mlx")
    ran = qconvert(*asked)
    if not fits:
        assert ran.code == 1 and "weight_global_scale" in ran.err and "--allow-requantize" in ran.err
        assert "14 requantized" in qconvert(*asked, "--allow-requantize").err
        return
    assert ran.code == 0 and "exact" in ran.err
    ours = load_file(tmp_path / "mlx" / "model.safetensors")
    weight, scales = (mx.array(ours[DOWN.replace("weight", part)].numpy()) for part in ("weight", "scales"))
    theirs = np.array(mx.dequantize(weight, scales, mode="nvfp4", dtype=mx.float32))
    np.testing.assert_array_equal(theirs, decoded(source, DOWN, DType.F32))
    assert qconvert("verify", tmp_path / "mlx", "--against", source).code == 0
    back = made("convert", tmp_path / "mlx", "--to", "compressed-tensors", "-o", tmp_path / "back")
    np.testing.assert_array_equal(decoded(back, DOWN, DType.F32), theirs)
    assert load_file(back / "model.safetensors")[f"{DOWN}_global_scale"] == 1


def test_stacks_of_experts_become_gpt_oss_s_blocks(assets: Path, tmp_path: Path) -> None:
    """Numbers that are MXFP4's come back equal, through transformers' own decoder."""
    plain = made("dequantize", assets / "fixtures" / "quantized" / "gptoss-mxfp4", "-o", tmp_path / "bf16")
    out = made("convert", plain, "--to", "mxfp4", "-o", tmp_path / "mxfp4")
    config = transformers.Mxfp4Config(dequantize=True)
    ours = loaded(out, torch.bfloat16, quantization_config=config)
    theirs = loaded(plain, torch.bfloat16)
    for layer, stack in ((0, "gate_up_proj"), (1, "down_proj")):
        name = f"model.layers.{layer}.mlp.experts.{stack}"
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name))
    assert torch.equal(logits(ours), logits(theirs))
    ran = qconvert("convert", out, "--to", "mxfp4", "-o", tmp_path / "again")
    assert ran.code == 0 and "exact" in ran.err
    assert stored(tmp_path / "again") == stored(out)


def test_blocks_of_gpt_oss_reach_the_largest_number_and_round_halves_up() -> None:
    rows = np.zeros((2, 32), np.float32)
    rows[0, :8] = [6, 0.25, 0.75, 2.5, 5, -0.25, -0.1, 3.4]
    rows[1, 0] = 6.01
    encoding = Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16)
    made_, _ = encode(DenseRows(rows, DType.F32), encoding, rounding=registry.traits_of("mxfp4").rounding)
    assert made_.scales_RG.tolist() == [[127], [128]]
    assert numbers(made_, DType.F32).rows_RI[0, :8].tolist() == [6, 0.5, 1, 3, 6, -0.5, 0, 3]


def test_only_stacks_of_experts_are_gpt_oss_s(model: Path, tmp_path: Path) -> None:
    ran = qconvert("convert", model, "--to", "mxfp4", "-o", tmp_path / "out")
    assert ran.code == 1 and "no stacks of experts" in ran.err and "--scheme mxfp4" in ran.err
    for scheme, way in (("mxfp4", "--to mlx or --to gguf, with the same"), ("fp8", "--allow-requantize")):
        quantized = encoded(model, "compressed-tensors", scheme, tmp_path / scheme)
        ran = qconvert("convert", quantized, "--to", "mxfp4", "--allow-requantize", "-o", tmp_path / "out")
        assert ran.code == 1 and "no stacks of experts" in ran.err and way in ran.err


def test_weights_that_loaders_stack_share_one_global_scale(model: Path, tmp_path: Path) -> None:
    out = encoded(model, "compressed-tensors", "nvfp4", tmp_path / "out", "-j", "3", "--max-memory", "1MB")
    arrays = load_file(out / "model.safetensors")
    shared = {float(arrays[f"model.layers.0.{name}.weight_global_scale"]) for name in PROJECTIONS}
    assert len(shared) == 1
    fused = made("fuse", out, "-o", tmp_path / "fused")
    assert stored(made("unfuse", fused, "-o", tmp_path / "apart")) == stored(out)
    again = encoded(model, "compressed-tensors", "nvfp4", tmp_path / "again", "-j", "1")
    assert stored(again) == stored(out)


def test_scales_are_nested_on_request_and_the_distance_is_told(model: Path, tmp_path: Path) -> None:
    plain = encoded(model, "bitsandbytes", "nf4", tmp_path / "nf4")
    out = encoded(plain, "bitsandbytes", "nf4-nested", tmp_path / "nested", "--max-memory", "1MB")
    manifest = json.loads((out / "qconvert.json").read_text())
    certificates = [entry["certificate"] for entry in manifest["tensors"].values()]
    steps = max(entry.get("max_steps", 0) for entry in certificates)
    assert {entry["kind"] for entry in certificates} == {"exact", "measured"} and 0 < steps < 0.1
    before, after = decoded(plain, DOWN, DType.F32), decoded(out, DOWN, DType.F32)
    scales = open_checkpoint(plain).reader.read(open_checkpoint(plain).tensors[DOWN], 0, 256).arrays[1]
    moved = np.abs(before - after).reshape(*scales.shape, 64).max(axis=2)
    assert 0 < (moved / scales).max() <= steps * 1.05
    assert stored(encoded(model, "bitsandbytes", "nf4-nested", tmp_path / "once")) == stored(out)


def test_nested_codes_are_bitsandbytes_s() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    np.testing.assert_array_equal(nested_scales.TABLE, functional.create_dynamic_map().numpy())
    scales = np.abs(np.random.default_rng(0).standard_normal((64, 64), np.float32))
    offset = nested_scales.offset_of(nested_scales.sums(scales))
    assert offset == pytest.approx(scales.mean(), rel=1e-6)
    encoding = Codebook("nf4", 64, DType.F32, DType.BF16)
    value, _ = nested_scales.nest(CodebookRows(np.zeros((64, 4096), np.uint8), scales, encoding), offset)
    codes, state = functional.quantize_blockwise(torch.from_numpy(scales - np.float32(offset)), blocksize=256)
    assert value.nested is not None
    np.testing.assert_array_equal(value.nested.upper_B, state.absmax.numpy())
    assert (value.nested.codes_RG == codes.numpy()).mean() > 0.99  # see quant.nested


@pytest.mark.parametrize(
    ("layout", "scheme", "said"),
    [
        ("gptq", "mxfp4", "gptq does not hold it"),
        ("mlx", "fp8-block", "mlx does not hold it"),
        ("awq", "fp8", "awq does not hold it"),
        ("compressed-tensors", "fp9", "not a scheme"),
    ],
)
def test_tables_of_other_layouts_are_refused(
    model: Path, tmp_path: Path, layout: str, scheme: str, said: str
) -> None:
    ran = qconvert("convert", model, "--to", layout, "--scheme", scheme, "-o", tmp_path / "out")
    assert ran.code == 2 and said in ran.err and not (tmp_path / "out").exists()


def test_quantize_says_which_schemes_a_layout_holds(model: Path, tmp_path: Path) -> None:
    asked = "quantize", model, "--layout", "bitsandbytes", "-o", tmp_path / "out"
    ran = qconvert(*asked, "--bits", "8")
    assert ran.code == 2 and "it holds nf4, fp4, nf4-nested, fp4-nested and int8-channel" in ran.err
    assert qconvert(*asked, "--scheme", "int8-channel").code == 0


def test_quantize_says_which_command_writes_a_table(model: Path, tmp_path: Path) -> None:
    """As it is to be typed: the hint runs."""
    ran = qconvert("quantize", model, "--bits", "4", "--rule", "mlp.down=nvfp4", "-o", tmp_path / "out")
    hint = ran.err.splitlines()[1].removeprefix("Hint: ").split(" (also")[0]
    assert ran.code == 2 and hint.startswith("qconvert convert ")
    assert "--to compressed-tensors --scheme nvfp4" in hint
    assert qconvert(*shlex.split(hint)[1:]).code == 0 and (tmp_path / "out" / "config.json").is_file()


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", intermediate_size=200)
    ran = qconvert(
        "convert", model, "--to", "compressed-tensors", "--scheme", "mxfp4", "-o", tmp_path / "out"
    )
    assert ran.code == 1 and "200 columns do not divide into blocks of 32" in ran.err


def test_a_nan_is_told_also_where_scales_come_first(tmp_path: Path) -> None:
    weight = np.ones((256, 384), np.float32)
    weight[3, 5] = np.nan
    model = tiny(tmp_path / "m", changes={DOWN: weight})
    for scheme in ("nvfp4", "fp8-tensor"):
        ran = qconvert(
            "convert", model, "--to", "compressed-tensors", "--scheme", scheme, "-o", tmp_path / "out"
        )
        assert ran.code == 1 and f"{DOWN}: NaN or Inf at row 3, column 5" in ran.err


def test_weights_of_zeros_stay_zeros(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", changes={DOWN: np.zeros((256, 384), np.float32)})
    for layout, tables in TABLES.items():
        for scheme in tables if layout != "mxfp4" else ():
            out = encoded(model, layout, scheme, tmp_path / f"{layout}-{scheme}")
            assert not decoded(out, DOWN, DType.F32).any(), (layout, scheme)


def test_a_scheme_that_is_asked_for_is_not_ignored_within_a_layout(tmp_path: Path, models: Path) -> None:
    """FP8 to int4 in one layout: codes that could be kept are not what was asked for."""
    asked = ("--to", "compressed-tensors", "--scheme")
    source = made("convert", models / "plain", *asked, "fp8-channel", "-o", tmp_path / "fp8")
    again = (*asked, "int4-channel", "--allow-requantize")
    assert " requantized" in qconvert("convert", source, *again, "-o", tmp_path / "int4").err
    kept = qconvert("convert", tmp_path / "int4", *again, "-o", tmp_path / "kept").err
    assert "requantized" not in kept and "done" in kept
